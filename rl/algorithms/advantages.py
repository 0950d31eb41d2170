"""What estimators share: one row per rollout, the statistics of its siblings, and the way back to tokens.

Groups go by id. Rollouts that are not valid do not vote and get 0, as do all tokens that the policy did not sample.

    rollouts = by_rollout(batch)
    values = group_advantages(rollouts.rewards, rollouts.valid, rollouts.group_ids, leave_one_out=True, normalize=True)
    advantages = spread(values, rollouts, batch)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rl.core.batch import TrainBatch

_EPSILON = 1e-6


@dataclass(frozen=True)
class Rollouts:
    """The R rollouts of a batch of N sequences. A rollout that was laid out in several sequences votes once.

    Attributes:
        rows: [R] int64, the first sequence of each rollout.
        of_sequence: [N] int64, the rollout of each sequence.
        rewards: [R] float32; anything where not valid.
        valid: [R] bool, which rollouts vote; their rewards are finite.
        group_ids: [R] int64.
    """

    rows: Tensor
    of_sequence: Tensor
    rewards: Tensor
    valid: Tensor
    group_ids: Tensor


def by_rollout(batch: TrainBatch) -> Rollouts:
    """Take one row per rollout, in the order of their first sequences' ids."""
    own = torch.arange(batch.num_sequences)
    ids = own if batch.rollout_ids is None else batch.rollout_ids
    unique, of_sequence = torch.unique(ids, return_inverse=True)
    rows = torch.full_like(unique, batch.num_sequences).scatter_reduce(0, of_sequence, own, "amin")
    rewards = batch.rewards[rows]
    return Rollouts(rows, of_sequence, rewards, batch.valid[rows] & rewards.isfinite(), batch.group_ids[rows])


def spread(values: Tensor, rollouts: Rollouts, batch: TrainBatch) -> Tensor:
    """Return [T] float32: each sampled token carries the value ([R]) of its rollout, others 0."""
    by_token = values.to(torch.float32)[rollouts.of_sequence[batch.sequence_ids]]
    return torch.where(batch.loss_mask, by_token, 0.0)


def voting_tokens(batch: TrainBatch) -> Tensor:
    """Return [T] bool: the sampled tokens of valid sequences, which make up statistics over tokens."""
    return batch.loss_mask & (batch.valid & batch.rewards.isfinite())[batch.sequence_ids]


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
    spread_of = _max_by_group(kept, valid, group, num_groups) + _max_by_group(-kept, valid, group, num_groups)
    return GroupStatistics(count, mean, torch.where((count > 1) & (spread_of > 0), variance.sqrt(), 0.0))


def group_advantages(
    rewards: Tensor, valid: Tensor, group_ids: Tensor, *, leave_one_out: bool, normalize: bool
) -> Tensor:
    """Return one group-relative advantage per row.

    A_i = r_i - b, divided by (s + 1e-6) when `normalize` and s > 0, where s is the unbiased standard deviation of the
    group's valid rewards. b is their mean, or with `leave_one_out` the mean of the other valid rows, which scales
    r_i - mean by n / (n - 1) and keeps the group's sum at 0. Rows that are not valid or whose reward is not finite,
    groups with one valid row, and groups with equal rewards get 0.

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


def shuffle(advantages: Tensor, batch: TrainBatch, seed: int) -> Tensor:
    """Give every valid rollout the mean advantage of another ([T] -> [T]): a control in which nothing can be learned.

    The permutation follows from the seed and the step's first group, so a resumed run draws the same one.
    """
    rollouts = by_rollout(batch)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + int(batch.group_ids.min()))
    sampled = batch.loss_mask.nonzero().squeeze(1)
    owners = rollouts.of_sequence[batch.sequence_ids[sampled]]
    zeros = torch.zeros(rollouts.rows.numel(), dtype=torch.float64)
    sums = zeros.index_add(0, owners, advantages[sampled].to(torch.float64))
    means = sums / torch.bincount(owners, minlength=zeros.numel()).clamp(min=1)
    voters = rollouts.valid.nonzero().squeeze(1)
    shuffled = zeros.clone()
    shuffled[voters] = means[voters[torch.randperm(voters.numel(), generator=generator)]]
    return spread(shuffled, rollouts, batch)


def _max_by_group(values: Tensor, valid: Tensor, group: Tensor, num_groups: int) -> Tensor:
    lowest = torch.full((num_groups,), -torch.inf, dtype=torch.float64)
    return lowest.scatter_reduce(0, group, torch.where(valid, values, -torch.inf), "amax")[group]
