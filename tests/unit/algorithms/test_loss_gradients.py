"""Gradients of the losses: finite differences of a plain restatement in float64, and enumerated policy gradients."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from rl.algorithms.config import LossConfig
from rl.algorithms.distillation import TopKDistillation
from rl.algorithms.nll import nll_loss
from rl.algorithms.preference import DPOLoss, pairwise_loss
from rl.algorithms.value_loss import ValueLoss
from rl.core.batch import TrainBatch
from tests.support.losses import OPTIONS, gradient_of, loss_config, objective
from tests.support.rollouts import loss_batch, scatter_sampled

LENGTHS = [3, 1, 4, 2]
REWARDS = [1.0, 0.0, 0.5, -1.0]
WEIGHTS = [1.0, 1.0, 0.5, 1.0]
COUNT = sum(LENGTHS)


@dataclass(frozen=True)
class _Columns:
    """Random numbers of one batch, by sampled token; exact in float32."""

    logprobs: list[float]
    prev: list[float]
    generation: list[float]
    reference: list[float]
    advantages: list[float]
    entropy: list[float]

    @classmethod
    def draw(cls, seed: int) -> "_Columns":
        generator = torch.Generator().manual_seed(seed)
        draws = torch.rand(6, COUNT, generator=generator)
        logprobs = -0.5 - draws[0]
        near = [(logprobs + (draw - 0.5)).tolist() for draw in draws[1:4]]
        return cls(logprobs.tolist(), *near, (2 * draws[4] - 1).tolist(), draws[5].tolist())

    def batch(self) -> TrainBatch:
        batch = loss_batch(self.generation, self.advantages, self.prev, self.reference, LENGTHS, WEIGHTS)
        batch = batch.with_columns(rewards=torch.tensor(REWARDS))
        return batch.with_counts(batch.count())


def _restated(point: Sequence[float], frozen: Sequence[float], columns: _Columns, config: LossConfig) -> float:
    """The undivided loss at `point`, token by token in plain Python; what has no gradient is taken at `frozen`."""
    total, start = 0.0, 0
    for length, weight, reward in zip(LENGTHS, WEIGHTS, REWARDS, strict=True):
        rows = range(start, start + length)
        start += length
        share = weight
        if not config.token_level_loss:
            share = weight / (config.sequence_loss_divisor or length)
        for row in rows:
            total += share * _actor(point, frozen, columns, config, rows, row)
            total -= share * config.entropy_coef * columns.entropy[row]
            if config.reference_policy_kl_penalty and not config.use_kl_in_reward:
                total += share * config.reference_policy_kl_penalty * _kl(point[row], frozen[row], columns, config, row)
            if reward > 0:
                positive = sum(n * w for n, w, r in zip(LENGTHS, WEIGHTS, REWARDS, strict=True) if r > 0)
                steps = sum(n * w for n, w in zip(LENGTHS, WEIGHTS, strict=True))
                main = steps if config.token_level_loss else sum(WEIGHTS)
                total += config.positive_example_nll_weight * weight * -point[row] * main / positive
    return total


def _actor(
    point: Sequence[float],
    frozen: Sequence[float],
    columns: _Columns,
    config: LossConfig,
    rows: range,
    row: int,
) -> float:
    advantage = columns.advantages[row]
    low, high = 1 - config.ratio_clip_min, 1 + config.ratio_clip_max
    ratio = math.exp(point[row] - columns.prev[row])
    if config.sequence_level_importance_ratios:
        ratio = math.exp(sum(point[each] - columns.prev[each] for each in rows) / len(rows))
    if config.force_on_policy_ratio:
        loss = -advantage * math.exp(point[row] - frozen[row])
    elif config.disable_ppo_ratio:
        loss = -advantage * point[row]
    elif config.use_cispo:
        constant = math.exp(frozen[row] - columns.prev[row])
        loss = -advantage * min(max(constant, low), high) * point[row]
    else:
        loss = max(-advantage * ratio, -advantage * min(max(ratio, low), high))
        if config.ratio_clip_c is not None and advantage < 0:
            loss = min(loss, -advantage * config.ratio_clip_c)
    return loss * _correction(columns, config, rows, row)


def _correction(columns: _Columns, config: LossConfig, rows: range, row: int) -> float:
    if not config.use_importance_sampling_correction:
        return 1.0
    gaps = [columns.prev[each] - columns.generation[each] for each in rows]
    weight = math.exp(sum(gaps) if config.sequence_level_importance_ratios else gaps[row - rows.start])
    kind = config.truncated_importance_sampling_type
    low = config.truncated_importance_sampling_ratio_min or 0.0
    high = config.truncated_importance_sampling_ratio or math.inf
    if kind == "tis":
        return min(max(weight, low), high)
    judged = math.exp(sum(gaps) / len(gaps)) if kind == "seq-mask-tis" else weight
    return weight if kind is None or low <= judged <= high else 0.0


def _kl(logprob: float, frozen: float, columns: _Columns, config: LossConfig, row: int) -> float:
    bound = config.kl_input_clamp_value or math.inf
    sampler = columns.generation[row] if config.use_on_policy_kl_approximation else frozen
    d = columns.reference[row] - logprob
    weight = math.exp((logprob if abs(d) <= bound else frozen) - sampler)
    d = min(max(d, -bound), bound)
    value = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[config.reference_policy_kl_type]
    bound = config.kl_output_clamp_value or math.inf
    return min(max(weight * value, -bound), bound)


TIGHT: list[dict[str, Any]] = [
    {"ratio_clip_min": 0.05, "ratio_clip_max": 0.1, "ratio_clip_c": 1.2},
    {"use_cispo": True, "ratio_clip_min": 0.05, "ratio_clip_max": 0.1},
    {"reference_policy_kl_penalty": 1.0, "kl_input_clamp_value": 0.2},
    {"reference_policy_kl_penalty": 1.0, "reference_policy_kl_type": "k1", "kl_output_clamp_value": 0.1},
    {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "icepop",
        "truncated_importance_sampling_ratio": 1.1,
        "truncated_importance_sampling_ratio_min": 0.9,
        "entropy_coef": 0.3,
        "positive_example_nll_weight": 0.2,
        "token_level_loss": False,
    },
]


@pytest.mark.parametrize("options", OPTIONS + TIGHT)
@pytest.mark.parametrize("seed", range(3))
def test_value_and_gradient_are_those_of_the_plain_restatement(options: dict[str, Any], seed: int) -> None:
    columns, config = _Columns.draw(seed), loss_config(**options)
    batch = columns.batch()
    leaf = torch.tensor(columns.logprobs, dtype=torch.float64, requires_grad=True)
    entropy = scatter_sampled(batch.loss_mask, torch.tensor(columns.entropy, dtype=torch.float64))
    loss = objective(**options)(scatter_sampled(batch.loss_mask, leaf), entropy, batch).loss
    point, step = columns.logprobs, 1e-6
    # float32 columns carry the rounding of their own sum, not of the restatement.
    exact = _Columns(
        point,
        *[
            torch.tensor(values).double().tolist()
            for values in (columns.prev, columns.generation, columns.reference, columns.advantages, columns.entropy)
        ],
    )
    assert loss.item() == pytest.approx(_restated(point, point, exact, config), rel=1e-9, abs=1e-12)

    def moved(place: int, by: float) -> float:
        there = [value + by * (place == each) for each, value in enumerate(point)]
        return _restated(there, point, exact, config)

    numeric = [(moved(place, step) - moved(place, -step)) / (2 * step) for place in range(COUNT)]
    assert gradient_of(loss, leaf).tolist() == pytest.approx(numeric, rel=1e-5, abs=1e-8)


def _check_finite_differences(function: Callable[[Tensor], Tensor], point: Tensor) -> None:
    assert torch.autograd.gradcheck(function, (point.double().requires_grad_(),))


@pytest.mark.parametrize("clip", [None, 0.1])
def test_finite_differences_of_the_value_loss(clip: float | None) -> None:
    columns = _Columns.draw(0)
    batch = columns.batch()
    batch = batch.with_columns(
        returns=scatter_sampled(batch.loss_mask, torch.tensor(columns.prev)),
        values=scatter_sampled(batch.loss_mask, torch.tensor(columns.generation)),
    )
    _check_finite_differences(
        lambda values: ValueLoss(0.7, clip)(scatter_sampled(batch.loss_mask, values), batch).loss,
        torch.tensor(columns.logprobs),
    )


@pytest.mark.parametrize("averages", [False, True])
def test_finite_differences_of_nll_bradley_terry_and_dpo(averages: bool) -> None:
    columns = _Columns.draw(1)
    batch = loss_batch(columns.generation, reference_logprobs=columns.reference, lengths=LENGTHS)
    logprobs = torch.tensor(columns.logprobs)
    dpo = DPOLoss(0.3, 0.8, 0.4, averages, averages)
    for loss in (lambda full: nll_loss(full, batch).loss, lambda full: dpo(full, batch).loss):
        _check_finite_differences(lambda leaf, loss=loss: loss(scatter_sampled(batch.loss_mask, leaf)), logprobs)
    _check_finite_differences(lambda scores: pairwise_loss(scores, batch, 0.5).loss, logprobs[:4])


@pytest.mark.parametrize("kind", ["forward", "reverse", "mixed"])
@pytest.mark.parametrize("zero_outside", [False, True])
def test_finite_differences_of_distillation(kind: Any, zero_outside: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    batch = loss_batch([0.0] * 3, lengths=[1, 2], sample_weights=[1.0, 0.5])
    teacher, indices = torch.randn(5, 2, generator=generator), torch.tensor([[1, 3]] * 5)
    loss = TopKDistillation(kind, 0.3, zero_outside)
    _check_finite_differences(
        lambda logits: loss(logits, teacher.to(logits.dtype), indices, batch).loss,
        torch.randn(5, 4, generator=generator),
    )


SEQUENCES = list(itertools.product(range(3), repeat=2))
THETA = [[0.5, 0.0, -0.5], [0.2, -0.3, 0.4]]
BEHAVIOUR = [[0.1, 0.3, -0.2], [0.0, 0.1, 0.2]]


def _log_policy(logits: Tensor, sequence: Sequence[int]) -> Tensor:
    return logits.log_softmax(-1)[range(len(sequence)), list(sequence)]


def _reward(sequence: Sequence[int]) -> float:
    return float(sequence[0] == 0) + 2.0 * float(sequence[1] == sequence[0]) - 0.7


def _expected_gradient(theta: Tensor, sampler: Tensor, **options: Any) -> Tensor:
    """Enumerate all two-token sequences that `sampler` may draw, and average the gradient of the loss by theta."""
    total = torch.zeros((), dtype=theta.dtype)
    for sequence in SEQUENCES:
        log_p, log_q = _log_policy(theta, sequence), _log_policy(sampler, sequence).detach()
        batch = loss_batch(log_q.tolist(), advantages=[_reward(sequence)] * 2)
        full = scatter_sampled(batch.loss_mask, log_p)
        loss = objective(True, **options)(full, torch.zeros_like(full), batch).loss
        total = total + log_q.sum().exp() * loss
    return gradient_of(total, theta)


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({}, 1),
        ({"ratio_clip_c": 3.0}, 1),
        ({"disable_ppo_ratio": True}, 1),
        ({"force_on_policy_ratio": True}, 1),
        ({"use_cispo": True}, 1),
        ({"token_level_loss": False}, 2),
        ({"token_level_loss": False, "sequence_loss_divisor": 1}, 1),
        ({"sequence_level_importance_ratios": True, "token_level_loss": False}, 2),
    ],
)
@pytest.mark.parametrize("corrected", [False, True])
def test_the_expected_gradient_on_a_bandit_is_the_policy_gradient(
    options: dict[str, Any], share: int, corrected: bool
) -> None:
    theta = torch.tensor(THETA, dtype=torch.float64, requires_grad=True)
    by_sequence = options.get("sequence_level_importance_ratios", False)
    # A product of token weights is exact for the sequence's gradient; weights per token are so only where they agree.
    sampler = torch.tensor(BEHAVIOUR, dtype=torch.float64) if corrected and by_sequence else theta.detach()
    got = _expected_gradient(theta, sampler, use_importance_sampling_correction=corrected, **options)
    value = sum(_log_policy(theta, each).sum().exp() * _reward(each) for each in SEQUENCES)
    assert isinstance(value, Tensor)
    torch.testing.assert_close(got, -gradient_of(value, theta) / share, atol=1e-6, rtol=1e-6)


def test_on_one_token_the_correction_is_exact_for_every_sampler() -> None:
    theta = torch.tensor(THETA[0], dtype=torch.float64, requires_grad=True)
    sampler = torch.tensor(BEHAVIOUR[0], dtype=torch.float64).log_softmax(0)
    total = torch.zeros((), dtype=torch.float64)
    for action in range(3):
        batch = loss_batch([sampler[action].item()], advantages=[float(action)])
        full = scatter_sampled(batch.loss_mask, theta.log_softmax(0)[action : action + 1])
        loss = objective(True, use_importance_sampling_correction=True)(full, torch.zeros_like(full), batch).loss
        total = total + sampler[action].exp() * loss
    got = gradient_of(total, theta)
    value = (theta.softmax(0) * torch.arange(3)).sum()
    torch.testing.assert_close(got, -gradient_of(value, theta), atol=1e-6, rtol=1e-6)
