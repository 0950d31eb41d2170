"""Signatures are the same however a weight is stored, and other for other weights."""

import math

import pytest
import torch
from torch import Tensor

from rl.weights.signature import NUM_ROWS, first_deviation, numbers_of, probe_vector, products_of, signature_of


def test_the_probe_is_of_signs_and_depends_on_name_and_width_alone() -> None:
    torch.manual_seed(1)
    first = probe_vector("layers.0.up", 64)
    torch.manual_seed(2)
    assert torch.equal(first, probe_vector("layers.0.up", 64))
    assert first.dtype == torch.float64 and set(first.tolist()) == {-1.0, 1.0}
    assert not torch.equal(first, probe_vector("layers.1.up", 64))
    assert not torch.equal(first[:32], probe_vector("layers.0.up", 32))


def test_a_signature_is_the_product_with_the_probe() -> None:
    weight = torch.randn(20, 6, dtype=torch.float64)
    y = [sum(float(w) * float(x) for w, x in zip(row, probe_vector("w", 6), strict=True)) for row in weight]
    expected = (*y[:NUM_ROWS], sum(y), math.sqrt(sum(value * value for value in y)))
    assert signature_of("w", weight) == pytest.approx(expected, rel=1e-12)


def test_a_layer_split_by_rows_or_columns_gives_the_signature_of_the_whole() -> None:
    weight = torch.randn(24, 16)
    x = probe_vector("w", 16)
    by_rows = torch.cat([products_of("w", half) for half in weight.chunk(2)])
    by_columns = sum(half.double() @ part for half, part in zip(weight.chunk(2, 1), x.chunk(2), strict=True))
    assert isinstance(by_columns, Tensor)
    expected = {"w": signature_of("w", weight)}
    for products in (by_rows, by_columns):
        assert first_deviation(expected, {"w": numbers_of(products)}, 1e-12) is None


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_a_layer_that_computes_in_its_own_precision_is_within_the_tolerance(
    dtype: torch.dtype, tolerance: float
) -> None:
    weight = torch.randn(300, 200).to(dtype)
    layer = torch.nn.functional.linear(probe_vector("w", 200).to(dtype), weight)
    assert first_deviation({"w": signature_of("w", weight)}, {"w": numbers_of(layer)}, tolerance) is None


@pytest.mark.parametrize("fault", ["stale", "swapped rows", "turned", "scaled"])
def test_another_weight_is_named(fault: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(12, 12)
    changed = {
        "stale": weight + 1e-2 * torch.randn(12, 12),
        "swapped rows": weight[[1, 0, *range(2, 12)]],
        "turned": weight.t(),
        "scaled": weight * 1.001,
    }[fault]
    expected = {"first": signature_of("first", weight), "second": signature_of("second", weight)}
    actual = {"first": signature_of("first", weight), "second": signature_of("second", changed)}
    text = first_deviation(expected, actual, 2e-5)
    assert text is not None and text.startswith("'second': W x is [")


def test_vectors_scalars_stacks_and_empty_tensors_have_signatures() -> None:
    vector = torch.randn(5)
    dot = float(vector.double() @ probe_vector("v", 5))
    assert signature_of("v", vector) == pytest.approx((dot, dot, abs(dot)))
    assert len(signature_of("s", torch.tensor(3.0))) == 3
    assert products_of("stack", torch.randn(2, 3, 4)).shape == (6,)
    assert signature_of("none", torch.empty(0, 4)) == (0.0, 0.0)


def test_a_matrix_is_doubled_in_blocks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl.weights.signature._BLOCK_ELEMENTS", 7)
    weight = torch.randn(10, 3)
    assert torch.equal(products_of("w", weight), weight.double() @ probe_vector("w", 3))


def test_a_tensor_that_the_engine_does_not_sign_is_skipped() -> None:
    assert first_deviation({"a": (1.0, 1.0, 1.0)}, {}, 1e-5) is None
