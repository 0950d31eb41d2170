"""Every metric by name: its unit, how it is reduced, what it means, and when it is logged.

A name that stands nowhere here is a mistake of whoever logs it, and an error. docs/metrics.md is made of this table. It
computes nothing; the code that does is named by nobody here, because a metric may come from several places.

    check_metric_names(["train/reward", "validation/accuracy", "train/env/my_own_number"])
    spec = find_spec("train/probs_ratio")      # spec.unit, spec.reduction, spec.meaning, spec.when

To add a metric, add a line to the table of its area. A name that ends in * stands for all names that begin so.
"""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rl.core.metric_tables import GROUPS, MetricGroup

__all__ = ["MetricSpec", "check_metric_names", "find_spec", "metric_groups"]

_CLOSE = 0.6
_ANY = "*"


@dataclass(frozen=True)
class MetricSpec:
    """What is known of one metric, or of a family of them.

    Attributes:
        name: Full name with its prefix, as in metrics.jsonl; a family's ends in *.
        unit: Of its values; "1" is a plain number or a share.
        reduction: How the parts of a step (tokens, sequences, rollouts, optimizer steps) become one value.
        meaning: One sentence.
        when: When it is logged; "" = with every line of its kind.
    """

    name: str
    unit: str
    reduction: str
    meaning: str
    when: str = ""

    @property
    def is_family(self) -> bool:
        """Whether it stands for all names with its beginning."""
        return self.name.endswith(_ANY)

    def covers(self, name: str) -> bool:
        """Whether `name` is this metric, or one of this family."""
        if not self.is_family:
            return name == self.name
        start = self.name.removesuffix(_ANY)
        return name.startswith(start) and len(name) > len(start)


def metric_groups() -> Sequence[tuple[MetricGroup, tuple[MetricSpec, ...]]]:
    """Return the areas in the order of the documentation, each with its metrics."""
    return [(group, tuple(MetricSpec(group.prefix + row[0], *row[1:]) for row in group.rows)) for group in GROUPS]


def find_spec(name: str) -> MetricSpec | None:
    """Return what is known of `name`; a line of its own goes before a family."""
    found = _EXACT.get(name)
    return found or next((spec for spec in _FAMILIES if spec.covers(name)), None)


def check_metric_names(names: Iterable[str]) -> None:
    """Refuse metrics that nobody has described.

    Args:
        names: Full names, as in metrics.jsonl.

    Raises:
        ValueError: a name is not registered; says which, and what it may have been meant to be.
    """
    unknown = [name for name in names if find_spec(name) is None]
    if unknown:
        told = "; ".join(f"'{name}'{_suggestion(name)}" for name in unknown)
        raise ValueError(f"metrics that are not in rl/core/metric_tables.py: {told}; describe them there")


def _suggestion(name: str) -> str:
    close = difflib.get_close_matches(name, list(_EXACT), n=1, cutoff=_CLOSE)
    return f" (did you mean '{close[0]}'?)" if close else ""


_SPECS = [spec for _, specs in metric_groups() for spec in specs]
_EXACT = {spec.name: spec for spec in _SPECS if not spec.is_family}
_FAMILIES = [spec for spec in _SPECS if spec.is_family]
