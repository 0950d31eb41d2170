"""The numbers of one step, from its groups and its batch. Pure functions; names carry no prefix.

A metric over nothing (no valid rollout) is left out rather than reported as 0.
"""

from collections.abc import Mapping, Sequence

import torch

from rl.core.batch import TrainBatch
from rl.core.types import PolicyVersion, Rollout, RolloutGroup
from rl.weights.sync import SyncReport


def reward_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Mean reward over valid rollouts, the share of groups by their mean, and failed rewards apart from zeros."""
    rewards = [[r.reward for r in group.rollouts if r.is_valid] for group in groups]
    scored = [group for group in rewards if group]
    flat = [reward for group in scored for reward in group]
    varied = [reward for group in scored if min(group) < max(group) for reward in group]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    metrics = {"num_valid_rollouts": float(len(flat)), "num_invalid_rollouts": float(len(rollouts) - len(flat))}
    metrics |= _mean("reward", flat) | _mean("filtered_reward", varied)
    means = [sum(group) / len(group) for group in scored]
    if means:
        metrics["baseline_reward/pct_0"] = sum(mean == 0.0 for mean in means) / len(means)
        metrics["baseline_reward/pct_1"] = sum(mean == 1.0 for mean in means) / len(means)
        metrics["baseline_reward/pct_mixed"] = sum(mean not in (0.0, 1.0) for mean in means) / len(means)
    return metrics | environment_metrics(rollouts)


def length_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Tokens of prompts and completions, in tokens; truncation and turns per rollout."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    generated = [float(completion_tokens(rollout)) for rollout in rollouts]
    prompts = [float(len(rollout.turns[0].prompt_tokens)) for rollout in rollouts]
    truncated = [float(rollout.is_truncated) for rollout in rollouts]
    turns = [float(len(rollout.turns)) for rollout in rollouts]
    return (
        _mean("mean_prompt_length", prompts)
        | _mean("mean_gen_tokens_per_sample", generated)
        | {"max_gen_tokens_per_sample": max(generated, default=0.0)}
        | _mean("truncation_rate", truncated)
        | _mean("avg_turns_per_sample", turns)
    )


def batch_metrics(batch: TrainBatch, version: PolicyVersion) -> dict[str, float]:
    """Advantages and staleness over the tokens that are trained on, with the version that trains them."""
    metrics = {"total_num_tokens": float(batch.num_tokens), "num_rollouts": float(batch.num_sequences)}
    trained = batch.token_weights > 0
    if not bool(trained.any()):
        return metrics
    lag = (version - batch.token_versions[trained]).to(torch.float64)
    metrics |= {"staleness_mean": float(lag.mean()), "staleness_max": float(lag.max())}
    if batch.advantages is not None:
        advantages = batch.advantages[trained].to(torch.float64)
        metrics["advantages/mean"] = float(advantages.mean())
        metrics["advantages/max"] = float(advantages.max())
        metrics["advantages/min"] = float(advantages.min())
    return metrics


def advantages_by_rollout(groups: Sequence[RolloutGroup], batch: TrainBatch) -> dict[str, float]:
    """Mean advantage over the sampled tokens of each rollout, by id; the batch holds the rollouts in group order."""
    if batch.advantages is None:
        return {}
    sums = torch.zeros(batch.num_sequences).index_add(0, batch.sequence_ids, batch.advantages * batch.loss_mask)
    counts = torch.zeros(batch.num_sequences).index_add(0, batch.sequence_ids, batch.loss_mask.to(torch.float32))
    ids = [rollout.rollout_id for group in groups for rollout in group.rollouts]
    return dict(zip(ids, (sums / counts).tolist(), strict=True))


def refit_metrics(report: SyncReport) -> dict[str, float]:
    """How the weights moved."""
    return {
        "version": float(report.version),
        "seconds": report.seconds,
        "mib": report.bytes / 2**20,
        "tensors": float(report.tensors),
        "replicas": float(report.replicas),
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


def completion_tokens(rollout: Rollout) -> int:
    """Sampled tokens over all turns."""
    return sum(len(turn.completion.tokens) for turn in rollout.turns)


def environment_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Means of the environments' own numbers over the rollouts that have them, under env/."""
    names = sorted({name for rollout in rollouts for name in rollout.metrics})
    found = {name: [r.metrics[name] for r in rollouts if name in r.metrics] for name in names}
    return {f"env/{name}": sum(values) / len(values) for name, values in found.items()}


def _mean(name: str, values: Sequence[float]) -> dict[str, float]:
    return {name: sum(values) / len(values)} if values else {}
