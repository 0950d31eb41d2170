"""One attempt at one prompt group: turns between the generator and the environment, for all siblings side by side.

consumes: a prompt with its token ids
produces: one Rollout per sibling, in sample order
waits for: Generator.generate, then Environment.step, each under its deadline

It neither retries nor counts nor limits: see `manager.py`. One failing sibling fails the attempt: a group is never
completed by stand-ins.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rl.core.clock import Clock
from rl.core.concurrency import gather_or_cancel
from rl.core.deadline import within
from rl.core.errors import ConfigError, DataError
from rl.core.types import Completion, FinishReason, Message, Prompt, Rollout, RolloutEnd, RolloutStatus, Turn
from rl.environments.base import Environment, Episode, StepResult
from rl.generation.generator import Generator, SamplingParams
from rl.rollout.seeds import stable_seed
from rl.rollout.unscored import Unscored

Encode = Callable[[Sequence[Message]], tuple[int, ...]]


@dataclass(frozen=True)
class RunnerLimits:
    """Bounds of one rollout.

    Attributes:
        max_turns: Most generator calls of one rollout.
        max_tokens: Longest prompt + completion of the last turn, in tokens.
        generation_timeout_s: Deadline of one completion.
        env_timeout_s: Deadline of one environment step.
    """

    max_turns: int
    max_tokens: int
    generation_timeout_s: float
    env_timeout_s: float


@dataclass(frozen=True)
class Attempt:
    """Which try this is; together with the sample and turn it names every request and seeds it.

    Attributes:
        run_seed: Seed of the run.
        group_id: Number of the group over the run.
        replacement: Which prompt of the ticket.
        number: Which attempt at this prompt, from 0.
        prefix: Start of every request id, unique among managers of one engine.
    """

    run_seed: int
    group_id: int
    replacement: int
    number: int
    prefix: str

    def seed(self, sample: int, turn: int) -> int:
        """63 bits that no other request of the run shares, but by chance."""
        return stable_seed(self.prefix, self.run_seed, self.group_id, self.replacement, self.number, sample, turn)

    def request_id(self, sample: int, turn: int) -> str:
        """A name for logs and for the engine."""
        return f"{self.prefix}-{self.group_id}.{self.replacement}-s{sample}-a{self.number}-t{turn}"


@dataclass
class _Sibling:
    """One rollout under way."""

    sample: int
    prompt_tokens: tuple[int, ...]
    turns: list[Turn] = field(default_factory=list)
    status: RolloutStatus = RolloutStatus.OK
    metrics: dict[str, float] = field(default_factory=dict)
    components: Counter[str] = field(default_factory=Counter)
    state: Any = None
    end: RolloutEnd | None = None

    def finish(self, group_id: int) -> Rollout:
        reward = sum(turn.reward for turn in self.turns) if self.status is RolloutStatus.OK else float("nan")
        return Rollout(
            f"{group_id}/{self.sample}",
            tuple(self.turns),
            reward,
            self.status,
            self.metrics,
            dict(self.components),
            self.end or RolloutEnd.MAX_TURNS,
        )


class GroupRunner:
    """Runs attempts.

    Args:
        generator: Where completions come from.
        environments: By the name that prompts carry.
        sampling: Settings of every completion; its seed is replaced.
        encode: Token ids of environment messages, for tasks of several turns.
        limits: Bounds.
        clock: Time.
        unscored: Tells why a rollout has no reward.
    """

    def __init__(
        self,
        generator: Generator,
        environments: Mapping[str, Environment],
        sampling: SamplingParams,
        encode: Encode,
        limits: RunnerLimits,
        clock: Clock,
        unscored: Unscored,
    ) -> None:
        self._generator = generator
        self._environments = environments
        self._sampling = sampling
        self._encode = encode
        self._limits = limits
        self._clock = clock
        self._unscored = unscored

    async def run(self, prompt: Prompt, n: int, attempt: Attempt) -> tuple[Rollout, ...]:
        """Roll out `n` siblings of `prompt`.

        Raises:
            ConfigError: the prompt names an environment that does not exist.
            DataError: the prompt leaves no room for a completion, or the environment broke its contract.
            InfraError: an engine failed, or a deadline passed.
        """
        environment = self._environment_of(prompt)
        siblings = [_Sibling(sample, prompt.token_ids) for sample in range(n)]
        for turn in range(self._limits.max_turns):
            active = [sibling for sibling in siblings if sibling.end is None]
            if not active:
                break
            completions = await gather_or_cancel([self._generate(prompt, sibling, attempt, turn) for sibling in active])
            what = f"environment '{prompt.environment}' on prompt {prompt.prompt_id}"
            episodes = [
                Episode(sibling.sample, tuple(sibling.turns), completion, sibling.state)
                for sibling, completion in zip(active, completions, strict=True)
            ]
            results = await within(self._clock, self._limits.env_timeout_s, what, environment.step(prompt, episodes))
            if len(results) != len(completions):
                raise DataError(f"{what} answered {len(completions)} completions with {len(results)} results")
            for sibling, completion, result in zip(active, completions, results, strict=True):
                self._apply(sibling, completion, result)
                if result.status is not RolloutStatus.OK:
                    rollout = f"rollout {attempt.group_id}/{sibling.sample}"
                    self._unscored.tell(prompt.environment, rollout, result.detail)
        return tuple(sibling.finish(attempt.group_id) for sibling in siblings)

    def _environment_of(self, prompt: Prompt) -> Environment:
        if prompt.environment not in self._environments:
            known = ", ".join(sorted(self._environments))
            raise ConfigError(
                f"prompt {prompt.prompt_id} names environment '{prompt.environment}'; the env section has: {known}"
            )
        return self._environments[prompt.environment]

    async def _generate(self, prompt: Prompt, sibling: _Sibling, attempt: Attempt, turn: int) -> Completion:
        room = self._limits.max_tokens - len(sibling.prompt_tokens)
        if room < 1:
            raise DataError(
                f"prompt {prompt.prompt_id} has {len(sibling.prompt_tokens)} tokens; policy.max_total_sequence_length="
                f"{self._limits.max_tokens} leaves no room for a completion"
            )
        params = replace(
            self._sampling,
            max_new_tokens=min(self._sampling.max_new_tokens, room),
            seed=attempt.seed(sibling.sample, turn),
        )
        request_id = attempt.request_id(sibling.sample, turn)
        session = f"{attempt.prefix}-{attempt.group_id}"
        work = self._generator.generate(sibling.prompt_tokens, params, request_id=request_id, session=session)
        return await within(self._clock, self._limits.generation_timeout_s, f"generation of {request_id}", work)

    def _apply(self, sibling: _Sibling, completion: Completion, result: StepResult) -> None:
        failed = result.status is not RolloutStatus.OK
        reward = 0.0 if failed else result.reward
        sibling.turns.append(Turn(sibling.prompt_tokens, completion, result.messages, reward, result.flags))
        sibling.metrics.update(result.metrics)
        sibling.components.update(result.components)
        sibling.state = result.state
        if failed:
            sibling.status = result.status
        if result.done or failed:
            length = completion.finish_reason is FinishReason.LENGTH
            sibling.end = RolloutEnd.LENGTH if length else RolloutEnd.DONE
        else:
            following = sibling.prompt_tokens + completion.tokens + self._encode(result.messages)
            sibling.prompt_tokens = following
            if len(following) >= self._limits.max_tokens:
                sibling.end = RolloutEnd.CONTEXT
