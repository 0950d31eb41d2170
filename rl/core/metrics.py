"""Metric values that know how to be reduced, and a span timer.

A loss returns sums tagged with the count they must be divided by; the division happens once, by global counts
(equation 1.2 of the algorithm notes: L = (1/N) sum over all micro-batches and ranks).
"""

import enum
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from rl.core.clock import Clock


class Per(enum.Enum):
    """What a metric sum is divided by, or which extremum it is.

    TOKENS and SEQUENCES count, for a loss, the whole optimizer step; for a metric, the part that was computed: a mean
    of what the policy did does not shrink when sequences that change nothing are left out.
    """

    TOKENS = "tokens"
    SEQUENCES = "sequences"
    NONE = "none"
    MIN = "min"
    MAX = "max"


@dataclass(frozen=True)
class Metric:
    """One partial value of a metric: a sum with its denominator kind, or a running extremum."""

    value: float
    per: Per


@dataclass(frozen=True)
class Counts:
    """What divides the sums of one optimizer step, over all its micro-batches and ranks.

    Attributes:
        tokens: Sum of token weights (N_tok).
        sequences: Sum of sequence weights (N_seq); a sequence without a token counts.
        positive_tokens: Sum of token weights over sequences with a positive reward (N_pos).
    """

    tokens: float
    sequences: float
    positive_tokens: float = 0.0


def merge_metrics(parts: list[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Add sums and combine extrema of the same name over micro-batches or ranks."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = metric if name not in merged else _combine(merged[name], metric)
    return merged


def finalize_metrics(sums: Mapping[str, Metric], num_tokens: float, num_sequences: float) -> dict[str, float]:
    """Divide every sum once by its count over all micro-batches and ranks.

    Args:
        sums: Merged metrics.
        num_tokens: Sum of the weights of the tokens that the sums are over.
        num_sequences: Sum of the weights of their sequences.

    Returns:
        Values by name; those without a counted token or sequence are left out.
    """
    denominators = {Per.TOKENS: num_tokens, Per.SEQUENCES: num_sequences, Per.NONE: 1.0, Per.MIN: 1.0, Per.MAX: 1.0}
    finite = {name: m for name, m in sums.items() if m.per not in (Per.MIN, Per.MAX) or abs(m.value) != float("inf")}
    return {name: m.value / denominators[m.per] for name, m in finite.items() if denominators[m.per] > 0}


def _combine(left: Metric, right: Metric) -> Metric:
    if left.per is not right.per:
        raise ValueError(f"a metric is reported both per {left.per.value} and per {right.per.value}")
    if left.per is Per.MIN:
        return Metric(min(left.value, right.value), Per.MIN)
    if left.per is Per.MAX:
        return Metric(max(left.value, right.value), Per.MAX)
    return Metric(left.value + right.value, left.per)


class Timers:
    """Seconds by phase name; a phase entered several times adds up."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Add the duration of the `with` block to phase `name`."""
        start = self._clock.now()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock.now() - start

    def drain(self) -> dict[str, float]:
        """Return all phases in seconds and start over."""
        seconds, self._seconds = self._seconds, {}
        return seconds
