"""The fused ways of the trainer give the loss, every gradient and every metric of plain torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl.algorithms.algorithm import LossFunction, LossSums
from rl.core.batch import TrainBatch
from rl.core.metrics import Metric, Per
from rl.trainer.forward_backward import ChunkReport, accumulate_gradients, compute_logprobs
from rl.trainer.layout import lay_out
from rl.trainer.loss_path import ForwardSettings
from rl.trainer.model import CausalModel
from tests.support.losses import OPTIONS, objective
from tests.support.micro_batches import cut
from tests.support.policies import make_batch
from tests.support.rollouts import make_completion, make_group, make_rollout

TEMPERATURE = 0.8
TORCH, NATIVE = ForwardSettings(TEMPERATURE, "torch"), ForwardSettings(TEMPERATURE, "native")
OWN_LOGITS = ForwardSettings(TEMPERATURE, "native", head_fault="it has a bias")
MODES: dict[str, dict[str, Any]] = {
    "one by one": {"train_micro_batch_size": 1},
    "three at a time": {"train_micro_batch_size": 3},
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 40}},
    "shared": {"share_prefixes": "on"},
    "shared and packed": {"share_prefixes": "on", "sequence_packing": {"enabled": True, "train_mb_tokens": 40}},
}
Gradients = dict[str, Tensor]


def load(path: Path, precision: torch.dtype = torch.float32) -> CausalModel:
    return CausalModel(path, precision=precision, device="cpu", trust_remote_code=False, seed=0)


def _columns(batch: TrainBatch) -> TrainBatch:
    """Old log-probabilities that are not the policy's, unequal weights, positive and negative rewards."""
    old = batch.generation_logprobs * 0.9
    weights = torch.ones(batch.num_sequences)
    weights[1], weights[2] = 0.0, 0.5
    rewards = torch.arange(batch.num_sequences).remainder(3).float() - 1
    batch = batch.with_columns(sample_weights=weights, rewards=rewards, prev_logprobs=old, reference_logprobs=old * 1.1)
    return batch.at_version(0).with_counts(batch.count())


def _siblings() -> TrainBatch:
    """Answers of one group that begin alike: several tokens look at one place of the model."""
    answers = [[70, 71, 72], [70, 71, 73], [70, 74], [75]]
    logprobs = [[-1.0, -2.0, -1.5], [-1.2, -2.5, -3.0], [-0.9, -4.0], [-2.0]]
    rollouts = [
        make_rollout([((65, 66), make_completion(answer, values))], reward=float(number))
        for number, (answer, values) in enumerate(zip(answers, logprobs, strict=True))
    ]
    batch = TrainBatch.from_groups([make_group(0, rollouts)])
    return batch.with_columns(advantages=torch.linspace(-1, 1, 4)[batch.sequence_ids] * batch.loss_mask)


def _run(
    model: CausalModel, batch: TrainBatch, loss: LossFunction, settings: ForwardSettings, **mode: Any
) -> tuple[ChunkReport, Gradients]:
    model.module.zero_grad()
    report = accumulate_gradients(model, cut(batch, **mode), loss, settings)
    named = {name: parameter.grad for name, parameter in model.module.named_parameters()}
    return report, {name: grad.clone() for name, grad in named.items() if grad is not None}


def _assert_gradients_alike(expected: Gradients, got: Gradients, tolerance: float) -> None:
    assert set(got) == set(expected)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert largest > 0
    for name, gradient in expected.items():
        assert (got[name] - gradient).abs().max() <= tolerance * largest, name


def _assert_reports_alike(expected: ChunkReport, got: ChunkReport, tolerance: float) -> None:
    assert (got.computed, got.num_positions, got.per) == (expected.computed, expected.num_positions, expected.per)
    assert got.loss == pytest.approx(expected.loss, rel=tolerance, abs=tolerance)
    kinds = [{name: metric.per for name, metric in report.metrics.items()} for report in (expected, got)]
    assert kinds[0] == kinds[1]
    for name, metric in expected.metrics.items():
        assert got.metrics[name].value == pytest.approx(metric.value, rel=tolerance, abs=tolerance), name


def _assert_alike(model: CausalModel, batch: TrainBatch, loss: LossFunction, **mode: Any) -> None:
    expected, gradients = _run(model, batch, loss, TORCH, **mode)
    for settings in (NATIVE, OWN_LOGITS):
        got, native_gradients = _run(model, batch, loss, settings, **mode)
        _assert_reports_alike(expected, got, 1e-5)
        _assert_gradients_alike(gradients, native_gradients, 1e-5)


@pytest.mark.parametrize("options", OPTIONS)
def test_every_objective_gives_what_plain_torch_gives(tiny_model: Path, options: dict[str, Any]) -> None:
    _assert_alike(load(tiny_model), _columns(make_batch(3)), objective(**options), share_prefixes="on")


@pytest.mark.parametrize("make", [lambda: make_batch(3), _siblings], ids=["random", "siblings"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tied", [True, False])
def test_every_layout_gives_what_plain_torch_gives(
    tiny_model: Path, untied_model: Path, tied: bool, mode: str, make: Any
) -> None:
    loss = objective(reference_policy_kl_penalty=0.1, entropy_coef=0.01, positive_example_nll_weight=0.1)
    _assert_alike(load(tiny_model if tied else untied_model), _columns(make()), loss, **MODES[mode])


def test_siblings_do_share_places_above() -> None:
    batch = _siblings()
    [work] = cut(batch, share_prefixes="on")
    layout = lay_out(work.batch, work.rows, work.batch.loss_mask, work.width)
    assert layout.targets.numel() == 6 < layout.pairs.numel() == 9


@pytest.mark.parametrize("frozen", ["model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.up_proj.weight"])
def test_frozen_weights_get_no_gradient_and_the_others_theirs(untied_model: Path, frozen: str) -> None:
    model = load(untied_model)
    dict(model.module.named_parameters())[frozen].requires_grad_(False)
    _assert_alike(model, _columns(make_batch(3)), objective())
    assert dict(model.module.named_parameters())[frozen].grad is None


def test_a_model_of_which_the_head_alone_is_trained(untied_model: Path) -> None:
    model = load(untied_model).freeze()
    model.head_weight.requires_grad_(True)
    _assert_alike(model, _columns(make_batch(3)), objective())


@pytest.mark.parametrize("settings", [NATIVE, OWN_LOGITS], ids=["hidden states", "logits"])
@pytest.mark.parametrize("options", [{}, {"sequence_level_importance_ratios": True, "token_level_loss": False}])
def test_gradients_add_to_what_is_there(untied_model: Path, options: dict[str, Any], settings: ForwardSettings) -> None:
    model, batch, loss = load(untied_model), _columns(make_batch(3)), objective(**options)
    _, once = _run(model, batch, loss, settings)
    accumulate_gradients(model, cut(batch), loss, settings)
    twice = {name: parameter.grad for name, parameter in model.module.named_parameters()}
    for name, gradient in once.items():
        again = twice[name]
        assert again is not None
        assert torch.allclose(again, 2 * gradient, rtol=1e-6, atol=1e-9), name


@pytest.mark.parametrize("options", [{}, {"sequence_level_importance_ratios": True, "token_level_loss": False}])
def test_a_repetition_is_equal_bit_by_bit(tiny_model: Path, options: dict[str, Any]) -> None:
    model, batch, loss = load(tiny_model), _columns(make_batch(3)), objective(**options)
    first, gradients = _run(model, batch, loss, NATIVE, share_prefixes="on")
    second, repeated = _run(model, batch, loss, NATIVE, share_prefixes="on")
    assert first == second
    assert all(torch.equal(gradients[name], repeated[name]) for name in gradients)


# Activations in bfloat16 differ by 2^-9 of their size whatever the way. Plain torch rounds logits to bfloat16 as well,
# the fused ways do not: from float32 arithmetic they must not be farther than plain torch, with some room.
@pytest.mark.parametrize("options", [{}, {"sequence_level_importance_ratios": True, "token_level_loss": False}])
def test_in_bfloat16_the_fused_ways_are_as_near_to_float32_as_plain_torch(
    tiny_model: Path, options: dict[str, Any]
) -> None:
    batch, loss = _columns(make_batch(3)), objective(**options)
    exact, wanted = _run(load(tiny_model), batch, loss, TORCH)
    model = load(tiny_model, torch.bfloat16)
    plain, plain_gradients = _run(model, batch, loss, TORCH)
    got, gradients = _run(model, batch, loss, NATIVE)
    _assert_reports_alike(plain, got, 5e-2)
    _assert_gradients_alike(plain_gradients, gradients, 3e-2)
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
    assert _distance(wanted, gradients) <= 1.1 * _distance(wanted, plain_gradients)
    assert abs(got.loss - exact.loss) <= max(2 * abs(plain.loss - exact.loss), 2e-2)


def _distance(wanted: Gradients, got: Gradients) -> float:
    """Return the norm of the difference over all parameters."""
    return float(torch.stack([(got[name] - gradient).norm() for name, gradient in wanted.items()]).norm())


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_logprobs_without_a_graph_are_those_of_plain_torch(tiny_model: Path, precision: torch.dtype) -> None:
    batch, model = make_batch(3), load(tiny_model, precision)
    works = cut(batch, batch.loss_mask, share_prefixes="on")
    expected, got = (compute_logprobs(model, works, settings) for settings in (TORCH, NATIVE))
    tolerance = 1e-5 if precision == torch.float32 else 2e-2
    assert all(torch.allclose(left, right, atol=tolerance) for left, right in zip(expected, got, strict=True))
    assert not any(part.requires_grad for part in got)


class _NoLogits(nn.Module):
    """An output layer that refuses to make logits."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight = head.weight
        self.most_rows = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.most_rows = max(self.most_rows, hidden.shape[0])
        return hidden @ self.weight.T


@pytest.mark.parametrize("options", [{}, {"sequence_level_importance_ratios": True, "token_level_loss": False}])
def test_the_fused_ways_make_no_logits_of_the_model(untied_model: Path, options: dict[str, Any]) -> None:
    model = load(untied_model)
    module: Any = model.module
    watch = _NoLogits(module.lm_head)
    module.lm_head = model._head = watch
    batch = _columns(make_batch(3))
    accumulate_gradients(model, cut(batch), objective(**options), NATIVE)
    compute_logprobs(model, cut(batch, batch.loss_mask), NATIVE)
    assert watch.most_rows == 0


@dataclass(frozen=True)
class _UserLoss:
    """A loss that somebody else has written: half the log-likelihood, minus the entropy."""

    uses_entropy: bool = True

    def contributes(self, batch: TrainBatch) -> Tensor:
        return torch.ones(batch.num_sequences, dtype=torch.bool)

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: TrainBatch) -> LossSums:
        value = -((logprobs / 2 + entropy) * batch.token_weights).sum()
        return LossSums(value, Per.TOKENS, {"mine": Metric(value.item(), Per.TOKENS)})


def test_a_users_loss_works_on_every_way(tiny_model: Path) -> None:
    _assert_alike(load(tiny_model), _columns(make_batch(3)), _UserLoss(), share_prefixes="on")


@pytest.mark.parametrize("column", ["advantages", "prev_logprobs", "reference_logprobs"])
@pytest.mark.parametrize("options", [{}, {"sequence_level_importance_ratios": True, "token_level_loss": False}])
def test_a_loss_that_is_no_number_makes_gradients_that_are_none(
    tiny_model: Path, options: dict[str, Any], column: str
) -> None:
    batch, loss = _columns(make_batch(3)), objective(reference_policy_kl_penalty=0.1, **options)
    spoiled = batch.with_columns(**{column: torch.full((batch.num_tokens,), torch.nan)})
    for settings in (TORCH, NATIVE):
        report, gradients = _run(load(tiny_model), spoiled, loss, settings)
        assert report.loss != report.loss
        assert _has_nan(list(gradients.values()))


def _has_nan(tensors: Sequence[Tensor]) -> bool:
    return any(bool(tensor.isnan().any()) for tensor in tensors)
