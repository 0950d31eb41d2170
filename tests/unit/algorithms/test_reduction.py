"""Means over tokens, over sequences, and with Dr. GRPO's constant."""

import math
from typing import Any

import pytest
import torch

from rl.core.metrics import Per
from tests.support.losses import divided, evaluate, objective
from tests.support.rollouts import loss_batch, scatter_sampled

SEQUENCE = {"token_level_loss": False}


@pytest.mark.parametrize(
    ("changes", "value"),
    [({}, -0.5), (SEQUENCE, 0.0), (SEQUENCE | {"sequence_loss_divisor": 4}, (1 / 4 - 3 / 4) / 2)],
)
def test_rows_of_one_and_three_tokens(changes: dict[str, Any], value: float) -> None:
    batch = loss_batch([-1] * 4, advantages=[-1, 1, 1, 1], lengths=[1, 3])
    assert evaluate(objective(True, **changes), [-1] * 4, batch).value == pytest.approx(value, abs=1e-7)


@pytest.mark.parametrize(
    ("changes", "share"),
    [({}, 1000 / 1010), (SEQUENCE, 0.5), (SEQUENCE | {"sequence_loss_divisor": 1000}, 0.5)],
)
def test_the_weight_of_a_long_sequence(changes: dict[str, Any], share: float) -> None:
    batch = loss_batch([-1] * 1010, advantages=[0] * 10 + [-1] * 1000, lengths=[10, 1000])
    assert evaluate(objective(True, **changes), [-1] * 1010, batch).value == pytest.approx(share, rel=1e-5)


@pytest.mark.parametrize("changes", [{}, SEQUENCE, SEQUENCE | {"sequence_loss_divisor": 1}])
def test_a_fractional_weight_scales_loss_and_counts(changes: dict[str, Any]) -> None:
    batch = loss_batch([-1, -1], advantages=[-2, -6], lengths=[1, 1], sample_weights=[1.0, 0.5])
    assert evaluate(objective(True, **changes), [-1, -1], batch).value == pytest.approx((2 + 3) / 1.5)


def test_a_masked_mean_divides_by_the_given_count_and_ignores_what_is_masked() -> None:
    batch = loss_batch([-1] * 3, advantages=[-1, -math.inf, -3], lengths=[1, 1, 1], sample_weights=[1, 0, 1])
    sums = objective(True)(scatter_sampled(batch.loss_mask, -torch.ones(3)), torch.zeros(6), batch)
    assert (sums.per, divided(sums, batch.count())) == (Per.TOKENS, 2.0)
    assert sums.loss.item() / 8 == 0.5


@pytest.mark.parametrize(
    "changes",
    [
        {},
        SEQUENCE,
        SEQUENCE | {"sequence_loss_divisor": 4},
        SEQUENCE | {"sequence_level_importance_ratios": True},
        {"positive_example_nll_weight": 0.5, "entropy_coef": 0.1},
        SEQUENCE | {"positive_example_nll_weight": 0.5, "reference_policy_kl_penalty": 0.1},
    ],
)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_loss_and_gradient_do_not_depend_on_the_micro_batch_size(changes: dict[str, Any], size: int) -> None:
    lengths = [1, 4, 2, 3, 5, 1]
    count = sum(lengths)
    generator = torch.Generator().manual_seed(0)
    draws = {name: (-2 * torch.rand(count, generator=generator)).tolist() for name in "gprl"}
    batch = loss_batch(
        draws["g"],
        advantages=(2 * torch.rand(count, generator=generator) - 1).tolist(),
        prev_logprobs=draws["p"],
        reference_logprobs=draws["r"],
        lengths=lengths,
        sample_weights=[1, 1, 0.5, 1, 0, 1],
    ).with_columns(rewards=torch.tensor([1.0, 0, 1, -1, 1, 0]))
    batch = batch.with_counts(batch.count())
    loss = objective(**changes)
    leaf = torch.tensor(draws["l"], dtype=torch.float64, requires_grad=True)
    full = scatter_sampled(batch.loss_mask, leaf)
    whole = loss(full, full.exp(), batch).loss
    starts = batch.offsets.tolist()
    parts = torch.zeros((), dtype=torch.float64)
    for number, micro in enumerate(batch.split(size)):
        piece = full[starts[number * size] : starts[min((number + 1) * size, len(lengths))]]
        parts = parts + loss(piece, piece.exp(), micro).loss
    assert parts.item() == pytest.approx(whole.item(), abs=1e-9)
    expected = torch.autograd.grad(whole, leaf, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(parts, leaf)[0], expected, atol=1e-9, rtol=1e-9)


def test_unequal_micro_batches_are_weighted_by_their_tokens() -> None:
    lengths = [100, 900]
    batch = loss_batch([-1] * 1000, advantages=[-2.0] * 100 + [-0.5] * 900, lengths=lengths)
    loss, counts = objective(True), batch.count()
    parts = [loss(-torch.ones(part.num_tokens), torch.zeros(part.num_tokens), part) for part in batch.split(1)]
    assert sum(divided(part, counts) for part in parts) == pytest.approx(0.65)
