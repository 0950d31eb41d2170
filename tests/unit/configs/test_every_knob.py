"""Every setting does something: flipping it changes what a real function computes, or it is refused by name."""

import itertools
from collections import defaultdict

import pytest

from rl.controller.load import load_config
from rl.core.errors import ConfigError
from tests.support.knob_probes import differ
from tests.support.knob_rows import ELSEWHERE, FLIPS, REFUSED
from tests.support.knob_workshop import Workshop
from tests.support.knobs import Flip, Refused, all_knobs, found_at


@pytest.mark.parametrize("row", FLIPS, ids=lambda row: row.label)
def test_every_two_values_of_a_setting_give_different_results(workshop: Workshop, row: Flip) -> None:
    results = [row.probe(workshop.load(overrides)) for overrides in row.overrides()]
    for (first, left), (second, right) in itertools.combinations(enumerate(results), 2):
        assert differ(left, right), f"{row.key}: {row.values[first]} and {row.values[second]} do the same"


@pytest.mark.parametrize("row", {row.probe: row for row in FLIPS}.values(), ids=lambda row: row.probe.__name__)
def test_the_same_setting_gives_the_same_result(workshop: Workshop, row: Flip) -> None:
    case = workshop.load(row.overrides()[0])
    assert not differ(row.probe(case), row.probe(case))


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: f"{row.key}={row.value}")
def test_a_value_without_effect_is_refused_by_name(workshop: Workshop, row: Refused) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(workshop.run.config, [*row.base, f"{row.key}={row.value}"])
    assert row.key in str(refused.value)
    assert row.words in str(refused.value)


def test_every_setting_has_a_row_and_every_value_of_a_choice_is_flipped(workshop: Workshop) -> None:
    seen: dict[str, list[object]] = defaultdict(list)
    for row in FLIPS:
        for overrides in row.overrides():
            name, value = found_at(workshop.load(overrides).config, row.subject)
            seen[name].append(value)
    refused = {found_at(workshop.load(row.base).config, row.key)[0] for row in REFUSED}
    elsewhere = {name for row in ELSEWHERE for name in row.fields}
    knobs = all_knobs()
    assert sorted({*seen, *refused, *elsewhere} - set(knobs)) == [], "rows about no setting"
    assert sorted(set(knobs) - {*seen, *refused, *elsewhere}) == [], "settings without a row"
    missing = {
        name: [choice for choice in knob.choices if choice not in seen[name]]
        for name, knob in knobs.items()
        if name not in refused and name not in elsewhere
    }
    assert {name: choices for name, choices in missing.items() if choices} == {}


def test_few_settings_that_decide_what_is_computed_are_shown_by_other_tests() -> None:
    knobs = all_knobs()
    semantic = {name for row in ELSEWHERE for name in row.fields if not knobs[name].operational}
    assert {name for name in semantic if not name.startswith("SandboxLimits.")} == {
        "DataConfig.rewritten_history",
        "MasterConfig.extras",
    }
