"""A stale packed copy of an output layer is found, however small the change."""

import math

import pytest
import torch

from rl.generation.vllm.head_check import largest_difference


def weights(dtype: torch.dtype, rows: int = 300, width: int = 48) -> torch.Tensor:
    return (0.1 * torch.randn(rows, width, generator=torch.Generator().manual_seed(0))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shift", [0, 7])
def test_equal_weights_differ_by_nothing(dtype: torch.dtype, shift: int) -> None:
    weight = weights(dtype)
    assert largest_difference(weight, lambda probe: probe @ weight.t(), shift) == 0.0


@pytest.mark.parametrize("relative", [1e-6, 1e-4])
def test_a_copy_that_is_older_by_a_millionth_is_found(relative: float) -> None:
    weight = weights(torch.float32)
    old = weight * (1 - relative)
    assert largest_difference(weight, lambda probe: probe @ old.t(), 0) > 0.0


def test_one_step_at_a_small_learning_rate_is_found() -> None:
    weight = weights(torch.float32)
    old = weight + 1e-6 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).sign()
    assert largest_difference(weight, lambda probe: probe @ old.t(), 0) == pytest.approx(1e-6, rel=0.05)


def test_one_changed_weight_is_found_by_some_shift() -> None:
    weight = weights(torch.float32)
    old = weight.clone()
    old[17, 20] += 1e-6
    seen = [largest_difference(weight, lambda probe: probe @ old.t(), shift) > 0 for shift in range(3)]
    assert sum(seen) == 1


def test_what_is_not_a_number_is_no_equality() -> None:
    weight = weights(torch.float32)
    assert math.isnan(largest_difference(weight, lambda probe: torch.full((16, 300), math.nan), 0))
