"""Which checkpoints are kept. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SavedStep:
    """A checkpoint as the rule sees it; None = it has no value of the metric."""

    step: int
    metric: float | None


def keep(history: Sequence[SavedStep], save_period: int, keep_top_k: int | None, higher_is_better: bool) -> set[int]:
    """Return the steps to keep: the latest, and the best `keep_top_k` of the periodic ones (None = all of them).

    A missing metric is worse than any; among equals the newer is better, so that without a metric the newest are kept.
    """
    if not history:
        return set()
    latest = max(entry.step for entry in history)
    if keep_top_k is None:
        return {entry.step for entry in history if entry.step % save_period == 0} | {latest}

    def rank(entry: SavedStep) -> tuple[bool, float, int]:
        value = 0.0 if entry.metric is None else entry.metric
        return entry.metric is not None, value if higher_is_better else -value, entry.step

    periodic = sorted((e for e in history if e.step % save_period == 0), key=rank, reverse=True)
    return {entry.step for entry in periodic[:keep_top_k]} | {latest}
