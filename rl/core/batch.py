"""TrainBatch: what the trainer sees of a step, as jagged columns without padding.

N sequences hold T tokens in all. One convention for every [T] column: *position t describes token t given the tokens
before it in its sequence; the first position of a sequence is masked.* Batches are immutable: methods return new ones.
Padding, devices and micro-batch arithmetic are the trainer's business.

    batch = TrainBatch.from_groups(groups)
    batch = batch.with_columns(advantages=advantages)
    counts = batch.count()
    parts = [part.with_counts(counts) for part in batch.split(8)]
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from rl.core.errors import DataError
from rl.core.metrics import Counts
from rl.core.types import NO_VERSION, PolicyVersion, Rollout, RolloutGroup, TurnFlag

# Column name -> (dtype, which length it has).
_TOKEN_COLUMNS = {
    "tokens": torch.int64,
    "loss_mask": torch.bool,
    "generation_logprobs": torch.float32,
    "token_versions": torch.int64,
    "prev_logprobs": torch.float32,
    "reference_logprobs": torch.float32,
    "teacher_logprobs": torch.float32,
    "turn_flags": torch.int64,
    "advantages": torch.float32,
    "values": torch.float32,
    "returns": torch.float32,
}
_SEQUENCE_COLUMNS = {
    "group_ids": torch.int64,
    "rewards": torch.float32,
    "valid": torch.bool,
    "sample_weights": torch.float32,
    "versions": torch.int64,
    "rollout_ids": torch.int64,
    "raw_rewards": torch.float32,
    "truncated": torch.bool,
    "reward_components": torch.float32,
}
# The bit of each flag in the column turn_flags.
FLAG_BITS = {TurnFlag.INVALID_TOOL_CALL: 1, TurnFlag.MALFORMED_THINKING: 2}


@dataclass(frozen=True, eq=False)
class TrainBatch:
    """N sequences of T tokens in all.

    Attributes:
        tokens: [T] int64, prompt and sampled tokens of every turn.
        offsets: [N + 1] int64; sequence i is tokens[offsets[i]:offsets[i + 1]].
        loss_mask: [T] bool, true where the policy sampled the token.
        generation_logprobs: [T] float32, the generator's log-probability of the token; 0 off the mask.
        token_versions: [T] int64, the policy version that sampled the token; -1 off the mask.
        group_ids: [N] int64, the prompt group of each sequence.
        rewards: [N] float32, NaN where the rollout is not valid.
        valid: [N] bool, rollouts that vote in a baseline and are trained on.
        sample_weights: [N] float32, weight in loss and counts; 0 for rollouts that are not valid.
        versions: [N, 2] int64, the oldest and the newest policy version among the sampled tokens.
        prev_logprobs: [T] float32 or None, of the trained policy at the start of the step.
        reference_logprobs: [T] float32 or None, of the frozen reference.
        teacher_logprobs: [T] float32 or None, of a teacher.
        turn_flags: [T] int64 or None, the FLAG_BITS of the turn that the token was sampled in; 0 off the mask.
        advantages: [T] float32 or None.
        values: [T] float32 or None, of the critic: the value of the state before the token.
        returns: [T] float32 or None, what the critic learns.
        rollout_ids: [N] int64 or None, number of the rollout within the batch it was made in. Sequences of one rollout
            (its history was rewritten between turns) share reward and advantage and vote once. None: one each.
        raw_rewards: [N] float32 or None, the environment's reward, which no transform changes.
        truncated: [N] bool or None, whether a length bound cut the rollout off.
        reward_components: [N, C] float32 or None, the named parts of the raw reward.
        component_names: Their C names, in alphabetical order.
        policy_version: Version of the policy that trains on the batch, where that is known.
        counts: What divides the sums of the whole optimizer step, where this is a part of one.

    Raises:
        ValueError: a column has the wrong dtype or length, offsets do not tile the tokens, a sequence is empty, or its
            first position is not masked.
    """

    tokens: Tensor
    offsets: Tensor
    loss_mask: Tensor
    generation_logprobs: Tensor
    token_versions: Tensor
    group_ids: Tensor
    rewards: Tensor
    valid: Tensor
    sample_weights: Tensor
    versions: Tensor
    prev_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    turn_flags: Tensor | None = None
    advantages: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    rollout_ids: Tensor | None = None
    raw_rewards: Tensor | None = None
    truncated: Tensor | None = None
    reward_components: Tensor | None = None
    component_names: tuple[str, ...] = ()
    policy_version: PolicyVersion | None = None
    counts: Counts | None = None

    def __post_init__(self) -> None:
        if self.offsets.dtype != torch.int64 or self.offsets.dim() != 1 or self.offsets.numel() < 1:
            raise ValueError(f"offsets must be [N + 1] int64, got {tuple(self.offsets.shape)} {self.offsets.dtype}")
        num_sequences = self.offsets.numel() - 1
        for name, column in self._columns(_TOKEN_COLUMNS).items():
            _check_column(name, column, _TOKEN_COLUMNS[name], (self.tokens.numel(),))
        for name, column in self._columns(_SEQUENCE_COLUMNS).items():
            wide = {"versions": (2,), "reward_components": (len(self.component_names),)}
            _check_column(name, column, _SEQUENCE_COLUMNS[name], (num_sequences, *wide.get(name, ())))
        if int(self.offsets[0]) != 0 or int(self.offsets[-1]) != self.tokens.numel():
            raise ValueError(f"offsets end at {int(self.offsets[-1])}, but there are {self.tokens.numel()} tokens")
        if bool((self.lengths < 1).any()):
            raise ValueError("a sequence has no tokens")
        if bool(self.loss_mask[self.offsets[:-1]].any()):
            raise ValueError("the first position of a sequence must be masked: it has nothing to be predicted from")

    @classmethod
    def from_groups(cls, groups: Sequence[RolloutGroup]) -> "TrainBatch":
        """Lay out all rollouts of `groups`, in order.

        A rollout is valid when its status is OK and its reward is finite; others get weight 0 and reward NaN.

        Raises:
            DataError: there is no group, a rollout has no turn or an empty prompt, or a turn's prompt does not begin
                with all earlier tokens of its rollout.
        """
        rollouts = [(group.group_id, rollout) for group in groups for rollout in group.rollouts]
        if not rollouts:
            raise DataError("a training batch needs at least one rollout")
        rows = [row for number, (_, rollout) in enumerate(rollouts) for row in _layout(rollout, number)]
        sequences = [rollouts[row.rollout] for row in rows]
        names = _component_names([rollout for _, rollout in rollouts])
        lengths = torch.tensor([len(row.tokens) for row in rows], dtype=torch.int64)
        valid = torch.tensor([rollout.is_valid for _, rollout in sequences])
        rewards = torch.tensor([rollout.reward for _, rollout in sequences], dtype=torch.float32)
        rewards = torch.where(valid, rewards, float("nan"))
        components = [[rollout.reward_components.get(name, math.nan) for name in names] for _, rollout in sequences]
        return cls(
            tokens=torch.tensor([token for row in rows for token in row.tokens], dtype=torch.int64),
            offsets=_offsets(lengths),
            loss_mask=torch.tensor([version != NO_VERSION for row in rows for version in row.versions]),
            generation_logprobs=torch.tensor([value for row in rows for value in row.logprobs], dtype=torch.float32),
            token_versions=torch.tensor([version for row in rows for version in row.versions], dtype=torch.int64),
            group_ids=torch.tensor([group_id for group_id, _ in sequences], dtype=torch.int64),
            rewards=rewards,
            valid=valid,
            sample_weights=valid.to(torch.float32),
            versions=torch.tensor([_version_range(rollout) for _, rollout in sequences], dtype=torch.int64),
            turn_flags=torch.tensor([bits for row in rows for bits in row.flags], dtype=torch.int64),
            rollout_ids=torch.tensor([row.rollout for row in rows], dtype=torch.int64),
            raw_rewards=rewards,
            truncated=torch.tensor([rollout.is_truncated for _, rollout in sequences]),
            reward_components=torch.tensor(components, dtype=torch.float32).view(len(rows), len(names)),
            component_names=names,
        )

    @property
    def num_sequences(self) -> int:
        """N."""
        return self.offsets.numel() - 1

    @property
    def num_tokens(self) -> int:
        """T, prompt tokens included."""
        return self.tokens.numel()

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sequence, [N] int64."""
        return self.offsets.diff()

    @property
    def sequence_ids(self) -> Tensor:
        """The sequence that each token belongs to, [T] int64."""
        return torch.repeat_interleave(torch.arange(self.num_sequences), self.lengths)

    @property
    def token_weights(self) -> Tensor:
        """loss_mask x sample_weights, [T] float32: the weight of each token in loss and counts."""
        return self.sample_weights[self.sequence_ids] * self.loss_mask

    def count(self) -> Counts:
        """Return the sums of weights that divide losses and metrics, if this batch is a whole optimizer step."""
        positive = self.token_weights[(self.rewards > 0)[self.sequence_ids]]
        return Counts(
            float(self.token_weights.sum(dtype=torch.float64)),
            float(self.sample_weights.sum(dtype=torch.float64)),
            float(positive.sum(dtype=torch.float64)),
        )

    def with_columns(self, **columns: Tensor) -> "TrainBatch":
        """Return the batch with these columns added or replaced. Raises ValueError for an unknown name."""
        unknown = set(columns) - set(_TOKEN_COLUMNS) - set(_SEQUENCE_COLUMNS)
        if unknown:
            raise ValueError(f"unknown columns {sorted(unknown)}")
        changed: dict[str, Any] = dict(columns)
        return replace(self, **changed)

    def at_version(self, version: PolicyVersion) -> "TrainBatch":
        """Return the batch, marked as trained on by policy `version`."""
        return replace(self, policy_version=version)

    def with_counts(self, counts: Counts) -> "TrainBatch":
        """Return the batch, marked as a part of an optimizer step that `counts` divides."""
        return replace(self, counts=counts)

    def select(self, index: Tensor | Sequence[int]) -> "TrainBatch":
        """Return the sequences numbered `index` ([K] int64), in that order."""
        rows = torch.as_tensor(index, dtype=torch.int64)
        positions = self.positions_of(rows)
        columns: dict[str, Any] = {name: column[positions] for name, column in self._columns(_TOKEN_COLUMNS).items()}
        columns |= {name: column[rows] for name, column in self._columns(_SEQUENCE_COLUMNS).items()}
        return replace(self, offsets=_offsets(self.lengths[rows]), **columns)

    def split(self, sequences: int) -> list["TrainBatch"]:
        """Cut into consecutive chunks of `sequences` sequences; the last may be smaller."""
        if sequences < 1:
            raise ValueError(f"a chunk needs at least one sequence, got {sequences}")
        return [self._range(start, start + sequences) for start in range(0, self.num_sequences, sequences)]

    def positions_of(self, index: Tensor | Sequence[int]) -> Tensor:
        """Return where the tokens of the sequences numbered `index` ([K] int64) stand, one sequence after the other."""
        rows = torch.as_tensor(index, dtype=torch.int64)
        return _positions(self.offsets[rows], self.lengths[rows])

    def shard(self, n: int) -> list["TrainBatch"]:
        """Cut into exactly `n` consecutive pieces whose sizes differ by one at most; a piece may be empty."""
        if n < 1:
            raise ValueError(f"cannot cut a batch into {n} shards")
        bounds = [-(-self.num_sequences * rank // n) for rank in range(n + 1)]  # the longer pieces first
        return [self._range(start, end) for start, end in zip(bounds[:-1], bounds[1:], strict=True)]

    def _range(self, start: int, end: int) -> "TrainBatch":
        return self.select(torch.arange(start, min(end, self.num_sequences)))

    def _columns(self, kinds: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        present = {column.name: self.__dict__[column.name] for column in fields(self) if column.name in kinds}
        return {name: column for name, column in present.items() if column is not None}


@dataclass(frozen=True)
class _Row:
    rollout: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)


def _layout(rollout: Rollout, place: int) -> list[_Row]:
    """Lay the turns of a rollout end to end; everything that the policy did not sample has NO_VERSION.

    A turn that is marked as a fork begins a row of its own.
    """
    if not rollout.turns:
        raise DataError(f"rollout {rollout.rollout_id} has no turn")
    rows = [_Row(place)]
    for number, turn in enumerate(rollout.turns):
        if turn.forked and number:
            rows.append(_Row(place))
        row = rows[-1]
        prompt, completion = turn.prompt_tokens, turn.completion
        if not prompt:
            raise DataError(
                f"rollout {rollout.rollout_id} turn {number} has an empty prompt; the first token has no context"
            )
        known = len(row.tokens)
        if list(prompt[:known]) != row.tokens:
            raise DataError(
                f"rollout {rollout.rollout_id} turn {number}: its prompt of {len(prompt)} tokens does not begin with "
                f"the {known} tokens of the earlier turns (first difference at "
                f"{_first_difference(prompt, row.tokens)}); the history was rewritten or tokenized again, which would "
                "train on tokens that were never sampled"
            )
        observed = len(prompt) - known
        row.tokens.extend([*prompt[known:], *completion.tokens])
        row.logprobs.extend([*[0.0] * observed, *completion.logprobs])
        row.versions.extend([NO_VERSION] * observed)
        for span in completion.version_spans:
            row.versions.extend([span.version] * (span.end - span.start))
        bits = sum(FLAG_BITS[flag] for flag in turn.flags)
        row.flags.extend([*[0] * observed, *[bits] * len(completion.tokens)])
    return rows


def _first_difference(prompt: Sequence[int], known: Sequence[int]) -> int:
    pairs = zip(prompt, known, strict=False)
    return next((place for place, (new, old) in enumerate(pairs) if new != old), min(len(prompt), len(known)))


def _component_names(rollouts: Sequence[Rollout]) -> tuple[str, ...]:
    return tuple(sorted({name for rollout in rollouts for name in rollout.reward_components}))


def _version_range(rollout: Rollout) -> tuple[int, int]:
    completions = [turn.completion for turn in rollout.turns]
    return min(c.version_min for c in completions), max(c.version_max for c in completions)


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def _positions(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return the token positions of the sequences that begin at `starts`, one sequence after the other."""
    new_starts = _offsets(lengths)[:-1]
    return torch.arange(int(lengths.sum())) + torch.repeat_interleave(starts - new_starts, lengths)


def _check_column(name: str, column: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if column.dtype != dtype or tuple(column.shape) != shape:
        raise ValueError(f"column {name} must be {list(shape)} {dtype}, got {list(column.shape)} {column.dtype}")
