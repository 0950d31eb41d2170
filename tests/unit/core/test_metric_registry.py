"""Tests of rl.core.metric_registry."""

import pytest

from rl.core.metric_registry import check_metric_names, find_spec, metric_groups

SPECS = [spec for _, specs in metric_groups() for spec in specs]


def test_every_metric_is_described_once_and_wholly() -> None:
    names = [spec.name for spec in SPECS]
    assert len(names) == len(set(names))
    assert all(spec.unit and spec.reduction and spec.meaning.endswith(".") for spec in SPECS)


def test_known_names_and_members_of_open_families_pass() -> None:
    check_metric_names(
        ["train/reward", "train/env/my_number", "train/dropped_prompt_groups/stale", "validation/env/a/b", "refit/mib"]
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("train/rewards", r"'train/rewards' \(did you mean 'train/reward'\?\)"),
        ("train/env/", "'train/env/'"),
        ("timing/train/policy_trainin", r"did you mean 'timing/train/policy_training'\?"),
        ("reward", "'reward'"),
        ("critic/loss", "'critic/loss'"),
    ],
)
def test_an_unknown_name_is_an_error_that_suggests_another(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_metric_names(["train/loss", name])


def test_a_line_of_its_own_goes_before_a_family() -> None:
    spec = find_spec("train/dropped_prompt_groups")
    assert spec is not None
    assert not spec.is_family
    family = find_spec("train/dropped_prompt_groups/stale")
    assert family is not None
    assert family.name == "train/dropped_prompt_groups/*"
