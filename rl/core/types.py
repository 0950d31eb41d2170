"""The carriers on the rollout side: Prompt -> Turn -> Rollout -> RolloutGroup.

Plain frozen data, no tensors. `rl.core.batch.TrainBatch` is what the trainer sees.
"""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PolicyVersion = int
# What the policy did not make has no version: a token of the prompt, or weights before the first refit.
NO_VERSION: PolicyVersion = -1


class FinishReason(enum.Enum):
    """Why a completion ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class RolloutStatus(enum.Enum):
    """The accounted state of one rollout. Only OK rollouts vote in a baseline and are trained on."""

    OK = "ok"
    REWARD_ERROR = "reward_error"
    REWARD_TIMEOUT = "reward_timeout"
    REWARD_INVALID = "reward_invalid"


class TurnFlag(enum.Enum):
    """What an environment found wrong with the form of a completion."""

    INVALID_TOOL_CALL = "invalid_tool_call"
    MALFORMED_THINKING = "malformed_thinking"


class RolloutEnd(enum.Enum):
    """Why a rollout has no further turn."""

    DONE = "done"
    LENGTH = "length"
    CONTEXT = "context"
    MAX_TURNS = "max_turns"


@dataclass(frozen=True)
class Message:
    """One chat message."""

    role: str
    content: str


@dataclass(frozen=True)
class Prompt:
    """One dataset row as the rollout sees it.

    Attributes:
        prompt_id: Unique and stable in the dataset; groups are formed by it, never by text.
        messages: The conversation so far. A raw-text prompt is one message with role "text".
        environment: Name of the environment that scores it (a key of the `env` section).
        metadata: What the environment needs, for example {"answer": "7"}. JSON values only.
        token_ids: The tokenized prompt, filled by the prompt source.
    """

    prompt_id: str
    messages: tuple[Message, ...]
    environment: str
    metadata: Mapping[str, Any]
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class VersionSpan:
    """Tokens [start, end) of a completion were sampled by policy `version`."""

    version: PolicyVersion
    start: int
    end: int


@dataclass(frozen=True)
class Completion:
    """What a generator returns for one prompt: tokens, their log-probabilities and who sampled them.

    Attributes:
        tokens: Sampled token ids, including the stop token when one was sampled.
        logprobs: log p(token | all before) under the sampled distribution, one per token, finite and <= ~0.
        finish_reason: Why generation ended.
        version_spans: Contiguous spans over `tokens` as the engine reports them.
        text: The decoded completion, without the stop token's text unless the engine includes it.

    Raises:
        ValueError: no tokens, lengths that differ, a non-finite log-probability, or spans that do not tile the tokens.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...]
    text: str

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError("a completion needs at least one token id")
        if len(self.logprobs) != len(self.tokens):
            raise ValueError(f"completion has {len(self.tokens)} tokens but {len(self.logprobs)} log-probabilities")
        if not all(math.isfinite(value) for value in self.logprobs):
            raise ValueError("completion has a non-finite log-probability")
        position = 0
        for span in self.version_spans:
            if span.start != position or span.end <= span.start:
                raise ValueError(f"version spans {self.version_spans} do not tile {len(self.tokens)} tokens")
            position = span.end
        if position != len(self.tokens):
            raise ValueError(f"version spans {self.version_spans} do not tile {len(self.tokens)} tokens")

    @property
    def version_min(self) -> PolicyVersion:
        """The oldest policy version among the tokens."""
        return min(span.version for span in self.version_spans)

    @property
    def version_max(self) -> PolicyVersion:
        """The newest policy version among the tokens."""
        return max(span.version for span in self.version_spans)


@dataclass(frozen=True)
class Turn:
    """One generator call and the environment's answer to it.

    Attributes:
        prompt_tokens: All tokens that the generator conditioned on in this turn.
        completion: What it sampled.
        env_messages: The environment's messages after it (empty when the rollout ended).
        reward: Reward of this turn.
        flags: What was wrong with the completion's form.
        forked: The chat template rewrote the history, so this turn's prompt does not begin with the tokens before it;
            it is trained as a sequence of its own.
        drifted: The chat template writes the answer before this turn with other outer whitespace, or another end, than
            was sampled; the sampled tokens stand.
    """

    prompt_tokens: tuple[int, ...]
    completion: Completion
    env_messages: tuple[Message, ...] = ()
    reward: float = 0.0
    flags: frozenset[TurnFlag] = frozenset()
    forked: bool = False
    drifted: bool = False


@dataclass(frozen=True)
class Rollout:
    """One sample of a prompt.

    Attributes:
        rollout_id: `{group_id}/{sample index}`.
        turns: At least one.
        reward: Total reward as the environment gave it; NaN unless status is OK.
        status: Accounted state.
        metrics: Named numbers of the environment.
        reward_components: The named parts of the reward, summed over turns; empty where it has none.
        end: Why there is no further turn.
    """

    rollout_id: str
    turns: tuple[Turn, ...]
    reward: float
    status: RolloutStatus = RolloutStatus.OK
    metrics: Mapping[str, float] = field(default_factory=dict)
    reward_components: Mapping[str, float] = field(default_factory=dict)
    end: RolloutEnd = RolloutEnd.DONE

    @property
    def is_valid(self) -> bool:
        """Whether it has a reward that counts."""
        return self.status is RolloutStatus.OK and math.isfinite(self.reward)

    @property
    def sequences(self) -> tuple[tuple[Turn, ...], ...]:
        """The turns by the sequence that they are trained in: a fork begins a new one."""
        starts = [0, *(number for number, turn in enumerate(self.turns) if turn.forked and number)]
        ends = [*starts[1:], len(self.turns)]
        return tuple(self.turns[start:end] for start, end in zip(starts, ends, strict=True))

    @property
    def num_sampled_tokens(self) -> int:
        """Sampled tokens over all turns."""
        return sum(len(turn.completion.tokens) for turn in self.turns)

    @property
    def num_tokens(self) -> int:
        """Tokens of all its sequences: prompts, completions, and what environment and template added."""
        last = [turns[-1] for turns in self.sequences]
        return sum(len(turn.prompt_tokens) + len(turn.completion.tokens) for turn in last)

    @property
    def is_truncated(self) -> bool:
        """Whether a length bound cut it off: of the last completion, or of the context between turns."""
        return self.end is RolloutEnd.CONTEXT or self.turns[-1].completion.finish_reason is FinishReason.LENGTH


@dataclass(frozen=True)
class TrainedSequence:
    """What a step made of one sequence of a rollout.

    Attributes:
        reward: Reward after scaling, shaping and penalties; NaN where the rollout is not valid.
        weight: Weight in loss and counts.
        advantages: Of the sampled tokens, in order; one number where all have the same.
    """

    reward: float
    weight: float
    advantages: float | tuple[float, ...]


@dataclass(frozen=True)
class RolloutGroup:
    """All sibling rollouts of one prompt, in sample order. Never split across steps."""

    group_id: int
    prompt: Prompt
    rollouts: tuple[Rollout, ...]

    @property
    def version_min(self) -> PolicyVersion:
        """The oldest policy version that sampled any token of the group."""
        return min(turn.completion.version_min for rollout in self.rollouts for turn in rollout.turns)

    @property
    def version_max(self) -> PolicyVersion:
        """The newest policy version that sampled any token of the group."""
        return max(turn.completion.version_max for rollout in self.rollouts for turn in rollout.turns)


@dataclass(frozen=True)
class Dropped:
    """A prompt group that ended without rollouts; it reaches the buffer's accounting.

    Attributes:
        reason: A short stable word, for example "prompt_too_long" or "infra_error".
        attempts: Attempts made.
        detail: The last error, for the log.
    """

    reason: str
    attempts: int
    detail: str
