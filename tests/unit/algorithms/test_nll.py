"""Negative log-likelihood over tokens and by sequence."""

import math

import pytest
import torch

from rl.algorithms.nll import nll_by_sequence, nll_loss
from tests.support.losses import divided, gradient_of
from tests.support.rollouts import loss_batch, scatter_sampled


def test_the_mean_over_counted_tokens() -> None:
    batch = loss_batch([0.0] * 3, lengths=[1, 2], sample_weights=[0.0, 1.0])
    leaf = torch.tensor([math.nan, -2.0, -3.0], requires_grad=True)
    sums = nll_loss(scatter_sampled(batch.loss_mask, leaf), batch)
    assert divided(sums, batch.count()) == 2.5
    assert gradient_of(sums.loss, leaf).tolist() == [0.0, -1.0, -1.0]
    assert {name: metric.value for name, metric in sums.metrics.items()} == {
        "loss": 5.0,
        "num_unmasked_tokens": 2.0,
        "num_valid_samples": 1.0,
    }


def test_a_uniform_model_has_the_entropy_of_its_vocabulary() -> None:
    batch = loss_batch([0.0] * 4)
    sums = nll_loss(torch.full((5,), -math.log(7)), batch)
    assert divided(sums, batch.count()) == pytest.approx(math.log(7))


def test_nothing_counted_is_zero() -> None:
    batch = loss_batch([0.0], sample_weights=[0.0])
    assert divided(nll_loss(torch.tensor([0.0, -5.0]), batch), batch.count()) == 0.0


@pytest.mark.parametrize(("average", "expected"), [(False, [1.0, 5.0, 0.0]), (True, [1.0, 2.5, 0.0])])
def test_by_sequence(average: bool, expected: list[float]) -> None:
    batch = loss_batch([0.0] * 4, lengths=[1, 2, 1], sample_weights=[1, 1, 0])
    logprobs = scatter_sampled(batch.loss_mask, torch.tensor([-1.0, -2.0, -3.0, math.nan]))
    assert nll_by_sequence(logprobs, batch, average=average).tolist() == expected
