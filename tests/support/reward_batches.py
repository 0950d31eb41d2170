"""Batches for tests of rewards and advantages: everything that must not matter is NaN."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rl.core.batch import TrainBatch

NAN = math.nan


def reward_batch(
    rewards: Sequence[float],
    lengths: Sequence[int] | None = None,
    *,
    masks: Sequence[Sequence[int]] | None = None,
    groups: Sequence[int] | None = None,
    rollouts: Sequence[int] | None = None,
    truncated: Sequence[bool] | None = None,
    components: Mapping[str, Sequence[float]] | None = None,
    tokens: Sequence[int] | None = None,
    **columns: Sequence[float],
) -> TrainBatch:
    """A batch of one sequence per reward; a NaN reward is a rollout that failed.

    Each sequence is one prompt token, then the positions of `masks` (1 = sampled), by default `lengths` sampled tokens
    (2 each). `columns` are [T] columns and `tokens` the ids, given without the prompt tokens, flat. Groups default to
    one, rollouts to one per sequence.
    """
    if masks is None:
        masks = [[1] * length for length in (lengths or [2] * len(rewards))]
    full = [[0, *mask] for mask in masks]
    sizes = torch.tensor([len(mask) for mask in full])
    flat = torch.tensor([bool(sampled) for mask in full for sampled in mask])
    first = torch.zeros_like(flat)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    first[offsets[:-1]] = True
    count = len(rewards)
    raw = torch.tensor(rewards, dtype=torch.float32)
    valid = raw.isfinite()
    ids = torch.zeros(flat.numel(), dtype=torch.int64)
    if tokens is not None:
        ids[~first] = torch.tensor(tokens)
    names = tuple(sorted(components)) if components else ()
    table = [list(components[name]) for name in names] if components else []

    def column(values: Sequence[float]) -> Tensor:
        return torch.full((flat.numel(),), NAN).masked_scatter(~first, torch.tensor(values, dtype=torch.float32))

    batch = TrainBatch(
        tokens=ids,
        offsets=offsets,
        loss_mask=flat,
        generation_logprobs=torch.where(flat, -1.0, 0.0),
        token_versions=torch.where(flat, 0, -1),
        group_ids=torch.tensor(groups if groups is not None else [0] * count),
        rewards=raw,
        valid=valid,
        sample_weights=valid.to(torch.float32),
        versions=torch.zeros(count, 2, dtype=torch.int64),
        turn_flags=torch.zeros(flat.numel(), dtype=torch.int64),
        rollout_ids=torch.tensor(rollouts if rollouts is not None else range(count)),
        raw_rewards=raw,
        truncated=torch.tensor(truncated if truncated is not None else [False] * count),
        reward_components=torch.tensor(table, dtype=torch.float32).reshape(len(names), count).T.contiguous(),
        component_names=names,
    )
    return batch.with_columns(**{name: column(values) for name, values in columns.items()})


def by_sequence(advantages: Tensor, batch: TrainBatch) -> list[float]:
    """The one advantage of each sequence's sampled tokens; all else must be 0."""
    assert torch.all(advantages[~batch.loss_mask] == 0)
    found = [advantages[batch.loss_mask & (batch.sequence_ids == row)] for row in range(batch.num_sequences)]
    assert all(values.unique().numel() == 1 for values in found)
    return [float(values[0]) for values in found]
