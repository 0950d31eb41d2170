"""Whitening over votes: vectors, and never a division by 0."""

import pytest
import torch

from rl.algorithms.whitening import whiten_biased, whiten_unbiased

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("values", "votes", "biased", "unbiased"),
    [
        ([1, 3], [1, 1], [-1, 1], [-0.7071068, 0.7071068]),
        ([0.46575, 0.385, 0.3], [1, 1, 1], [1.2141431, 0.0209335, -1.2350766], [0.9913436, 0.0170921, -1.0084358]),
        ([5, NAN, INF], [1, 0, 0], [0, 0, 0], [0, 0, 0]),
        ([NAN, INF], [0, 0], [0, 0], [0, 0]),
        ([0.1, 0.1, 0.1, 9], [1, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]),
        ([1, NAN, 3], [1, 0, 1], [-1, 0, 1], [-0.7071068, 0, 0.7071068]),
        ([], [], [], []),
    ],
)
def test_whitening(values: list[float], votes: list[int], biased: list[float], unbiased: list[float]) -> None:
    numbers, who = torch.tensor(values), torch.tensor(votes, dtype=torch.bool)
    assert whiten_biased(numbers, who).tolist() == pytest.approx(biased, abs=1e-5)
    assert whiten_unbiased(numbers, who, 1e-8).tolist() == pytest.approx(unbiased, abs=1e-5)
    assert whiten_unbiased(numbers, who, 0.0).tolist() == pytest.approx(unbiased, abs=1e-5)


@pytest.mark.parametrize("epsilon", [0.0, 1e-8])
@pytest.mark.parametrize("values", [[0.1 + 0.2 - 0.3, 0.0], [1.0, 1.0 + 1e-7], [1e4, 1e4 + 1e-3]])
def test_rounding_is_no_signal(values: list[float], epsilon: float) -> None:
    numbers = torch.tensor(values, dtype=torch.float64)
    assert whiten_unbiased(numbers, torch.ones(2, dtype=torch.bool), epsilon).tolist() == [0, 0]


def test_the_biased_variance_is_bounded_from_below() -> None:
    values = torch.tensor([1e-6, -1e-6], dtype=torch.float64)
    assert whiten_biased(values, torch.ones(2, dtype=torch.bool)).tolist() == pytest.approx([0.01, -0.01])
