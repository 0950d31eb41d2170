"""The reward pipeline: an ordered list of named pure transforms of `TrainBatch.rewards`.

    penalties of form -> scaling -> shaping

`raw_rewards` stays what the environment said; dynamic sampling looks at it. No penalty ever raises a reward: a wrong
answer must not gain by a fault of form. Rewards of rollouts that are not valid stay NaN.

    transforms = reward_transforms(config.grpo, config.reward_penalties)
    batch, metrics = apply_transforms(transforms, batch)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl.algorithms.advantages import by_rollout
from rl.algorithms.algorithm import Staged
from rl.algorithms.config import GRPOConfig, RewardPenaltiesConfig, RewardScalingConfig, RewardShapingConfig
from rl.algorithms.dapo import OverlongPunishment
from rl.algorithms.turns import count_tokens, find_turns
from rl.core.batch import FLAG_BITS, TrainBatch
from rl.core.errors import ConfigError
from rl.core.types import TurnFlag

_MALFORMED_THINKING = FLAG_BITS[TurnFlag.MALFORMED_THINKING]


@dataclass(frozen=True)
class RewardTransform:
    """One step of the pipeline.

    Attributes:
        name: For logs and tests.
        apply: Takes a batch, returns it changed, with what there is to report.
    """

    name: str
    apply: Callable[[TrainBatch], Staged]


def reward_transforms(grpo: GRPOConfig, penalties: RewardPenaltiesConfig) -> Sequence[RewardTransform]:
    """Return the transforms that the configuration asks for, in their order."""
    transforms = []
    if penalties.think_open_id is not None and penalties.think_close_id is not None:
        opening, closing = penalties.think_open_id, penalties.think_close_id
        transforms.append(RewardTransform("think_tags", lambda batch: mark_think_tags(batch, opening, closing)))
    if penalties.malformed_think_tag:
        transforms.append(RewardTransform("malformed_think_tag", penalize_malformed_thinking))
    if penalties.unwanted_token_ids:
        ids = tuple(penalties.unwanted_token_ids)
        transforms.append(RewardTransform("unwanted_token", lambda batch: penalize_tokens(batch, ids)))
    if grpo.reward_scaling.enabled:
        transforms.append(RewardTransform("scaling", lambda batch: scale_rewards(batch, grpo.reward_scaling)))
    if grpo.reward_shaping.enabled:
        transforms.append(_shaping(grpo.reward_shaping))
    return transforms


def apply_transforms(transforms: Sequence[RewardTransform], batch: TrainBatch) -> Staged:
    """Apply the transforms in turn; where there are any, also report the mean raw reward of the valid rollouts."""
    metrics: dict[str, float] = {}
    for transform in transforms:
        batch, told = transform.apply(batch)
        metrics |= told
    rollouts = by_rollout(batch)
    if transforms and batch.raw_rewards is not None and bool(rollouts.valid.any()):
        raw = batch.raw_rewards[rollouts.rows][rollouts.valid]
        metrics["raw_reward"] = float(raw.to(torch.float64).mean())
    return batch, metrics


def scale_rewards(batch: TrainBatch, config: RewardScalingConfig) -> Staged:
    """Map rewards, and each component, from the source range (to which they are clamped) to the target range."""
    width = config.source_max - config.source_min
    stretch = (config.target_max - config.target_min) / width

    def scaled(values: Tensor) -> Tensor:
        inside = values.to(torch.float64).clamp(config.source_min, config.source_max)
        return (config.target_min + (inside - config.source_min) * stretch).to(torch.float32)

    rollouts = by_rollout(batch)
    outside = (rollouts.rewards < config.source_min) | (rollouts.rewards > config.source_max)
    columns = {"rewards": scaled(batch.rewards)}
    if batch.reward_components is not None:
        columns["reward_components"] = scaled(batch.reward_components)
    return batch.with_columns(**columns), {"num_scaled_out_of_range": float((outside & rollouts.valid).sum())}


def penalize_truncated(batch: TrainBatch, coefficient: float) -> Staged:
    """Return min(r, c r) for rollouts that a length bound cut off ("stop properly")."""
    if batch.truncated is None:
        raise ValueError("grpo.reward_shaping.stop_properly_penalty_coef needs the column truncated")
    rewards = torch.where(batch.truncated, torch.minimum(batch.rewards, coefficient * batch.rewards), batch.rewards)
    rollouts = by_rollout(batch)
    hit = float((batch.truncated[rollouts.rows] & rollouts.valid).sum())
    return batch.with_columns(rewards=rewards), {"reward_penalties/stop_properly": hit}


def penalize_tokens(batch: TrainBatch, token_ids: Sequence[int]) -> Staged:
    """Cap the reward at 0 where the policy sampled one of `token_ids`."""
    unwanted = torch.isin(batch.tokens, torch.tensor(token_ids)) & batch.loss_mask
    return _cap_at_zero(batch, batch.sequence_ids[unwanted], "unwanted_token")


def penalize_malformed_thinking(batch: TrainBatch) -> Staged:
    """Cap the reward at 0 where a turn is flagged as malformed thinking, by its tags or by the environment."""
    if batch.turn_flags is None:
        raise ValueError("reward_penalties.malformed_think_tag needs the column turn_flags")
    flagged = (batch.turn_flags & _MALFORMED_THINKING) != 0
    return _cap_at_zero(batch, batch.sequence_ids[flagged & batch.loss_mask], "malformed_think_tag")


def mark_think_tags(batch: TrainBatch, opening: int, closing: int) -> Staged:
    """Set the flag of malformed thinking on the tokens of every turn whose tags do not match those before it.

    With as many opening as closing tags before the turn, it must have none; with one more, exactly one closing tag.
    """
    turns = find_turns(batch)
    opens, closes = batch.tokens == opening, batch.tokens == closing
    depth = _count_before(opens, batch)[turns.starts] - _count_before(closes, batch)[turns.starts]
    has_opens = count_tokens(opens, turns) > 0
    is_malformed = has_opens | (count_tokens(closes, turns) != depth) | (depth > 1)
    sampled = batch.loss_mask.nonzero().squeeze(1)
    malformed = torch.zeros(batch.num_tokens, dtype=torch.bool)
    malformed[sampled] = is_malformed[turns.of_token[sampled]]
    flags = torch.zeros(batch.num_tokens, dtype=torch.int64) if batch.turn_flags is None else batch.turn_flags
    flags = torch.where(malformed, flags | _MALFORMED_THINKING, flags)
    total = int((count_tokens((flags & _MALFORMED_THINKING) != 0, turns) > 0).sum())
    rate = total / max(turns.starts.numel(), 1)
    told = {"num_malformed_thinking": float(total), "malformed_thinking_rate": rate}
    return batch.with_columns(turn_flags=flags), told


def _shaping(config: RewardShapingConfig) -> RewardTransform:
    coefficient = config.stop_properly_penalty_coef
    if coefficient is not None:
        return RewardTransform("stop_properly", lambda batch: penalize_truncated(batch, coefficient))
    length, buffer, penalty = (
        config.max_response_length,
        config.overlong_buffer_length,
        config.overlong_buffer_penalty,
    )
    if length is None or buffer is None or penalty is None:
        raise ConfigError(
            "grpo.reward_shaping.enabled=true needs max_response_length, overlong_buffer_length and "
            f"overlong_buffer_penalty, got {length}, {buffer} and {penalty}; or stop_properly_penalty_coef"
        )
    return RewardTransform("overlong", OverlongPunishment(length, buffer, penalty))


def _cap_at_zero(batch: TrainBatch, sequences: Tensor, name: str) -> Staged:
    """Cap the rewards of the rollouts that own `sequences` ([K] int64, repeats allowed) at 0."""
    rollouts = by_rollout(batch)
    hit = torch.zeros(rollouts.rows.numel(), dtype=torch.bool)
    hit[rollouts.of_sequence[sequences]] = True
    rewards = torch.where(hit[rollouts.of_sequence], batch.rewards.clamp(max=0), batch.rewards)
    return batch.with_columns(rewards=rewards), {f"reward_penalties/{name}": float((hit & rollouts.valid).sum())}


def _count_before(marks: Tensor, batch: TrainBatch) -> Tensor:
    """Return [T] int64: how many of `marks` stand before each token in its sequence."""
    before = marks.cumsum(0) - marks.to(torch.int64)
    return before - before[batch.offsets[:-1]][batch.sequence_ids]
