"""One attempt at one prompt group: turns between the generator and the environment, for all siblings side by side.

consumes: a prompt with its token ids
produces: one Rollout per sibling, in sample order; a sibling whose completion was unusable twice is left out
waits for: Generator.generate, then Environment.step, each under its deadline

A sibling goes on until its environment is done, until its context is full, or for `max_turns` completions. Nothing is
appended after the last completion: what the environment says then stands in the turn, not in the tokens.

It neither retries attempts nor counts nor limits: see `manager.py`. An engine or a deadline that fails one sibling
fails the attempt: a group is never completed by stand-ins. How messages become tokens is `rl.data.conversation`'s.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rl.core.clock import Clock
from rl.core.concurrency import gather_or_cancel
from rl.core.deadline import within
from rl.core.errors import CompletionError, ConfigError, DataError, RLError
from rl.core.types import Completion, FinishReason, Prompt, Rollout, RolloutEnd, RolloutStatus, Turn
from rl.data.conversation import Conversation, Conversations
from rl.environments.base import Environment, Episode, StepResult
from rl.generation.generator import Generator, SamplingParams
from rl.rollout.seeds import stable_seed
from rl.rollout.unscored import Unscored

_log = logging.getLogger(__name__)
# How often an unusable completion is asked for before its sample is left out.
_TRIES = 2


@dataclass(frozen=True)
class RunnerLimits:
    """Bounds of one rollout.

    Attributes:
        max_turns: Most generator calls of one rollout.
        max_tokens: Longest prompt + completion of any turn, in tokens.
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

    def seed(self, sample: int, turn: int, again: int = 0) -> int:
        """63 bits that no other request of the run shares, but by chance; `again` counts repeats of one request."""
        repeat = (again,) if again else ()
        request = (self.group_id, self.replacement, self.number, sample, turn, *repeat)
        return stable_seed(self.prefix, self.run_seed, *request)

    def request_id(self, sample: int, turn: int, again: int = 0) -> str:
        """A name for logs and for the engine."""
        repeat = f"-r{again}" if again else ""
        return f"{self.prefix}-{self.group_id}.{self.replacement}-s{sample}-a{self.number}-t{turn}{repeat}"


@dataclass
class _Sibling:
    """One rollout under way."""

    sample: int
    conversation: Conversation
    turns: list[Turn] = field(default_factory=list)
    status: RolloutStatus = RolloutStatus.OK
    metrics: dict[str, float] = field(default_factory=dict)
    components: Counter[str] = field(default_factory=Counter)
    state: Any = None
    end: RolloutEnd | None = None
    is_lost: bool = False

    def finish(self, group_id: int) -> Rollout:
        assert self.end is not None
        reward = sum(turn.reward for turn in self.turns) if self.status is RolloutStatus.OK else float("nan")
        return Rollout(
            f"{group_id}/{self.sample}",
            tuple(self.turns),
            reward,
            self.status,
            self.metrics,
            dict(self.components),
            self.end,
        )


class GroupRunner:
    """Runs attempts.

    Args:
        generator: Where completions come from.
        environments: By the name that prompts carry.
        sampling: Settings of every completion; its seed is replaced.
        conversations: Tokens of the turns after the first.
        limits: Bounds.
        clock: Time.
        unscored: Tells why a rollout has no reward.
    """

    def __init__(
        self,
        generator: Generator,
        environments: Mapping[str, Environment],
        sampling: SamplingParams,
        conversations: Conversations,
        limits: RunnerLimits,
        clock: Clock,
        unscored: Unscored,
    ) -> None:
        self._generator = generator
        self._environments = environments
        self._sampling = sampling
        self._conversations = conversations
        self._limits = limits
        self._clock = clock
        self._unscored = unscored

    async def run(self, prompt: Prompt, n: int, attempt: Attempt) -> tuple[Rollout, ...]:
        """Roll out `n` siblings of `prompt`.

        Returns:
            The rollouts, in sample order; fewer than `n` when engines returned unusable completions twice in a row.

        Raises:
            ConfigError: the prompt names an environment that does not exist.
            DataError: the prompt leaves no room for a completion, the environment broke its contract, or the chat
                template refused or rewrote the conversation.
            InfraError: an engine failed, a deadline passed, or no sibling got a usable completion.
        """
        environment = self._environment_of(prompt)
        siblings = [_Sibling(sample, self._conversations.begin(prompt)) for sample in range(n)]
        for turn in range(self._limits.max_turns):
            active = [sibling for sibling in siblings if sibling.end is None and not sibling.is_lost]
            if not active:
                break
            completions = await gather_or_cancel([self._complete(prompt, sibling, attempt, turn) for sibling in active])
            answered = [(s, c) for s, c in zip(active, completions, strict=True) if c is not None]
            episodes = [Episode(s.sample, tuple(s.turns), completion, s.state) for s, completion in answered]
            results = await self._ask(environment, prompt, episodes) if episodes else []
            for (sibling, completion), result in zip(answered, results, strict=True):
                self._apply(sibling, completion, result)
                if result.status is not RolloutStatus.OK:
                    rollout = f"rollout {attempt.group_id}/{sibling.sample}"
                    self._unscored.tell(prompt.environment, rollout, result.detail)
        kept = [sibling for sibling in siblings if not sibling.is_lost]
        if not kept:
            raise CompletionError(f"prompt {prompt.prompt_id}: none of its {n} samples got a usable completion")
        return tuple(sibling.finish(attempt.group_id) for sibling in kept)

    async def _ask(self, environment: Environment, prompt: Prompt, episodes: list[Episode]) -> list[StepResult]:
        """Ask the environment about the siblings that go on; its own exception fails them, not the run."""
        what = f"environment '{prompt.environment}' on prompt {prompt.prompt_id}"
        try:
            results = await within(self._clock, self._limits.env_timeout_s, what, environment.step(prompt, episodes))
        except (RLError, TimeoutError, ConnectionError):
            raise
        except Exception as error:  # An environment may be anybody's code.
            _log.warning("%s raised %s: %s", what, type(error).__name__, error, exc_info=error)
            detail = f"{what}: {type(error).__name__}: {error}"
            lost = StepResult((), float("nan"), True, RolloutStatus.REWARD_ERROR, detail=detail)
            return [lost for _ in episodes]
        if len(results) != len(episodes):
            raise DataError(f"{what} answered {len(episodes)} completions with {len(results)} results")
        return results

    def _environment_of(self, prompt: Prompt) -> Environment:
        if prompt.environment not in self._environments:
            known = ", ".join(sorted(self._environments))
            raise ConfigError(
                f"prompt {prompt.prompt_id} names environment '{prompt.environment}'; the env section has: {known}"
            )
        return self._environments[prompt.environment]

    async def _complete(self, prompt: Prompt, sibling: _Sibling, attempt: Attempt, turn: int) -> Completion | None:
        """Sample the next completion; None when it was unusable twice, and the sample is lost."""
        for again in range(_TRIES):
            request_id = attempt.request_id(sibling.sample, turn, again)
            seed = attempt.seed(sibling.sample, turn, again)
            try:
                return await self._generate(prompt, sibling, request_id, seed, f"{attempt.prefix}-{attempt.group_id}")
            except CompletionError as error:
                _log.warning("prompt %s sample %d turn %d: %s", prompt.prompt_id, sibling.sample, turn, error)
        sibling.is_lost = True
        return None

    async def _generate(
        self, prompt: Prompt, sibling: _Sibling, request_id: str, seed: int, session: str
    ) -> Completion:
        tokens = sibling.conversation.token_ids
        room = self._limits.max_tokens - len(tokens)
        if room < 1:
            raise DataError(
                f"prompt {prompt.prompt_id} has {len(tokens)} tokens; policy.max_total_sequence_length="
                f"{self._limits.max_tokens} leaves no room for a completion"
            )
        new_tokens = min(self._sampling.max_new_tokens, room)
        params = replace(self._sampling, max_new_tokens=new_tokens, seed=seed)
        work = self._generator.generate(tokens, params, request_id=request_id, session=session)
        return await within(self._clock, self._limits.generation_timeout_s, f"generation of {request_id}", work)

    def _apply(self, sibling: _Sibling, completion: Completion, result: StepResult) -> None:
        failed = result.status is not RolloutStatus.OK
        now = sibling.conversation
        reward = 0.0 if failed else result.reward
        sibling.turns.append(
            Turn(now.token_ids, completion, result.messages, reward, result.flags, now.is_forked, now.is_drifted)
        )
        sibling.metrics.update(result.metrics)
        sibling.components.update(result.components)
        sibling.state = result.state
        if failed:
            sibling.status = result.status
        if result.done or failed:
            length = completion.finish_reason is FinishReason.LENGTH
            sibling.end = RolloutEnd.LENGTH if length else RolloutEnd.DONE
        elif len(sibling.turns) == self._limits.max_turns:
            sibling.end = RolloutEnd.MAX_TURNS
        else:
            sibling.conversation = self._conversations.follow(now, completion, result.messages)
            if len(sibling.conversation.token_ids) >= self._limits.max_tokens:
                sibling.end = RolloutEnd.CONTEXT
