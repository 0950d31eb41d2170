"""What a step reports beside its rewards: rates, the refit, environments, and what became of each rollout.

Pure functions; names carry no prefix.
"""

import math
from collections.abc import Mapping, Sequence

import torch

from rl.core.batch import TrainBatch
from rl.core.types import Rollout, RolloutGroup, TrainedSequence
from rl.weights.report import SyncReport

_REFIT_PARTS = ("pause", "transfer", "commit", "gather", "copy", "digest", "wire", "load")


def trained_by_rollout(groups: Sequence[RolloutGroup], batch: TrainBatch) -> dict[str, tuple[TrainedSequence, ...]]:
    """What the step made of each rollout, by id: one entry per sequence, in turn order.

    Args:
        groups: The groups that `batch` was laid out from, in order.
        batch: The batch that was trained on.
    """
    ids = [rollout.rollout_id for group in groups for rollout in group.rollouts]
    rows = torch.arange(batch.num_sequences) if batch.rollout_ids is None else batch.rollout_ids
    found: dict[str, list[TrainedSequence]] = {}
    for row, place in enumerate(rows.tolist()):
        start, end = int(batch.offsets[row]), int(batch.offsets[row + 1])
        reward, weight = float(batch.rewards[row]), float(batch.sample_weights[row])
        advantages = _advantages(batch, start, end)
        found.setdefault(ids[place], []).append(TrainedSequence(reward, weight, advantages))
    return {rollout_id: tuple(sequences) for rollout_id, sequences in found.items()}


def _advantages(batch: TrainBatch, start: int, end: int) -> float | tuple[float, ...]:
    """Advantages of the sampled tokens among positions [start, end); NaN where the batch has none."""
    if batch.advantages is None:
        return math.nan
    values: list[float] = batch.advantages[start:end][batch.loss_mask[start:end]].tolist()
    return values[0] if len(set(values)) == 1 else tuple(values)


def refit_metrics(report: SyncReport) -> dict[str, float]:
    """How the weights moved, and what it took; a part that no end reports is 0."""
    seconds = {f"{part}_s": report.parts.get(part, 0.0) for part in _REFIT_PARTS}
    return seconds | {
        "version": float(report.version),
        "seconds": report.seconds,
        "mib": report.bytes / 2**20,
        "tensors": float(report.tensors),
        "changed_tensors": float(report.changed),
        "replicas": float(report.replicas),
        "attempts": float(report.attempts),
        "digest_share": seconds["digest_s"] / report.seconds if report.seconds else 0.0,
    }


def rates(
    num_tokens: float, num_rollouts: float, seconds: Mapping[str, float], total: str, training: str
) -> dict[str, float]:
    """Tokens (prompts included) and rollouts per second of the whole step and of training."""
    metrics = {}
    if seconds.get(total):
        metrics["tokens_per_sec"] = num_tokens / seconds[total]
        metrics["samples_per_sec"] = num_rollouts / seconds[total]
    if seconds.get(training):
        metrics["policy_training_tokens_per_sec"] = num_tokens / seconds[training]
    return metrics


def prefixed(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Put `prefix/` before every name."""
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def environment_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Means of the environments' own numbers over the rollouts that have them, under env/."""
    names = sorted({name for rollout in rollouts for name in rollout.metrics})
    found = {name: [r.metrics[name] for r in rollouts if name in r.metrics] for name in names}
    return {f"env/{name}": sum(values) / len(values) for name, values in found.items()}
