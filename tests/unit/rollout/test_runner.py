"""Tests of rl.rollout.runner."""

import math

import pytest

from rl.core.errors import CompletionError, ConfigError, DataError, InfraError
from rl.core.types import Message, Prompt, RolloutEnd, RolloutStatus, TurnFlag
from rl.environments.base import Episode, StepResult
from rl.generation.generator import SamplingParams
from rl.rollout.runner import Attempt, GroupRunner, RunnerLimits
from rl.rollout.unscored import Unscored
from tests.support.clock import FakeClock
from tests.support.fakes import EchoEnvironment, FakeGenerator, make_prompt, plain_conversations

SAMPLING = SamplingParams(1.0, 1.0, None, 8, (2,), ("</end>",), 0)
ATTEMPT = Attempt(run_seed=1, group_id=7, replacement=0, number=0, prefix="train")


def make_runner(
    generator: FakeGenerator, environment: EchoEnvironment, clock: FakeClock, max_turns: int = 1, max_tokens: int = 64
) -> GroupRunner:
    limits = RunnerLimits(max_turns, max_tokens, generation_timeout_s=10.0, env_timeout_s=5.0)
    return GroupRunner(generator, {"echo": environment}, SAMPLING, plain_conversations(), limits, clock, Unscored())


async def test_siblings_keep_their_order_and_rewards() -> None:
    clock = FakeClock()
    generator = FakeGenerator(clock, latency=lambda request: 3.0 if "-s0-" in request else 1.0)
    rollouts = await clock.run(make_runner(generator, EchoEnvironment(), clock).run(make_prompt(0), 3, ATTEMPT))
    assert [rollout.reward for rollout in rollouts] == [0.0, 1.0, 2.0]
    assert [rollout.rollout_id for rollout in rollouts] == ["7/0", "7/1", "7/2"]


async def test_every_sample_and_attempt_has_its_own_seed_and_the_group_one_session() -> None:
    clock = FakeClock()
    generator = FakeGenerator(clock)
    runner = make_runner(generator, EchoEnvironment(), clock)
    for number in range(2):
        await runner.run(make_prompt(0), 4, Attempt(1, 7, 0, number, "train"))
    assert len({request.params.seed for request in generator.requests}) == 8
    assert len({request.request_id for request in generator.requests}) == 8
    assert {request.session for request in generator.requests} == {"train-7"}


async def test_turns_go_on_until_the_environment_is_done_and_rewards_add_up() -> None:
    clock = FakeClock()
    environment = EchoEnvironment(reward=lambda index: 1.0 + index, turns=3)
    rollouts = await make_runner(FakeGenerator(clock), environment, clock, max_turns=5).run(make_prompt(0), 2, ATTEMPT)
    assert [len(rollout.turns) for rollout in rollouts] == [3, 3]
    assert [rollout.reward for rollout in rollouts] == [3.0, 6.0]
    assert rollouts[0].turns[1].prompt_tokens == (1, 2, 3, 5, 6, 9)


@pytest.mark.parametrize(
    ("max_turns", "max_tokens", "turns", "end"),
    [
        (2, 64, 2, RolloutEnd.MAX_TURNS),
        (9, 64, 4, RolloutEnd.DONE),
        # 3 tokens of prompt, then 2 sampled and 1 answered per turn: the third turn begins with 9 tokens.
        (9, 10, 3, RolloutEnd.CONTEXT),
        (9, 9, 2, RolloutEnd.CONTEXT),
        (9, 8, 2, RolloutEnd.CONTEXT),
        (9, 4, 1, RolloutEnd.CONTEXT),
    ],
)
async def test_a_rollout_ends_with_its_environment_its_turns_or_its_context(
    max_turns: int, max_tokens: int, turns: int, end: RolloutEnd
) -> None:
    clock = FakeClock()
    generator = FakeGenerator(clock)
    runner = make_runner(generator, EchoEnvironment(turns=4), clock, max_turns, max_tokens)
    (rollout,) = await runner.run(make_prompt(0), 1, ATTEMPT)
    assert (len(rollout.turns), rollout.end) == (turns, end)
    assert rollout.is_truncated == (end is RolloutEnd.CONTEXT)
    assert len(generator.requests) == turns
    for turn in rollout.turns:
        assert len(turn.prompt_tokens) < max_tokens
    # What the environment said last stands in the turn and in no tokens.
    assert bool(rollout.turns[-1].env_messages) == (end is not RolloutEnd.DONE)
    assert rollout.num_tokens == 3 + 2 * turns + (turns - 1)


async def test_siblings_have_their_own_turns_flags_components_and_states() -> None:
    class Counting(EchoEnvironment):
        async def step(self, prompt: Prompt, episodes: list[Episode]) -> list[StepResult]:
            return [self.answer(episode) for episode in episodes]

        def answer(self, episode: Episode) -> StepResult:
            asked = 1 + (episode.state or 0)
            assert asked == 1 + len(episode.turns)
            done = asked > episode.sample
            flags = frozenset({TurnFlag.INVALID_TOOL_CALL}) if asked == 1 else frozenset()
            messages = () if done else (Message("tool", "x" * asked),)
            return StepResult(messages, 1.0, done, components={"a": 0.5}, flags=flags, state=asked)

    clock = FakeClock()
    runner = make_runner(FakeGenerator(clock), Counting(), clock, max_turns=5)
    rollouts = await runner.run(make_prompt(0), 3, ATTEMPT)
    assert [len(rollout.turns) for rollout in rollouts] == [1, 2, 3]
    assert [rollout.reward for rollout in rollouts] == [1.0, 2.0, 3.0]
    assert [rollout.reward_components for rollout in rollouts] == [{"a": 0.5}, {"a": 1.0}, {"a": 1.5}]
    assert [len(turn.flags) for turn in rollouts[2].turns] == [1, 0, 0]
    assert rollouts[2].turns[2].prompt_tokens == (1, 2, 3, 5, 6, 9, 5, 6, 9, 9)


async def test_every_turn_is_sampled_with_the_runs_settings_and_a_seed_of_its_own() -> None:
    clock = FakeClock()
    generator = FakeGenerator(clock)
    runner = make_runner(generator, EchoEnvironment(turns=3), clock, max_turns=3)
    await runner.run(make_prompt(0), 2, ATTEMPT)
    assert {request.params.stop_strings for request in generator.requests} == {("</end>",)}
    assert {request.params.stop_token_ids for request in generator.requests} == {(2,)}
    assert len({request.params.seed for request in generator.requests}) == 6


async def test_an_unusable_completion_is_asked_for_once_more_with_another_seed() -> None:
    clock = FakeClock()
    spoiled = CompletionError("nan")
    generator = FakeGenerator(clock, failure=lambda request: spoiled if request.endswith("-s1-a0-t0") else None)
    rollouts = await make_runner(generator, EchoEnvironment(), clock).run(make_prompt(0), 3, ATTEMPT)
    assert [rollout.rollout_id for rollout in rollouts] == ["7/0", "7/1", "7/2"]
    assert len({request.params.seed for request in generator.requests}) == 4


async def test_a_sample_with_two_unusable_completions_leaves_its_group_and_the_others_go_on() -> None:
    clock = FakeClock()
    generator = FakeGenerator(clock, failure=lambda request: CompletionError("nan") if "-s1-a0-t1" in request else None)
    runner = make_runner(generator, EchoEnvironment(turns=3), clock, max_turns=3)
    rollouts = await runner.run(make_prompt(0), 3, ATTEMPT)
    assert [rollout.rollout_id for rollout in rollouts] == ["7/0", "7/2"]
    assert [len(rollout.turns) for rollout in rollouts] == [3, 3]
    assert [request.request_id for request in generator.requests if "-s1-" in request.request_id] == [
        "train-7.0-s1-a0-t0",
        "train-7.0-s1-a0-t1",
        "train-7.0-s1-a0-t1-r1",
    ]


async def test_a_group_without_a_usable_completion_is_a_failed_attempt() -> None:
    clock = FakeClock()
    generator = FakeGenerator(clock, failure=lambda _: CompletionError("nan"))
    environment = EchoEnvironment()
    with pytest.raises(InfraError, match="none of its 2 samples got a usable completion"):
        await make_runner(generator, environment, clock).run(make_prompt(0), 2, ATTEMPT)
    assert environment.calls == 0


async def test_an_exception_of_an_environment_fails_its_samples_and_not_the_run() -> None:
    class Broken(EchoEnvironment):
        async def step(self, prompt: Prompt, episodes: list[Episode]) -> list[StepResult]:
            if episodes[0].turns:
                raise KeyError("tool")
            return await super().step(prompt, episodes)

    clock = FakeClock()
    runner = make_runner(FakeGenerator(clock), Broken(turns=9), clock, max_turns=5)
    rollouts = await runner.run(make_prompt(0), 2, ATTEMPT)
    assert [rollout.status for rollout in rollouts] == [RolloutStatus.REWARD_ERROR] * 2
    assert [len(rollout.turns) for rollout in rollouts] == [2, 2]
    assert not any(rollout.is_valid for rollout in rollouts)


async def test_going_on_without_a_message_is_an_error_of_the_environment() -> None:
    class Silent(EchoEnvironment):
        async def step(self, prompt: Prompt, episodes: list[Episode]) -> list[StepResult]:
            return [StepResult((), 0.0, done=False) for _ in episodes]

    clock = FakeClock()
    with pytest.raises(DataError, match="prompt p0 turn 0: the environment goes on without a message"):
        await make_runner(FakeGenerator(clock), Silent(), clock, max_turns=2).run(make_prompt(0), 1, ATTEMPT)


async def test_the_completion_is_bounded_by_what_the_context_leaves() -> None:
    clock = FakeClock()
    generator = FakeGenerator(clock)
    await make_runner(generator, EchoEnvironment(), clock, max_tokens=7).run(make_prompt(0), 1, ATTEMPT)
    assert generator.requests[0].params.max_new_tokens == 4


async def test_a_prompt_that_fills_the_context_is_a_data_error() -> None:
    clock = FakeClock()
    with pytest.raises(DataError, match="leaves no room"):
        await make_runner(FakeGenerator(clock), EchoEnvironment(), clock, max_tokens=3).run(make_prompt(0), 1, ATTEMPT)


async def test_a_failed_reward_is_not_a_zero() -> None:
    clock = FakeClock()
    environment = EchoEnvironment(status=lambda i: RolloutStatus.REWARD_ERROR if i == 1 else RolloutStatus.OK)
    rollouts = await make_runner(FakeGenerator(clock), environment, clock).run(make_prompt(0), 2, ATTEMPT)
    assert rollouts[0].status is RolloutStatus.OK
    assert rollouts[1].status is RolloutStatus.REWARD_ERROR
    assert math.isnan(rollouts[1].reward)


async def test_the_first_failing_sibling_cancels_the_others() -> None:
    clock = FakeClock()
    generator = FakeGenerator(
        clock,
        latency=lambda request: 1.0 if "-s1-" in request else 9.0,
        failure=lambda request: InfraError("engine died") if "-s1-" in request else None,
    )
    with pytest.raises(InfraError, match="engine died"):
        await clock.run(make_runner(generator, EchoEnvironment(), clock).run(make_prompt(0), 3, ATTEMPT))
    assert clock.now() == 1.0
    assert generator.running == 0


async def test_a_hanging_generator_and_a_hanging_environment_meet_their_deadlines() -> None:
    class Hanging(EchoEnvironment):
        async def step(self, prompt: Prompt, episodes: list[Episode]) -> list[StepResult]:
            await clock.sleep(1e9)
            return []

    clock = FakeClock()
    with pytest.raises(InfraError, match=r"generation of train-7.* within 10 s"):
        generator = FakeGenerator(clock, latency=lambda _: 1e9)
        await clock.run(make_runner(generator, EchoEnvironment(), clock).run(make_prompt(0), 1, ATTEMPT))
    with pytest.raises(InfraError, match="environment 'echo' .* within 5 s"):
        await clock.run(make_runner(FakeGenerator(clock), Hanging(), clock).run(make_prompt(0), 1, ATTEMPT))


async def test_a_wrong_number_of_results_is_a_data_error() -> None:
    class Short(EchoEnvironment):
        async def step(self, prompt: Prompt, episodes: list[Episode]) -> list[StepResult]:
            return (await super().step(prompt, episodes))[1:]

    clock = FakeClock()
    with pytest.raises(DataError, match="2 completions with 1 results"):
        await make_runner(FakeGenerator(clock), Short(), clock).run(make_prompt(0), 2, ATTEMPT)


async def test_an_unknown_environment_lists_the_known_ones() -> None:
    clock = FakeClock()
    with pytest.raises(ConfigError, match="'math'; the env section has: echo"):
        await make_runner(FakeGenerator(clock), EchoEnvironment(), clock).run(make_prompt(0, "math"), 1, ATTEMPT)
