"""The policy-gradient loss as a whole: masks, missing columns, entropy, positive examples, what contributes."""

import math
from typing import Any

import pytest
import torch

from rl.core.batch import TrainBatch
from rl.core.metrics import Counts, Per
from tests.support.losses import OPTIONS, evaluate, objective
from tests.support.rollouts import loss_batch, scatter_sampled


def _counted(batch: TrainBatch) -> TrainBatch:
    return batch.with_counts(batch.count())


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 100.0])
def test_what_stands_in_masked_places_reaches_neither_value_nor_gradient(
    options: dict[str, Any], garbage: float
) -> None:
    columns = {"advantages": [1.0, 1.0], "prev_logprobs": [-1.0, -1.1], "reference_logprobs": [-1.2, -1.2]}
    rest = {"lengths": [1, 1], "sample_weights": [1.0, 0.0]}
    rewards = torch.tensor([1.0, 1.0])

    def result(filler: float) -> Any:
        values = {name: [first, filler] for name, (first, _) in columns.items()}
        batch = loss_batch([-1.1, filler], **values, **rest).with_columns(rewards=rewards)
        return evaluate(objective(**options), [-1.0, filler], _counted(batch), [0.5, filler])

    assert result(garbage) == result(-1.0)
    assert result(garbage).gradient[1] == 0.0
    assert math.isfinite(result(garbage).value)


def test_garbage_at_prompt_tokens_harms_nothing_either() -> None:
    batch = loss_batch([-1.0], advantages=[1.0], prev_logprobs=[-1.1], reference_logprobs=[-1.2])
    dirty = {name: torch.tensor([math.nan, values[1]]) for name, values in _float_columns(batch).items()}
    leaf = torch.tensor([math.nan, -1.0], requires_grad=True)
    loss = objective(reference_policy_kl_penalty=1.0, entropy_coef=0.1, use_importance_sampling_correction=True)
    entropy = torch.tensor([math.nan, 0.3])
    loss(leaf, entropy, batch.with_columns(**dirty)).loss.backward()
    clean = evaluate(loss, [-1.0], batch, [0.3])
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [0.0, clean.gradient[0]]


def _float_columns(batch: TrainBatch) -> dict[str, Any]:
    assert batch.prev_logprobs is not None
    assert batch.reference_logprobs is not None
    assert batch.advantages is not None
    return {
        "generation_logprobs": batch.generation_logprobs,
        "prev_logprobs": batch.prev_logprobs,
        "reference_logprobs": batch.reference_logprobs,
        "advantages": batch.advantages,
    }


def test_masked_kl_with_nan_has_the_right_sum_and_gradient() -> None:
    batch = loss_batch([-1, -1], [0, 0], reference_logprobs=[-1.2, math.nan], lengths=[1, 1], sample_weights=[1, 0])
    got = evaluate(objective(True, reference_policy_kl_penalty=1.0), [-1.0, math.nan], batch)
    assert got.value == pytest.approx(0.0187308, abs=1e-6)
    assert got.gradient == pytest.approx([0.2, 0.0], abs=1e-6)


@pytest.mark.parametrize("options", OPTIONS)
def test_case_f_when_all_is_masked_the_loss_is_zero_and_no_metric_is_nan(options: dict[str, Any]) -> None:
    columns = {"prev_logprobs": [-1.0, -2.0], "reference_logprobs": [-1.0, -2.0]}
    batch = loss_batch([-1.0, -2.0], advantages=[1.0, 1.0], **columns, sample_weights=[0.0])
    got = evaluate(objective(**options), [-1.0, -2.0], _counted(batch))
    assert (got.value, got.gradient) == (0.0, [0.0, 0.0])
    assert got.metrics.pop("positive_nll_loss", 0.0) == 0.0
    assert got.metrics == {"num_valid_samples": 0.0, "num_clamped_log_ratios": 0.0}
    assert not objective(**options).contributes(batch).any()


def test_a_single_update_gives_what_stored_prev_logprobs_would_give() -> None:
    values = [-1.0, -0.3, -2.0]
    with_prev = loss_batch([-1.1, -0.2, -2.0], advantages=[1, -1, 2], prev_logprobs=values)
    without = loss_batch([-1.1, -0.2, -2.0], advantages=[1, -1, 2])
    several, single = (objective(one, use_importance_sampling_correction=True) for one in (False, True))
    assert evaluate(several, values, with_prev) == evaluate(single, values, without)
    assert evaluate(single, values, with_prev) == evaluate(single, values, without)
    assert (several.uses_prev, single.uses_prev) == (True, False)


@pytest.mark.parametrize(
    ("missing", "single_update", "options"),
    [
        ("advantages", True, {}),
        ("prev_logprobs", False, {}),
        ("reference_logprobs", True, {"reference_policy_kl_penalty": 0.1}),
    ],
)
def test_a_missing_column_is_named(missing: str, single_update: bool, options: dict[str, Any]) -> None:
    columns: dict[str, Any] = {"advantages": [1.0], "prev_logprobs": [-1.0], "reference_logprobs": [-1.0]}
    with pytest.raises(ValueError, match=missing):
        evaluate(objective(single_update, **options), [-1.0], loss_batch([-1.0], **(columns | {missing: None})))


@pytest.mark.parametrize(("token_level", "share"), [(True, 1 / 4), (False, 1 / 2)])
def test_the_entropy_bonus_has_the_reduction_of_the_loss_and_a_gradient(token_level: bool, share: float) -> None:
    batch = loss_batch([-1.0] * 4, advantages=[0.0] * 4, lengths=[1, 3])
    entropy = torch.tensor([9.0, 0.5, 9.0, 0.0, 0.0, 0.0], requires_grad=True)
    loss = objective(True, entropy_coef=0.1, token_level_loss=token_level)
    sums = loss(torch.full((6,), -1.0), entropy, batch)
    sums.loss.backward()
    count = 4 if sums.per is Per.TOKENS else 2
    assert sums.loss.item() / count == pytest.approx(-0.1 * 0.5 * share)
    assert entropy.grad is not None
    assert (entropy.grad / count).tolist()[:3] == pytest.approx([0.0, -0.1 * share, 0.0])
    assert sums.metrics["entropy"].value == 0.5
    assert (loss.uses_entropy, objective().uses_entropy) == (True, False)


def _positive(rewards: list[float], counts: Counts | None = None, **options: Any) -> Any:
    """Two responses of 1 and 3 tokens with log-probabilities -1 and -2; the policy gradient is 0."""
    batch = loss_batch([-1.0] * 4, advantages=[0.0] * 4, lengths=[1, 3]).with_columns(rewards=torch.tensor(rewards))
    loss = objective(True, positive_example_nll_weight=1.0, **options)
    return evaluate(loss, [-1.0, -2.0, -2.0, -2.0], batch.with_counts(counts or batch.count()))


@pytest.mark.parametrize("options", [{}, {"token_level_loss": False}])
@pytest.mark.parametrize(
    ("rewards", "value", "gradient"),
    [
        ([1.0, 1.0], 1.75, [-0.25] * 4),
        ([1.0, 0.0], 1.0, [-1.0, 0, 0, 0]),
        ([-1.0, 0.1], 2.0, [0, -1 / 3, -1 / 3, -1 / 3]),
        ([0.0, math.nan], 0.0, [0.0] * 4),
    ],
)
def test_positive_examples_have_a_mean_of_their_own(
    options: dict[str, Any], rewards: list[float], value: float, gradient: list[float]
) -> None:
    got = _positive(rewards, **options)
    assert got.value == pytest.approx(value)
    assert got.metrics["positive_nll_loss"] == pytest.approx(value)
    count = 2 if options else 4
    assert [each / count for each in got.gradient] == pytest.approx(gradient)


def test_positive_examples_of_other_micro_batches_count() -> None:
    whole = loss_batch([-1.0] * 4, advantages=[0.0] * 4, lengths=[1, 3]).with_columns(rewards=torch.ones(2))
    whole = whole.with_counts(whole.count())
    loss = objective(True, positive_example_nll_weight=1.0)
    parts = [
        loss(scatter_sampled(part.loss_mask, values), torch.zeros(part.num_tokens), part)
        for part, values in zip(whole.split(1), [torch.tensor([-1.0]), torch.full((3,), -2.0)], strict=True)
    ]
    assert sum(part.loss.item() for part in parts) / 4 == pytest.approx(1.75)
    assert sum(part.metrics["positive_nll_loss"].value for part in parts) == pytest.approx(1.75)


def test_positive_examples_without_counts_are_an_error_that_says_how_to_set_them() -> None:
    batch = loss_batch([-1.0], advantages=[0.0])
    with pytest.raises(ValueError, match="with_counts"):
        evaluate(objective(True, positive_example_nll_weight=1.0), [-1.0], batch)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [True, False, False, False]),
        ({"disable_ppo_ratio": True}, [True, False, False, False]),
        ({"use_cispo": True}, [True, False, False, False]),
        ({"sequence_level_importance_ratios": True, "token_level_loss": False}, [True, False, False, False]),
        ({"reference_policy_kl_penalty": 0.1}, [True, True, True, False]),
        ({"reference_policy_kl_penalty": 0.1, "use_kl_in_reward": True}, [True, False, False, False]),
        ({"entropy_coef": 0.1}, [True, True, True, False]),
        ({"positive_example_nll_weight": 0.1}, [True, True, False, False]),
    ],
)
def test_only_sequences_that_can_learn_contribute_and_the_others_have_loss_and_gradient_zero(
    options: dict[str, Any], expected: list[bool]
) -> None:
    lengths = [2, 1, 1, 1]
    batch = loss_batch(
        [-1.0] * 5,
        advantages=[0.0, 1.0, 0.0, 0.0, 1.0],
        prev_logprobs=[-1.3] * 5,
        reference_logprobs=[-0.2] * 5,
        lengths=lengths,
        sample_weights=[1, 1, 1, 0],
    ).with_columns(rewards=torch.tensor([1.0, 1.0, 0.0, 1.0]))
    batch = batch.with_counts(batch.count())
    loss = objective(**options)
    assert loss.contributes(batch).tolist() == expected
    rest = [place for place, contributes in enumerate(expected) if not contributes]
    got = evaluate(loss, [-1.0] * sum(lengths[place] for place in rest), batch.select(rest))
    assert got.value == 0.0
    assert set(got.gradient) == {0.0}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loss_has_the_dtype_of_the_logprobs(options: dict[str, Any], dtype: torch.dtype) -> None:
    batch = loss_batch([-1.0], advantages=[1.0], prev_logprobs=[-1.1], reference_logprobs=[-1.2])
    sums = objective(**options)(torch.tensor([0.0, -1.0], dtype=dtype), torch.zeros(2, dtype=dtype), _counted(batch))
    assert sums.loss.dtype is dtype


def test_a_sequence_without_sampled_tokens_counts_as_a_sequence_and_adds_nothing() -> None:
    batch = loss_batch([-1.0], advantages=[2.0], lengths=[1, 0])
    for options in ({"token_level_loss": False}, {"token_level_loss": False, "sequence_level_importance_ratios": True}):
        got = evaluate(objective(True, **options), [-1.0], batch)
        assert (got.value, got.gradient) == (-1.0, [-2.0])
