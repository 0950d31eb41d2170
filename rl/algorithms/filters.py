"""Who is trained on: groups before the step, sequences within it.

Filters never touch a reward or a vote: a sequence that a filter drops has weight 0 in the loss and still counts in its
group's baseline. Groups are dropped whole and before the step (dynamic sampling), by the buffer.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from rl.algorithms.algorithm import Staged
from rl.core.batch import TrainBatch
from rl.core.types import RolloutGroup


def keep_group(group: RolloutGroup) -> bool:
    """Say whether a group can teach anything (dynamic sampling: Yu et al. 2025, "DAPO", equation 11).

    In YAML: `grpo.use_dynamic_sampling: true`. Raw rewards decide, so that no scaling or shaping can hide that all
    siblings did equally well.
    """
    return has_varied_rewards(rollout.reward for rollout in group.rollouts if rollout.is_valid)


def keep_group_by_component(group: RolloutGroup) -> bool:
    """As `keep_group`, for an estimator that looks at each reward component by itself: one that differs can teach.

    Siblings of equal sums may differ in what the sums are made of.
    """
    parts = [rollout.reward_components for rollout in group.rollouts if rollout.is_valid]
    names = {name for components in parts for name in components}
    return any(has_varied_rewards(part[name] for part in parts if name in part) for name in names)


def has_varied_rewards(rewards: Iterable[float]) -> bool:
    """Say whether valid rewards differ: by their extrema, for a variance of equal numbers need not round to 0.

    In the float32 of a batch: sums of the same turns in another order are the same reward.
    """
    values = torch.tensor(list(rewards), dtype=torch.float32)
    return values.numel() > 0 and bool(values.max() != values.min())


def drop_truncated(batch: TrainBatch) -> Staged:
    """Take the weight of responses that a length bound cut off (overlong filtering: DAPO, section 3.4).

    In YAML: `grpo.overlong_filtering: true`. Their reward says little about what was written so far, but it belongs to
    the baseline of their siblings.
    """
    if batch.truncated is None:
        raise ValueError("grpo.overlong_filtering needs the column truncated")
    dropped = batch.truncated & (batch.sample_weights > 0)
    return _without(batch, dropped), {"num_overlong_filtered": float(dropped.sum())}


def drop_by_logprob_error(batch: TrainBatch, threshold: float | None) -> Staged:
    """Take the weight of sequences whose generator and trainer disagree, and measure the disagreement of all.

    E = mean over the sequence's trained tokens of exp|lp_generation - lp_prev|; sequences with E > threshold, or with
    an E that is no number, are dropped. Sequences without a trained token have none.

    In YAML: `grpo.seq_logprob_error_threshold: 2.0`.

    Args:
        batch: With `prev_logprobs`; without it and without a threshold, nothing is measured.
        threshold: At least 1; None drops nothing.

    Raises:
        ValueError: there is a threshold and no `prev_logprobs`.
    """
    if batch.prev_logprobs is None:
        if threshold is not None:
            raise ValueError("grpo.seq_logprob_error_threshold needs the column prev_logprobs")
        return batch, {}
    errors, has_tokens = sequence_errors(batch, batch.prev_logprobs)
    metrics = _error_metrics(errors[has_tokens], "")
    if threshold is None:
        return batch, metrics
    dropped = has_tokens & ~(errors <= threshold)
    metrics |= _error_metrics(errors[has_tokens & ~dropped], "_after_mask")
    metrics["num_masked_seqs_by_logprob_error"] = float(dropped.sum())
    if bool(dropped.any()):
        rewards = batch.rewards if batch.raw_rewards is None else batch.raw_rewards
        metrics["masked_correct_pct"] = float((rewards[dropped] == 1).to(torch.float64).mean())
    return _without(batch, dropped), metrics


def sequence_errors(batch: TrainBatch, prev_logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Return E of each sequence ([N] float64), and whether it has a trained token ([N] bool)."""
    index = (batch.token_weights > 0).nonzero().squeeze(1)
    owners = batch.sequence_ids[index]
    gaps = (batch.generation_logprobs - prev_logprobs)[index].to(torch.float64).abs()
    counts = torch.bincount(owners, minlength=batch.num_sequences)
    sums = torch.zeros(batch.num_sequences, dtype=torch.float64).index_add(0, owners, gaps.exp())
    return sums / counts.clamp(min=1), counts > 0


def _error_metrics(errors: Tensor, suffix: str) -> dict[str, float]:
    finite = errors[errors.isfinite()]
    if finite.numel() == 0:
        return {}
    figures = {"max": finite.max(), "mean": finite.mean(), "min": finite.min()}
    return {f"{name}_seq_mult_prob_error{suffix}": float(value) for name, value in figures.items()}


def _without(batch: TrainBatch, dropped: Tensor) -> TrainBatch:
    return batch.with_columns(sample_weights=torch.where(dropped, 0.0, batch.sample_weights))
