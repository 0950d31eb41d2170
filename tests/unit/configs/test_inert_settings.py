"""Under every estimator and every kind of loss, a setting that is accepted changes the training of a fixed batch."""

import itertools
from typing import Any

import pytest

from rl.core.errors import ConfigError
from tests.support.knob_probes import differ, trained
from tests.support.knob_rows import FLIPS
from tests.support.knob_rows_training import BY_SEQUENCE, COMPONENTS, JUDGED, SEVERAL, TOOLS
from tests.support.knob_workshop import Workshop
from tests.support.knobs import Flip

ESTIMATORS = ("grpo", "rloo", "dr_grpo", "reinforce_plus_plus", "gdpo", "raw_reward")
LOSSES: dict[str, tuple[str, ...]] = {
    "one update": (),
    "several updates": SEVERAL,
    "no ratio": ("loss_fn.disable_ppo_ratio=true",),
    "ratio one": ("loss_fn.force_on_policy_ratio=true",),
    "ratio per sequence": (*SEVERAL, *BY_SEQUENCE, "loss_fn.sequence_level_importance_ratios=true"),
    "cispo": (*SEVERAL, "loss_fn.use_cispo=true"),
}
ROWS = [row for row in FLIPS if row.probe is trained and not row.key.startswith("grpo.adv_estimator")]


def _accepted(workshop: Workshop, row: Flip, context: tuple[str, ...]) -> dict[str, Any]:
    """What each accepted value of a row makes of the batch. Its base must not choose another estimator."""
    base = tuple(text for text in row.base if not text.startswith("grpo.adv_estimator"))
    # Components for GDPO, where the row needs no environment of its own.
    components = () if {*TOOLS, *JUDGED} & {*base} else COMPONENTS
    found = {}
    for overrides in row.overrides():
        written = overrides[len(row.base) :]
        try:
            case = workshop.load((*components, *context, *base, *written))
        except ConfigError:
            continue
        found[written[0]] = trained(case)
    return found


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("loss", LOSSES)
def test_what_is_accepted_has_an_effect(workshop: Workshop, estimator: str, loss: str) -> None:
    context = (f"grpo.adv_estimator={{_override_: true, name: {estimator}}}", *LOSSES[loss])
    inert, flipped = [], 0
    for row in ROWS:
        results = _accepted(workshop, row, context)
        flipped += len(results) > 1
        for (first, left), (second, right) in itertools.combinations(results.items(), 2):
            if not differ(left, right):
                inert.append(f"{first} and {second}")
    assert inert == []
    assert flipped >= len(ROWS) / 2
