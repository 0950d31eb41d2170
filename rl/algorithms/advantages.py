"""Advantages from the rewards of sibling rollouts. Groups go by id; rows that are not valid do not vote and get 0.

sequence_advantages = group_advantages(batch.rewards, batch.valid, batch.group_ids, leave_one_out=True, normalize=True)
advantages = broadcast_to_tokens(sequence_advantages, batch)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rl.core.batch import TrainBatch

_EPSILON = 1e-6


@dataclass(frozen=True)
class GroupStatistics:
    """Statistics of each row's group over its n valid rows, in float64.

    Attributes:
        count: [N], n.
        mean: [N]; 0 when n is 0.
        std: [N], unbiased (divisor n - 1); 0 when n <= 1.
    """

    count: Tensor
    mean: Tensor
    std: Tensor


def group_statistics(rewards: Tensor, valid: Tensor, group_ids: Tensor) -> GroupStatistics:
    """Return count, mean and unbiased standard deviation of every row's group.

    Args:
        rewards: [N] float; anything where not valid.
        valid: [N] bool.
        group_ids: [N] int64; rows of one group need not be adjacent.
    """
    _, group = torch.unique(group_ids, return_inverse=True)
    num_groups = int(group.max()) + 1 if group.numel() else 0
    votes = valid.to(torch.float64)

    def sum_by_group(values: Tensor) -> Tensor:
        return torch.zeros(num_groups, dtype=torch.float64).index_add(0, group, values)[group]

    kept = torch.where(valid, rewards.to(torch.float64), 0.0)
    count = sum_by_group(votes)
    mean = sum_by_group(kept) / count.clamp(min=1)
    # Around the mean, not by sums of squares: equal rewards must give exactly 0.
    variance = sum_by_group(votes * (kept - mean).square()) / (count - 1).clamp(min=1)
    spread = _max_by_group(kept, valid, group, num_groups) + _max_by_group(-kept, valid, group, num_groups)
    return GroupStatistics(count, mean, torch.where((count > 1) & (spread > 0), variance.sqrt(), 0.0))


def group_advantages(
    rewards: Tensor, valid: Tensor, group_ids: Tensor, *, leave_one_out: bool, normalize: bool
) -> Tensor:
    """Return one group-relative advantage per row (GRPO: Shao et al. 2024, "DeepSeekMath", section 4.1).

    A_i = r_i - b, divided by (s + 1e-6) when `normalize` and s > 0, where s is the unbiased standard deviation of the
    group's valid rewards. b is their mean, or with `leave_one_out` the mean of the other valid rows (RLOO: Ahmadian et
    al. 2024), which scales r_i - mean by n / (n - 1) and keeps the group's sum at 0. Rows that are not valid or whose
    reward is not finite, groups with one valid row, and groups with equal rewards get 0.

    Args:
        rewards: [N] float; anything where not valid.
        valid: [N] bool.
        group_ids: [N] int64.

    Returns:
        [N] float32.
    """
    valid = valid & rewards.isfinite()
    statistics = group_statistics(rewards, valid, group_ids)
    advantages = rewards.to(torch.float64) - statistics.mean
    if leave_one_out:
        advantages = advantages * statistics.count / (statistics.count - 1).clamp(min=1)
    if normalize:
        advantages = advantages / (statistics.std + _EPSILON)
    return torch.where(valid & (statistics.std > 0), advantages, 0.0).to(torch.float32)


def broadcast_to_tokens(values: Tensor, batch: TrainBatch) -> Tensor:
    """Return [T]: each token carries the value ([N]) of its sequence."""
    return values[batch.sequence_ids]


def _max_by_group(values: Tensor, valid: Tensor, group: Tensor, num_groups: int) -> Tensor:
    lowest = torch.full((num_groups,), -torch.inf, dtype=torch.float64)
    return lowest.scatter_reduce(0, group, torch.where(valid, values, -torch.inf), "amax")[group]
