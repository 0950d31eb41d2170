"""Loss flags that cannot go together, or have no effect, are refused; every flag that is accepted does something."""

import itertools
import math
from typing import Any, get_args

import pytest
import torch

from rl.algorithms.config import LossConfig
from rl.algorithms.objective import parse_objective
from rl.controller.checks import ALL_CHECKS, check_config, find_conflicts
from rl.controller.checks_loss import LOSS_CHECKS
from rl.controller.config import MasterConfig
from rl.core.config_file import build, load
from rl.core.config_paths import find_config
from rl.core.errors import ConfigError
from tests.support.losses import gradient_of
from tests.support.rollouts import loss_batch, scatter_sampled

DEFAULT = find_config("grpo_smollm2_cpu")
FREE = {"force_on_policy_ratio": False}
SEVERAL = ["policy.train_global_batch_size=32", "loss_fn.force_on_policy_ratio=false"]
GSPO = {"sequence_level_importance_ratios": True, "token_level_loss": False}
CORRECTED = {"use_importance_sampling_correction": True}
TRUNCATED = CORRECTED | {
    "truncated_importance_sampling_ratio": 2.0,
    "truncated_importance_sampling_ratio_min": 0.5,
}
PENALTY = {"reference_policy_kl_penalty": 0.1}
WHITENED = [
    "grpo.adv_estimator={_override_: true, name: reinforce_plus_plus}",
    "grpo.use_leave_one_out_baseline=true",
]


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _config(flags: dict[str, Any], overrides: list[str]) -> MasterConfig:
    written = [f"loss_fn.{name}={_text(value)}" for name, value in flags.items()]
    return build(load(DEFAULT, [*overrides, *written], MasterConfig), MasterConfig, allow_unknown=False)


# The check that refuses, the flags that make it so, further overrides, and a piece of the message with its fix.
CONFLICTS: list[tuple[str, dict[str, Any], list[str], str]] = [
    (
        "on_policy_ratio_needs_one_update",
        {"force_on_policy_ratio": True},
        ["policy.train_global_batch_size=32"],
        "force_on_policy_ratio=true needs one optimizer step per RL step, but policy.train_global_batch_size=32 of 64",
    ),
    ("one_ratio_is_chosen", {"disable_ppo_ratio": True}, [], "remove loss_fn.disable_ppo_ratio"),
    ("one_ratio_is_chosen", GSPO, [], "force_on_policy_ratio=true replaces the ratio"),
    ("one_ratio_is_chosen", GSPO | FREE | {"disable_ppo_ratio": True}, [], "disable_ppo_ratio=true replaces the ratio"),
    ("clip_bounds_need_a_ratio", {"ratio_clip_max": 0.28}, [], "ratio_clip_max=0.28 has no effect: with loss_fn.force"),
    ("clip_bounds_need_a_ratio", {"ratio_clip_c": 3.0}, [], "ratio_clip_c=3.0 has no effect"),
    ("clip_bounds_need_a_ratio", FREE | {"disable_ppo_ratio": True, "ratio_clip_min": 0.1}, [], "there is no ratio"),
    (
        "clip_bounds_need_a_ratio",
        FREE | {"disable_ppo_ratio": True, "ratio_clip_c": 3.0},
        [],
        "remove loss_fn.ratio_cl",
    ),
    ("clip_bounds_need_a_ratio", FREE | {"ratio_clip_max": 0.28}, [], "takes all 64 sequences of an RL step"),
    ("cispo_stands_alone", {"use_cispo": True}, [], "set loss_fn.force_on_policy_ratio=false or loss_fn.use_cispo"),
    (
        "cispo_stands_alone",
        {"use_cispo": True, "disable_ppo_ratio": True} | FREE,
        [],
        "disable_ppo_ratio=true does not",
    ),
    ("cispo_stands_alone", {"use_cispo": True, "ratio_clip_c": 3.0}, SEVERAL, "set loss_fn.ratio_clip_c=null"),
    (
        "cispo_stands_alone",
        {"use_cispo": True, "token_level_loss": False},
        SEVERAL,
        "set loss_fn.token_level_loss=true",
    ),
    (
        "cispo_stands_alone",
        {"use_cispo": True} | GSPO,
        SEVERAL,
        "sequence_level_importance_ratios=true does not go with",
    ),
    (
        "sequence_settings_need_a_sequence_loss",
        {"sequence_level_importance_ratios": True},
        SEVERAL,
        "set loss_fn.token_level_loss=false",
    ),
    (
        "sequence_settings_need_a_sequence_loss",
        {"sequence_loss_divisor": 4},
        [],
        "sequence_loss_divisor=4 does not go with loss_fn.token_level_loss=true",
    ),
    ("sequence_ratios_keep_the_mean", GSPO | {"sequence_loss_divisor": 4}, SEVERAL, "set loss_fn.sequence_loss_div"),
    ("kl_settings_need_a_penalty", {"reference_policy_kl_type": "k1"}, [], "kl_type=k1 has no effect"),
    ("kl_settings_need_a_penalty", {"kl_input_clamp_value": 5.0}, [], "kl_input_clamp_value=5.0 has no effect"),
    ("kl_settings_need_a_penalty", {"kl_output_clamp_value": None}, [], "kl_output_clamp_value=null has no effect"),
    ("kl_settings_need_a_penalty", {"use_on_policy_kl_approximation": True}, [], "leaves the KL term out"),
    ("kl_settings_need_a_penalty", {"use_kl_in_reward": True}, WHITENED, "leaves the KL term out"),
    (
        "kl_in_reward_has_an_estimator",
        PENALTY | {"use_kl_in_reward": True},
        [],
        "use_kl_in_reward=true does not go with grpo.adv_estimator.name=grpo",
    ),
    (
        "kl_weight_needs_the_kl_in_the_loss",
        PENALTY | {"use_kl_in_reward": True, "use_on_policy_kl_approximation": True},
        WHITENED,
        "set loss_fn.use_on_policy_kl_approximation=false",
    ),
    (
        "lookahead_needs_correction",
        {},
        ["async_rl.sampler.max_lookahead_versions=1"],
        "needs loss_fn.use_importance_sampling_correction=true",
    ),
    (
        "truncation_needs_a_weight",
        {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 2},
        [],
        "use_importance_sampling_correction=false leaves out",
    ),
    (
        "truncation_has_its_bounds",
        CORRECTED | {"truncated_importance_sampling_type": "tis"},
        [],
        "needs loss_fn.truncated_importance_sampling_ratio, got null",
    ),
    *[
        (
            "truncation_has_its_bounds",
            CORRECTED | {"truncated_importance_sampling_type": kind, "truncated_importance_sampling_ratio": 2},
            [],
            f"={kind} needs loss_fn.truncated_importance_sampling_ratio_min, got null",
        )
        for kind in ("icepop", "seq-mask-tis")
    ],
    ("truncation_bounds_have_a_type", {"truncated_importance_sampling_ratio": 2}, [], "ratio=2.0 has no effect"),
    ("truncation_bounds_have_a_type", {"truncated_importance_sampling_ratio_min": 0.5}, [], "min=0.5 has no effect"),
    (
        "truncation_bounds_are_ordered",
        TRUNCATED | {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio_min": 3},
        [],
        "ratio_min=3.0 is above",
    ),
    (
        "sequence_mask_weighs_tokens",
        GSPO | TRUNCATED | {"truncated_importance_sampling_type": "seq-mask-tis"},
        SEVERAL,
        "seq-mask-tis does not go with loss_fn.sequence_level_importance_ratios=true",
    ),
]


@pytest.mark.parametrize(("check", "flags", "overrides", "message"), CONFLICTS)
def test_a_conflict_is_refused_by_its_check_alone(
    check: str, flags: dict[str, Any], overrides: list[str], message: str
) -> None:
    config = _config(flags, overrides)
    assert {each.__name__ for each in ALL_CHECKS if list(each(config))} == {check}
    with pytest.raises(ConfigError) as refused:
        check_config(config)
    assert message in str(refused.value)


def test_every_check_has_a_conflict_above() -> None:
    assert {each.__name__ for each in LOSS_CHECKS} == {name for name, _, _, _ in CONFLICTS}


@pytest.mark.parametrize(
    ("flags", "overrides"),
    [
        ({}, []),
        ({"ratio_clip_max": 0.28, "ratio_clip_c": 10.0}, SEVERAL),
        ({"use_cispo": True, "ratio_clip_min": 1.0, "ratio_clip_max": 5.0}, SEVERAL),
        (GSPO | {"ratio_clip_min": 3e-4, "ratio_clip_max": 4e-4}, SEVERAL),
        (GSPO | TRUNCATED | {"truncated_importance_sampling_type": "icepop"}, SEVERAL),
        (GSPO | CORRECTED, []),
        (FREE | {"disable_ppo_ratio": True} | TRUNCATED | {"truncated_importance_sampling_type": "seq-mask-tis"}, []),
        ({"token_level_loss": False, "sequence_loss_divisor": 4}, []),
        (PENALTY | {"use_kl_in_reward": True, "reference_policy_kl_type": "k2"}, WHITENED),
        (PENALTY | {"use_on_policy_kl_approximation": True}, []),
    ],
)
def test_what_goes_together_is_accepted(flags: dict[str, Any], overrides: list[str]) -> None:
    check_config(_config(flags, overrides))


@pytest.mark.parametrize(
    "flags",
    [{"ratio_clip_c": 1.0}, {"reference_policy_kl_type": "k4"}, {"sequence_loss_divisor": 0}, {"entropy_coef": -0.1}],
)
def test_a_value_out_of_range_names_its_key(flags: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(flags))):
        _config(flags, [])


# Values to flip each flag to; a base that has one of them already skips it.
FLIPS: dict[str, list[Any]] = {
    "disable_ppo_ratio": [True, False],
    "force_on_policy_ratio": [True, False],
    "sequence_level_importance_ratios": [True, False],
    "use_cispo": [True, False],
    "ratio_clip_min": [0.03],
    "ratio_clip_max": [0.03],
    "ratio_clip_c": [1.2, None],
    "token_level_loss": [True, False],
    "sequence_loss_divisor": [7, None],
    "entropy_coef": [0.2],
    "positive_example_nll_weight": [0.2],
    "reference_policy_kl_penalty": [0.3, 0.0],
    "reference_policy_kl_type": ["k1", "k2", "k3"],
    "kl_input_clamp_value": [0.15, None],
    "kl_output_clamp_value": [0.01, None],
    "use_on_policy_kl_approximation": [True, False],
    "use_kl_in_reward": [True, False],
    "use_importance_sampling_correction": [True, False],
    "truncated_importance_sampling_type": ["tis", "icepop", "seq-mask-tis", None],
    "truncated_importance_sampling_ratio": [1.05, None],
    "truncated_importance_sampling_ratio_min": [0.95, None],
}
KL = PENALTY | {"kl_input_clamp_value": 0.5, "kl_output_clamp_value": 0.12}
BASES: list[tuple[dict[str, Any], list[str]]] = [
    ({}, []),
    (FREE, SEVERAL),
    (KL | {"ratio_clip_c": 1.1}, SEVERAL),
    (KL, []),
    (KL | {"use_kl_in_reward": True}, WHITENED + SEVERAL),
    (FREE | {"disable_ppo_ratio": True}, []),
    (GSPO, SEVERAL),
    (GSPO | TRUNCATED | {"truncated_importance_sampling_type": "icepop"}, SEVERAL),
    ({"use_cispo": True}, SEVERAL),
    ({"token_level_loss": False, "sequence_loss_divisor": 4}, SEVERAL),
    *[(TRUNCATED | {"truncated_importance_sampling_type": kind}, SEVERAL) for kind in ("tis", "icepop")],
    (
        CORRECTED
        | {
            "truncated_importance_sampling_type": "seq-mask-tis",
            "truncated_importance_sampling_ratio": 1.25,
            "truncated_importance_sampling_ratio_min": 0.8,
        },
        [],
    ),
]


def _effect(config: MasterConfig) -> list[float]:
    """Everything that training takes from the `loss_fn` section on a fixed batch: value, gradients, needed columns."""
    lengths = [4, 5, 4, 5, 3, 3, 4, 6]
    generator = torch.Generator().manual_seed(5)
    draws = torch.rand(5, sum(lengths), generator=generator)
    logprobs = -0.5 - draws[0]
    columns = {
        "advantages": (2 * draws[1] - 1).tolist(),
        "prev_logprobs": (logprobs + draws[2] - 0.5).tolist(),
        "reference_logprobs": (logprobs + 2 * draws[3] - 1).tolist(),
    }
    single_update = config.policy.train_global_batch_size is None
    if single_update:
        columns["prev_logprobs"] = logprobs.tolist()
    batch = loss_batch((logprobs + draws[4] - 0.4).tolist(), lengths=lengths, **columns)
    batch = batch.with_columns(rewards=torch.tensor([1.0, 0] * 4))
    batch = batch.with_counts(batch.count())
    leaf = logprobs.double().requires_grad_()
    entropy = torch.full((batch.num_tokens,), 0.5, dtype=torch.float64, requires_grad=True)
    loss = parse_objective(config.loss_fn, single_update)
    sums = loss(scatter_sampled(batch.loss_mask, leaf), entropy, batch)
    # The penalty in the reward reaches training through the advantages: its settings count as they are.
    section = config.loss_fn
    in_reward = [section.reference_policy_kl_penalty, int(section.reference_policy_kl_type[1:])] + [
        -1.0 if clamp is None else clamp for clamp in (section.kl_input_clamp_value, section.kl_output_clamp_value)
    ]
    reward = in_reward if section.use_kl_in_reward else [0.0] * 4
    needs = [float(loss.uses_prev), float(loss.uses_reference), float(loss.uses_entropy)]
    return [sums.loss.item(), *gradient_of(sums.loss, leaf).tolist(), *needs, *reward]


def _flipped(config: MasterConfig, flags: dict[str, Any]) -> MasterConfig:
    return config.model_copy(update={"loss_fn": LossConfig(**(dict(config.loss_fn) | flags))})


def test_every_flag_is_flipped_below() -> None:
    assert set(FLIPS) == set(LossConfig.model_fields)
    for name, field in LossConfig.model_fields.items():
        literals = {each for part in (field.annotation, *get_args(field.annotation)) for each in get_args(part)}
        assert {each for each in literals if isinstance(each, str)} <= set(FLIPS[name])


@pytest.mark.parametrize(("base", "overrides"), BASES)
def test_flipping_a_flag_changes_the_training_or_is_refused(base: dict[str, Any], overrides: list[str]) -> None:
    before = _config(base, overrides)
    check_config(before)
    inert = []
    for name, value in [(name, value) for name, values in FLIPS.items() for value in values]:
        after = _flipped(before, {name: value})
        if after.loss_fn == before.loss_fn or list(find_conflicts(after)):
            continue
        if name == "force_on_policy_ratio":
            # A promise of one optimizer step, under which every ratio is 1 anyway: it refuses what would break it.
            continue
        if _effect(after) == pytest.approx(_effect(before), rel=1e-6, abs=1e-9):
            inert.append(f"{name}={value}")
    assert inert == []


@pytest.mark.parametrize(("base", "overrides"), BASES)
def test_every_accepted_value_makes_a_finite_optimizer_step(base: dict[str, Any], overrides: list[str]) -> None:
    before = _config(base, overrides)
    for flags in [{}] + [{name: value} for name, values in FLIPS.items() for value in values]:
        config = _flipped(before, flags)
        if list(find_conflicts(config)):
            continue
        logits = torch.zeros(4, 3, requires_grad=True)
        optimizer = torch.optim.SGD([logits], lr=0.1)
        taken = logits.log_softmax(-1)[torch.arange(4), torch.tensor([0, 1, 2, 0])]
        batch = loss_batch(
            [-1.2, -1.0, -0.9, -1.4],
            advantages=[1.0, 0.5, -1.0, -0.5],
            prev_logprobs=[-1.0, -1.2, -1.1, -1.0],
            reference_logprobs=[-1.3, -1.0, -1.0, -1.2],
            lengths=[2, 2],
        ).with_columns(rewards=torch.tensor([1.0, 0.0]))
        loss = parse_objective(config.loss_fn, config.policy.train_global_batch_size is None)
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        full = (scatter_sampled(batch.loss_mask, column) for column in (taken, entropy))
        loss(*full, batch.with_counts(batch.count())).loss.backward()
        optimizer.step()
        assert torch.isfinite(logits).all()
        # Only a sequence mask may leave nothing to learn from.
        assert logits.abs().sum() > 0 or config.loss_fn.truncated_importance_sampling_type is not None


def test_pairs_of_boolean_flags_are_refused_or_make_a_loss() -> None:
    before = _config(FREE | PENALTY, SEVERAL)
    booleans = [name for name, values in FLIPS.items() if set(values) == {True, False}]
    refused = set()
    for first, second in itertools.combinations(booleans, 2):
        for values in itertools.product([True, False], repeat=2):
            config = _flipped(before, {first: values[0], second: values[1]})
            if list(find_conflicts(config)):
                refused.add((first, second, *values))
            else:
                assert all(math.isfinite(number) for number in _effect(config))
    assert ("disable_ppo_ratio", "use_cispo", True, True) in refused
    assert ("use_cispo", "use_importance_sampling_correction", True, True) not in refused
