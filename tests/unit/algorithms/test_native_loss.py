"""The native form of every policy-gradient loss says what the torch form says: loss, gradients and each metric."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rl.algorithms.algorithm import LossSums, OffersNativeLoss
from rl.algorithms.corrections import Level, Off
from rl.algorithms.nll import nll_loss
from rl.algorithms.policy_gradient import PolicyGradientLoss
from rl.algorithms.ppo import TokenRatio
from rl.core.batch import TrainBatch
from rl.core.metrics import Metric, Per
from rl.ops.policy_loss import RatioKind, policy_loss
from tests.support.losses import OPTIONS, objective
from tests.support.rollouts import loss_batch, scatter_sampled

# In sampled tokens: the third sequence has no weight, and the last one has no token.
LENGTHS = [3, 1, 4, 2, 5, 0]
WEIGHTS = [1.0, 1.0, 0.0, 0.5, 1.0, 2.0]
COUNT = sum(LENGTHS)
NATIVE = [options for options in OPTIONS if options.get("truncated_importance_sampling_type") != "seq-mask-tis"]
COMBINED: list[dict[str, Any]] = [
    {"use_cispo": True, "reference_policy_kl_penalty": 0.3, "entropy_coef": 0.05, "token_level_loss": False},
    {"ratio_clip_c": 1.5, "positive_example_nll_weight": 0.7, "token_level_loss": False, "sequence_loss_divisor": 3},
    {
        "sequence_level_importance_ratios": True,
        "token_level_loss": False,
        "ratio_clip_c": 1.1,
        "reference_policy_kl_penalty": 0.2,
        "positive_example_nll_weight": 0.5,
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "tis",
        "truncated_importance_sampling_ratio": 1.2,
    },
    {
        "reference_policy_kl_penalty": 1.0,
        "use_on_policy_kl_approximation": True,
        "kl_input_clamp_value": 0.2,
        "kl_output_clamp_value": 0.01,
    },
]


def _columns(seed: int) -> TrainBatch:
    generator = torch.Generator().manual_seed(seed)
    old, generation, reference, advantages = torch.randn(4, COUNT, generator=generator)
    old = old.abs().neg()
    batch = loss_batch(
        (old + 0.3 * generation).tolist(),
        advantages.tolist(),
        old.tolist(),
        (old + 0.3 * reference).tolist(),
        LENGTHS,
        WEIGHTS,
    )
    batch = batch.with_columns(rewards=torch.tensor([1.0, 0.0, 1.0, 0.5, -1.0, 1.0])).at_version(0)
    return batch.with_counts(replace(batch.count(), tokens=40.0, sequences=9.0, positive_tokens=17.0))


def _policy(batch: TrainBatch, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + seed)
    moves, entropy = torch.randn(2, COUNT, generator=generator)
    assert batch.prev_logprobs is not None
    logprobs = batch.prev_logprobs[batch.loss_mask] + 0.5 * moves
    return logprobs.requires_grad_(), entropy.abs().requires_grad_()


def _in_torch(loss: PolicyGradientLoss, batch: TrainBatch, logprobs: Tensor, entropy: Tensor) -> LossSums:
    return loss(scatter_sampled(batch.loss_mask, logprobs), scatter_sampled(batch.loss_mask, entropy), batch)


def _in_native_code(
    loss: PolicyGradientLoss, batch: TrainBatch, logprobs: Tensor, entropy: Tensor
) -> tuple[LossSums, Tensor]:
    native = loss.native()
    assert not isinstance(native, str), native
    counted = batch.token_weights > 0
    by_token = [scatter_sampled(batch.loss_mask, values) for values in (logprobs, entropy)]
    result = policy_loss(by_token[0][counted], by_token[1][counted], native.tokens(batch), native.params)
    return native.sums(result.metrics, by_token[0], batch), result.loss


def _gradients(value: Tensor, *leaves: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(value, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if got is None else got for got, leaf in zip(found, leaves, strict=True)]


def _assert_alike(loss: PolicyGradientLoss, batch: TrainBatch, logprobs: Tensor, entropy: Tensor) -> None:
    expected = _in_torch(loss, batch, logprobs, entropy)
    got, value = _in_native_code(loss, batch, logprobs, entropy)
    assert not got.loss.requires_grad
    assert got.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5, abs=1e-5)
    assert (got.per, value.item()) == (expected.per, got.loss.item())
    assert {name: metric.per for name, metric in got.metrics.items()} == {
        name: metric.per for name, metric in expected.metrics.items()
    }
    for name, metric in expected.metrics.items():
        assert got.metrics[name].value == pytest.approx(metric.value, rel=1e-5, abs=1e-5), name
    wanted, gradients = (_gradients(each, logprobs, entropy) for each in (expected.loss, value))
    for left, right in zip(wanted, gradients, strict=True):
        assert (left - right).abs().max() <= 1e-5 * max(1.0, float(left.abs().max()))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("options", NATIVE + COMBINED)
def test_loss_gradients_and_metrics_are_those_of_the_torch_form(options: dict[str, Any], seed: int) -> None:
    batch = _columns(seed)
    _assert_alike(objective(**options), batch, *_policy(batch, seed))


@pytest.mark.parametrize("options", NATIVE)
def test_a_single_update_needs_no_old_logprobs(options: dict[str, Any]) -> None:
    batch = _columns(0).with_columns(prev_logprobs=None)
    _assert_alike(objective(single_update=True, **options), batch, *_policy(_columns(0), 0))


@pytest.mark.parametrize("options", [{}, {"use_cispo": True}, {"sequence_level_importance_ratios": True}])
def test_a_log_ratio_that_ran_away_is_clamped_counted_and_has_no_gradient(options: dict[str, Any]) -> None:
    batch = _columns(0)
    assert batch.prev_logprobs is not None
    options = {"token_level_loss": not options.get("sequence_level_importance_ratios", False)} | options
    logprobs = batch.prev_logprobs[batch.loss_mask].clone()
    logprobs[0] -= 25.0
    logprobs[1] += 30.0
    logprobs[3] -= 20.0
    leaf = logprobs.requires_grad_()
    sums = _in_torch(objective(**options), batch, leaf, torch.zeros(COUNT))
    assert sums.metrics["num_clamped_log_ratios"] == Metric(2.0, Per.NONE)
    assert torch.isfinite(_gradients(sums.loss, leaf)[0]).all()
    _assert_alike(objective(**options), batch, leaf, torch.zeros(COUNT, requires_grad=True))


def test_what_stands_where_no_token_counts_is_not_looked_at() -> None:
    batch = _columns(1)
    logprobs, entropy = _policy(batch, 1)
    expected, _ = _in_native_code(objective(), batch, logprobs, entropy)
    dropped = (batch.sample_weights == 0)[batch.sequence_ids]
    assert batch.advantages is not None
    spoiled = batch.with_columns(advantages=torch.where(dropped, torch.nan, batch.advantages))
    got, _ = _in_native_code(objective(), spoiled, logprobs, entropy)
    assert got.metrics == expected.metrics


def test_losses_that_the_native_form_cannot_express_say_why() -> None:
    @dataclass(frozen=True)
    class HalfRatio(TokenRatio):
        def factor(self, tokens: Any) -> Tensor:
            return super().factor(tokens) / 2

    class Louder(PolicyGradientLoss):
        pass

    mask = {"use_importance_sampling_correction": True, "truncated_importance_sampling_type": "seq-mask-tis"}
    plain = objective()
    assert objective(**mask).native() == "SequenceMask has no native form"
    assert replace(plain, ratio=HalfRatio()).native() == "HalfRatio has no native form"
    assert replace(plain, correction=Off(Level.SEQUENCE)).native() == (
        "only one of ratios and generator weights is per sequence"
    )
    parts = {name: getattr(plain, name) for name in PolicyGradientLoss.__dataclass_fields__}
    assert Louder(**parts).native() == "Louder changes the policy-gradient loss"
    assert isinstance(plain, OffersNativeLoss) and not isinstance(nll_loss, OffersNativeLoss)


def test_only_ratios_of_sequences_need_whole_sequences() -> None:
    kinds = {}
    for options in NATIVE:
        native = objective(**options).native()
        assert not isinstance(native, str)
        kinds[native.params.ratio] = options
    assert set(kinds) == set(RatioKind)
    assert kinds[RatioKind.SEQUENCE]["sequence_level_importance_ratios"]


@pytest.mark.parametrize(
    ("options", "missing", "message"),
    [
        ({}, "advantages", "needs the column advantages"),
        ({}, "prev_logprobs", "need the column prev_logprobs"),
        ({"reference_policy_kl_penalty": 1.0}, "reference_logprobs", "needs the column reference_logprobs"),
        ({"positive_example_nll_weight": 1.0}, "counts", "carries no counts"),
    ],
)
def test_a_missing_column_is_named_as_by_the_torch_form(options: dict[str, Any], missing: str, message: str) -> None:
    batch = replace(_columns(0), **{missing: None})
    native = objective(**options).native()
    assert not isinstance(native, str)
    with pytest.raises(ValueError, match=message):
        native.tokens(batch)
    with pytest.raises(ValueError, match=message):
        _in_torch(objective(**options), batch, *_policy(_columns(0), 0))
