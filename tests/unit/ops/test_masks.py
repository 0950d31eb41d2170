"""Masked reductions: the numbers of the conventions, and independence of what stands behind the mask."""

import math

import torch

from rl.ops.masks import masked_mean, masked_sum, masked_variance, sequence_means, sequence_sums, token_weights


def test_the_mean_divides_by_the_mask_or_by_the_given_count() -> None:
    x, mask = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 0.0, 1.0])
    assert masked_mean(x, mask).item() == 2.0
    assert masked_mean(x, mask, denominator=8).item() == 0.5
    assert masked_mean(x, torch.zeros(3)).item() == 0.0


def test_nan_and_infinity_behind_the_mask_touch_neither_value_nor_gradient() -> None:
    for bad in (math.nan, math.inf, -math.inf):
        x = torch.tensor([1.0, bad], requires_grad=True)
        mean = masked_mean(x, torch.tensor([1.0, 0.0]))
        mean.backward()
        assert mean.item() == 1.0
        assert x.grad is not None
        assert x.grad.tolist() == [1.0, 0.0]
        assert masked_variance(torch.tensor([1.0, 3.0, bad]), torch.tensor([1, 1, 0])).item() == 2.0


def test_nan_in_a_counted_position_stays_visible() -> None:
    assert math.isnan(masked_sum(torch.tensor([1.0, math.nan]), torch.ones(2)).item())


def test_the_variance_is_unbiased_and_zero_for_fewer_than_two_values() -> None:
    x = torch.tensor([1.0, 2.0, 4.0, 9.0])
    mask = torch.tensor([1, 1, 1, 0])
    torch.testing.assert_close(masked_variance(x, mask), x[:3].var())
    assert masked_variance(x, torch.tensor([0, 1, 0, 0])).item() == 0.0
    assert masked_variance(x, torch.zeros(4)).item() == 0.0


def test_token_level_and_sequence_level_means_weigh_rows_differently() -> None:
    losses, offsets = torch.tensor([1.0, -1.0, -1.0, -1.0]), torch.tensor([0, 1, 4])
    weights = token_weights(torch.ones(4, dtype=torch.bool), torch.ones(2), offsets)
    assert masked_mean(losses, weights).item() == -0.5
    assert sequence_means(losses, weights, offsets).mean().item() == 0.0


def test_a_sample_weight_of_zero_drops_its_tokens_and_fractions_scale_them() -> None:
    weights = token_weights(
        torch.tensor([False, True, False, True, True]), torch.tensor([0.0, 0.5]), torch.tensor([0, 2, 5])
    )
    assert weights.tolist() == [0.0, 0.0, 0.0, 0.5, 0.5]


def test_empty_sequences_have_sum_and_mean_zero() -> None:
    offsets = torch.tensor([0, 0, 2, 2])
    values = torch.tensor([3.0, 5.0])
    assert sequence_sums(values, torch.ones(2), offsets).tolist() == [0.0, 8.0, 0.0]
    assert sequence_means(values, torch.ones(2), offsets).tolist() == [0.0, 4.0, 0.0]


def test_partial_sums_over_the_global_count_add_up_however_the_batch_is_split() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(60, generator=generator)
    weights = (torch.rand(60, generator=generator) > 0.4).float()
    whole = masked_mean(values, weights)
    for size in (1, 2, 7, 60):
        parts = [
            masked_mean(v, w, denominator=weights.sum())
            for v, w in zip(values.split(size), weights.split(size), strict=True)
        ]
        torch.testing.assert_close(torch.stack(parts).sum(), whole, atol=1e-6, rtol=1e-6)
