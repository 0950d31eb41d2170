"""Make one reward out of named components: reward = sum over components c of weight_c * r_c. Pure functions.

The rule for what is missing: a sample is scored only when every weighted component is a finite number. Otherwise it has
no reward, with a reason that names the component; it never counts as zero, and the other weights are not stretched.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rl.environments.reward_function import Fault, SampleValue, size_fault


@dataclass(frozen=True)
class Weighed:
    """A sample's reward and its parts; `reward` is NaN when `fault` tells why there is none."""

    reward: float
    components: Mapping[str, float] = field(default_factory=dict)
    fault: str = ""


def weigh_group(values: Sequence[SampleValue], weights: Mapping[str, float]) -> list[Weighed]:
    """Weigh the samples of one group.

    Args:
        values: Of each sample a number, or its components by name.
        weights: Weight of every component; empty where samples are plain numbers, or every component weighs 1. Then
            the components are those that any sample of the group has.
    """
    mappings = [value for value in values if isinstance(value, dict)]
    names = list(weights) or list(dict.fromkeys(name for mapping in mappings for name in mapping))
    if not names and not mappings:
        return [_unscored(value.words) if isinstance(value, Fault) else _plain(value) for value in values]
    return [_weigh(value, {name: weights.get(name, 1.0) for name in names}) for value in values]


def _plain(value: SampleValue) -> Weighed:
    assert isinstance(value, float)
    return Weighed(value)


def _weigh(value: SampleValue, weights: Mapping[str, float]) -> Weighed:
    if isinstance(value, Fault):
        return _unscored(value.words)
    if not isinstance(value, dict):
        return _unscored(f"returned the number {value}, expected the components {_listed(weights)}")
    if not weights:
        return _unscored("returned a mapping without components")
    if unknown := [name for name in value if name not in weights]:
        return _unscored(
            f"component {_listed(unknown)} has no weight; weights name {_listed(weights)} (a weight of 0 only logs it)"
        )
    if missing := [name for name in weights if name not in value]:
        return _unscored(f"component {_listed(missing)} is missing; it has {_listed(value) or 'none'}")
    numbers = {name: part for name, part in value.items() if not isinstance(part, Fault)}
    faults = [f"component '{name}': {part.words}" for name, part in value.items() if isinstance(part, Fault)]
    if faults:
        return _unscored("; ".join(faults))
    reward = math.fsum(weight * numbers[name] for name, weight in weights.items())
    if fault := size_fault(reward):
        return _unscored(f"the weighted sum of the components {fault}")
    return Weighed(reward, numbers)


def _unscored(words: str) -> Weighed:
    return Weighed(math.nan, fault=words)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
