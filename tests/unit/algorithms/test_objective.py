"""The flags of `loss_fn` become the right parts."""

import math
from typing import Any

import pytest

from rl.algorithms.cispo import Cispo
from rl.algorithms.config import LossConfig
from rl.algorithms.corrections import IcePop, Level, Off, Raw, SequenceMask, Tis
from rl.algorithms.gspo import SequenceRatio
from rl.algorithms.kl_term import KlPlace, KlTerm
from rl.algorithms.objective import parse_objective
from rl.algorithms.ppo import Clip, TokenRatio
from rl.algorithms.reduction import SEQUENCES, TOKENS, constant
from rl.algorithms.reinforce import NoRatio, OnPolicyRatio, Unclipped
from rl.core.errors import ConfigError

BOUNDS = {
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_ratio": 5.0,
    "truncated_importance_sampling_ratio_min": 0.2,
}
SEQUENCE = {"sequence_level_importance_ratios": True, "token_level_loss": False}


def test_the_default_is_ppo_with_k3_in_the_loss() -> None:
    loss = parse_objective(LossConfig(), single_update=False)
    assert (loss.ratio, loss.surrogate, loss.correction) == (TokenRatio(), Clip(0.2, 0.2), Off())
    assert loss.kl == KlTerm(KlPlace.LOSS, "k3", 0.01, 20.0, 10.0, on_policy_weight=False)
    assert (loss.reduction, loss.entropy_coef, loss.nll_weight) == (TOKENS, 0.0, 0.0)


@pytest.mark.parametrize(
    ("changes", "part", "expected"),
    [
        ({"force_on_policy_ratio": True}, "ratio", OnPolicyRatio()),
        ({"force_on_policy_ratio": True, "disable_ppo_ratio": True}, "ratio", OnPolicyRatio()),
        ({"disable_ppo_ratio": True}, "ratio", NoRatio()),
        (SEQUENCE, "ratio", SequenceRatio()),
        ({"force_on_policy_ratio": True}, "surrogate", Unclipped()),
        ({"disable_ppo_ratio": True}, "surrogate", Unclipped()),
        ({"ratio_clip_max": 0.28, "ratio_clip_c": 10.0}, "surrogate", Clip(0.2, 0.28, 10.0)),
        ({"use_cispo": True, "ratio_clip_min": 1.0, "ratio_clip_max": 5.0}, "surrogate", Cispo(1.0, 5.0)),
        (SEQUENCE, "correction", Off(Level.SEQUENCE)),
        ({"use_importance_sampling_correction": True}, "correction", Raw()),
        (SEQUENCE | {"use_importance_sampling_correction": True}, "correction", Raw(Level.SEQUENCE)),
        (BOUNDS | {"truncated_importance_sampling_type": "tis"}, "correction", Tis(0.2, 5.0)),
        (
            {
                "use_importance_sampling_correction": True,
                "truncated_importance_sampling_type": "tis",
                "truncated_importance_sampling_ratio": 2.0,
            },
            "correction",
            Tis(0.0, 2.0),
        ),
        (BOUNDS | {"truncated_importance_sampling_type": "icepop"}, "correction", IcePop(0.2, 5.0)),
        (BOUNDS | {"truncated_importance_sampling_type": "seq-mask-tis"}, "correction", SequenceMask(0.2, 5.0)),
        (
            BOUNDS | SEQUENCE | {"truncated_importance_sampling_type": "icepop"},
            "correction",
            IcePop(0.2, 5.0, Level.SEQUENCE),
        ),
        ({"token_level_loss": False}, "reduction", SEQUENCES),
        ({"token_level_loss": False, "sequence_loss_divisor": 7}, "reduction", constant(7)),
    ],
)
def test_a_flag_becomes_a_part(changes: dict[str, Any], part: str, expected: object) -> None:
    assert vars(parse_objective(LossConfig(**changes), single_update=True))[part] == expected


@pytest.mark.parametrize(
    ("changes", "where", "uses_prev", "uses_reference"),
    [
        ({"reference_policy_kl_penalty": 0.0}, KlPlace.OFF, False, False),
        ({}, KlPlace.LOSS, False, True),
        ({"use_kl_in_reward": True}, KlPlace.REWARD, True, True),
    ],
)
def test_the_place_of_the_penalty(
    changes: dict[str, Any], where: KlPlace, uses_prev: bool, uses_reference: bool
) -> None:
    loss = parse_objective(LossConfig(**changes), single_update=True)
    assert (loss.kl.where, loss.uses_prev, loss.uses_reference) == (where, uses_prev, uses_reference)


def test_a_forced_ratio_needs_a_single_update() -> None:
    with pytest.raises(ConfigError, match="train_global_batch_size"):
        parse_objective(LossConfig(force_on_policy_ratio=True), single_update=False)


def test_a_missing_upper_bound_bounds_nothing() -> None:
    config = LossConfig(use_importance_sampling_correction=True, truncated_importance_sampling_type="tis")
    assert parse_objective(config, single_update=True).correction == Tis(0.0, math.inf)
