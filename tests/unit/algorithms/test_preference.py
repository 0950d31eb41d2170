"""Bradley-Terry and DPO over pairs equal their hand-computed values."""

import math
from typing import Any

import pytest
import torch

from rl.algorithms.preference import DPOLoss, pairwise_loss
from rl.core.metrics import finalize_metrics
from tests.support.losses import divided, gradient_of
from tests.support.rollouts import loss_batch, scatter_sampled


def _scores(scores: list[float], weights: list[float] | None = None) -> tuple[float, list[float], dict[str, float]]:
    batch = loss_batch([0.0] * len(scores), lengths=[1] * len(scores), sample_weights=weights)
    leaf = torch.tensor(scores, requires_grad=True)
    sums = pairwise_loss(leaf, batch)
    counts = batch.count()
    metrics = finalize_metrics(sums.metrics, counts.tokens, counts.sequences)
    return divided(sums, counts), gradient_of(sums.loss, leaf).tolist(), metrics


@pytest.mark.parametrize(
    ("scores", "value", "accuracy"),
    [([1.0, 0.0], 0.3132617, 1.0), ([2.0, 2.0], 0.6931472, 0.0), ([1.0, 0.0, 2.0, 2.0], 0.50320445, 0.5)],
)
def test_bradley_terry(scores: list[float], value: float, accuracy: float) -> None:
    got, _, metrics = _scores(scores)
    assert got == pytest.approx(value, abs=1e-6)
    assert metrics["accuracy"] == accuracy
    assert metrics["rewards_chosen_mean"] == pytest.approx(sum(scores[0::2]) / (len(scores) / 2))
    assert metrics["rewards_rejected_mean"] == pytest.approx(sum(scores[1::2]) / (len(scores) / 2))
    assert metrics["num_valid_samples"] == len(scores) / 2


def test_a_masked_pair_contributes_nothing_even_when_it_is_no_number() -> None:
    got, gradient, metrics = _scores([1.0, 0.0, math.nan, 0.0], [1, 1, 0, 0])
    assert got == pytest.approx(0.3132617, abs=1e-6)
    assert gradient[2:] == [0.0, 0.0]
    assert metrics["num_valid_samples"] == 1.0
    assert _scores([0.0, 0.0], [0, 0])[0] == 0.0


@pytest.mark.parametrize("weights", [[1.0, 0.0], [1.0, 1.0, 1.0]])
def test_what_forms_no_pairs_is_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="pairs of equal weight"):
        _scores([0.0] * len(weights), weights)


def _dpo(loss: DPOLoss, logprobs: list[float], reference: list[float], lengths: list[int]) -> Any:
    batch = loss_batch([0.0] * len(logprobs), reference_logprobs=reference, lengths=lengths)
    leaf = torch.tensor(logprobs, requires_grad=True)
    sums = loss(scatter_sampled(batch.loss_mask, leaf), batch)
    counts = batch.count()
    metrics = finalize_metrics(sums.metrics, counts.tokens, counts.sequences)
    # The gradient of the divided loss.
    return divided(sums, counts), [each / counts.sequences for each in gradient_of(sums.loss, leaf).tolist()], metrics


def test_dpo_at_the_reference_is_log_two_with_opposite_gradients() -> None:
    value, gradient, metrics = _dpo(DPOLoss(), [-1.0, -2.0], [-1.0, -2.0], [1, 1])
    assert value == pytest.approx(math.log(2), abs=1e-6)
    assert gradient == pytest.approx([-0.025, 0.025])
    assert (metrics["accuracy"], metrics["preference_loss"]) == (0.0, pytest.approx(math.log(2)))


@pytest.mark.parametrize(("margin", "value"), [(4.0, 0.5981389), (-4.0, 0.7981389)])
def test_dpo_margins_sum_over_tokens(margin: float, value: float) -> None:
    logprobs = [-1.0 + margin / 2, -1.0 + margin / 2, -2.0]
    assert _dpo(DPOLoss(), logprobs, [-1.0, -1.0, -2.0], [2, 1])[0] == pytest.approx(value, abs=1e-6)
    assert _dpo(DPOLoss(beta=0.1, average_preference=True), logprobs, [-1.0, -1.0, -2.0], [2, 1])[0] == pytest.approx(
        value, abs=1e-6
    )


@pytest.mark.parametrize(("average", "sft"), [(False, 3.0), (True, 1.5)])
def test_dpo_adds_the_likelihood_of_the_chosen_response_alone(average: bool, sft: float) -> None:
    loss = DPOLoss(preference_weight=2.0, sft_weight=0.5, average_sft=average)
    value, _, metrics = _dpo(loss, [-1.0, -2.0, -7.0], [-1.0, -2.0, -7.0], [2, 1])
    assert value == pytest.approx(2 * math.log(2) + 0.5 * sft, abs=1e-6)
    assert metrics["sft_loss"] == pytest.approx(sft)


def test_dpo_needs_a_reference() -> None:
    with pytest.raises(ValueError, match="reference_logprobs"):
        DPOLoss()(torch.zeros(4), loss_batch([0.0, 0.0], lengths=[1, 1]))
