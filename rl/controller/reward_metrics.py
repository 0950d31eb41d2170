"""The numbers of one step about rewards and advantages. Pure functions; names carry no prefix.

`reward` is what the run trains on: after scaling, shaping and penalties. What tells how hard the prompts are goes by
raw rewards. A metric over nothing (no valid rollout) is left out rather than reported as 0.
"""

from collections.abc import Sequence

import torch

from rl.algorithms.advantages import by_rollout, voting_tokens
from rl.algorithms.filters import keep_group
from rl.core.batch import TrainBatch
from rl.core.types import PolicyVersion, RolloutGroup


def reward_metrics(groups: Sequence[RolloutGroup], batch: TrainBatch) -> dict[str, float]:
    """Mean trained reward over valid rollouts, the share of groups by their mean, and failed rewards apart from zeros.

    Args:
        groups: What the step was made of, with raw rewards.
        batch: Its batch, with the rewards that were trained on; rollouts in the order of the groups.
    """
    trained = by_rollout(batch)
    rewards, valid = trained.rewards.to(torch.float64), trained.valid
    varied = torch.tensor(
        [is_varied for group in groups for is_varied in [keep_group(group)] * len(group.rollouts)], dtype=torch.bool
    )
    metrics = {"num_valid_rollouts": float(valid.sum()), "num_invalid_rollouts": float((~valid).sum())}
    metrics |= _mean("reward", rewards[valid]) | _mean("filtered_reward", rewards[valid & varied])
    return metrics | _raw_metrics(groups) | _component_means(groups)


def batch_metrics(batch: TrainBatch, version: PolicyVersion) -> dict[str, float]:
    """The size of the step, advantages over the sampled tokens of valid rollouts, and the staleness of trained ones.

    Args:
        batch: The batch that was trained on.
        version: The version that trained on it.
    """
    num_rollouts = by_rollout(batch).rows.numel()
    metrics = {"total_num_tokens": float(batch.num_tokens), "num_rollouts": float(num_rollouts)}
    if num_rollouts != batch.num_sequences:
        metrics["num_sequences"] = float(batch.num_sequences)
    trained = batch.token_weights > 0
    if bool(trained.any()):
        lag = (version - batch.token_versions[trained]).to(torch.float64)
        metrics |= {"staleness_mean": float(lag.mean()), "staleness_max": float(lag.max())}
    votes = voting_tokens(batch)
    if batch.advantages is not None and bool(votes.any()):
        advantages = batch.advantages[votes].to(torch.float64)
        figures = {"mean": advantages.mean(), "max": advantages.max(), "min": advantages.min()}
        metrics |= {f"advantages/{name}": float(value) for name, value in figures.items()}
        metrics["advantages/sum"] = float(advantages.sum())
    return metrics


def _raw_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    scored = [rewards for rewards in map(_raw_rewards, groups) if rewards]
    if not scored:
        return {}
    flat = [reward for rewards in scored for reward in rewards]
    means = [sum(rewards) / len(rewards) for rewards in scored]
    return {
        "mean_total_reward": sum(flat) / len(flat),
        "max_total_reward": max(flat),
        "min_total_reward": min(flat),
        "baseline_reward/pct_0": sum(mean == 0.0 for mean in means) / len(means),
        "baseline_reward/pct_1": sum(mean == 1.0 for mean in means) / len(means),
        "baseline_reward/pct_mixed": sum(mean not in (0.0, 1.0) for mean in means) / len(means),
    }


def _component_means(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group.rollouts if rollout.is_valid]
    found: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.reward_components.items():
            found.setdefault(name, []).append(value)
    return {f"reward/{name}": sum(values) / len(values) for name, values in sorted(found.items())}


def _raw_rewards(group: RolloutGroup) -> list[float]:
    return [rollout.reward for rollout in group.rollouts if rollout.is_valid]


def _mean(name: str, values: torch.Tensor) -> dict[str, float]:
    return {name: float(values.mean())} if values.numel() else {}
