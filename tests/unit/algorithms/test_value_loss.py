"""The critic's loss equals its hand-computed values, in value and in gradient."""

import math

import pytest
import torch

from rl.algorithms.value_loss import ValueLoss, explained_variance
from rl.core.batch import TrainBatch
from rl.core.metrics import finalize_metrics
from tests.support.losses import divided
from tests.support.rollouts import loss_batch, scatter_sampled


def _batch(returns: list[float], old: list[float] | None = None, weight: float = 1.0) -> TrainBatch:
    batch = loss_batch([-1.0] * len(returns), sample_weights=[weight])
    columns = {"returns": returns} | ({} if old is None else {"values": old})
    return batch.with_columns(**{n: scatter_sampled(batch.loss_mask, torch.tensor(v)) for n, v in columns.items()})


def _evaluate(loss: ValueLoss, values: list[float], batch: TrainBatch) -> tuple[float, list[float], dict[str, float]]:
    leaf = torch.tensor(values, requires_grad=True)
    sums = loss(scatter_sampled(batch.loss_mask, leaf), batch)
    sums.loss.backward()
    assert leaf.grad is not None
    counts = batch.count()
    metrics = finalize_metrics(sums.metrics, counts.tokens, counts.sequences)
    return divided(sums, counts), leaf.grad.tolist(), metrics


def test_the_clipped_loss_and_its_gradient() -> None:
    batch = _batch([1.0, 1.0, 1.0], [0.5, 0.5, 0.5])
    value, gradient, metrics = _evaluate(ValueLoss(clip=0.2), [1.0, 0.6, 0.0], batch)
    assert value == pytest.approx(0.2083333, abs=1e-6)
    # The clipped branch of the first is larger and flat; the others follow the plain square.
    assert gradient == pytest.approx([0.0, -0.4, -1.0], abs=1e-6)
    assert metrics["vf_clipfrac"] == pytest.approx(1 / 3)
    assert (metrics["values_min"], metrics["values_max"]) == (0.0, 1.0)
    assert _evaluate(ValueLoss(scale=2.0, clip=0.2), [1.0, 0.6, 0.0], batch)[1][2] == pytest.approx(-2.0)


def test_without_clipping_it_is_half_the_mean_square() -> None:
    value, gradient, metrics = _evaluate(ValueLoss(), [1.0, 2.0, 2.0], _batch([1.0, 2.0, 3.0]))
    assert (value, gradient) == (pytest.approx(1 / 6), [0.0, 0.0, -1.0])
    assert (metrics["returns_mean"], metrics["values_mean"]) == (2.0, pytest.approx(5 / 3))
    assert metrics["vf_clipfrac"] == 0.0
    assert explained_variance(metrics) == pytest.approx(2 / 3, abs=1e-6)


def test_a_perfect_critic_explains_everything() -> None:
    value, _, metrics = _evaluate(ValueLoss(), [1.0, 2.0], _batch([1.0, 2.0]))
    assert (value, explained_variance(metrics)) == (0.0, 1.0)


def test_returns_that_are_all_equal_have_nothing_to_explain() -> None:
    assert math.isnan(explained_variance(_evaluate(ValueLoss(), [0.0, 1.0], _batch([0.5, 0.5]))[2]))


def test_a_clip_of_zero_is_no_clip() -> None:
    batch = _batch([1.0, 2.0], [0.5, 0.5])
    assert _evaluate(ValueLoss(clip=0.0), [0.9, 1.0], batch) == _evaluate(ValueLoss(), [0.9, 1.0], batch)


def test_an_empty_mask_gives_zero_and_no_extrema() -> None:
    value, gradient, metrics = _evaluate(ValueLoss(clip=0.2), [1.0], _batch([float("nan")], [0.0], weight=0.0))
    assert (value, gradient, metrics) == (0.0, [0.0], {"num_valid_samples": 0.0})


@pytest.mark.parametrize(("clip", "missing"), [(None, "returns"), (0.2, "values")])
def test_a_missing_column_is_named(clip: float | None, missing: str) -> None:
    batch = loss_batch([-1.0]) if missing == "returns" else _batch([1.0])
    with pytest.raises(ValueError, match=f"column {missing}"):
        ValueLoss(clip=clip)(torch.zeros(2), batch)
