"""Every value of every option, and every pair of switches, makes a whole optimizer step or is refused by name."""

from collections.abc import Iterator

import pytest

from rl.controller.checks import find_conflicts
from tests.support.knob_rows import FLIPS
from tests.support.knob_workshop import Workshop
from tests.support.one_step import one_step
from tests.support.switches import BASES, NO_SWITCHES, TRAINING_SECTIONS, built, covering, switches


def _values() -> Iterator[tuple[str, ...]]:
    """The overrides of each value of each row about training."""
    for row in FLIPS:
        if row.key.startswith(TRAINING_SECTIONS) and not row.key.startswith(NO_SWITCHES):
            yield from row.overrides()


@pytest.mark.parametrize("overrides", dict.fromkeys(_values()), ids=lambda overrides: " ".join(overrides)[-90:])
async def test_every_value_makes_a_whole_step(workshop: Workshop, overrides: tuple[str, ...]) -> None:
    metrics = await one_step(workshop.load(overrides).config)
    assert metrics["train/num_rollouts"] > 0


async def test_pairs_of_switches_make_a_whole_step_or_are_refused_by_name(workshop: Workshop) -> None:
    names = switches()
    assert len(names) >= 18
    steps, refused_in = 0, []
    for overrides in BASES.values():
        base = workshop.load(overrides).config
        accepted, refused = covering(base)
        for pair in refused:
            conflicts = list(find_conflicts(built(base, dict(pair))))
            named = {key for conflict in conflicts for key in conflict.keys}
            assert named & {name for name, _ in pair}, f"{pair} is refused without naming either: {conflicts}"
        refused_in.append(set(refused))
        for config in accepted:
            await one_step(config)
        steps += len(accepted)
    pairs = 2 * len(names) * (len(names) - 1)
    refused_everywhere = set.intersection(*refused_in)
    assert len(refused_everywhere) <= 0.05 * pairs, sorted(refused_everywhere)
    assert steps >= 40
