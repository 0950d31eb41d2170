"""Manifests: what they list, and how they say where two of them differ."""

import pytest
import torch

from rl.core.errors import WeightSyncError
from rl.weights.manifest import first_difference, is_castable, manifest_of, num_bytes, torch_dtype
from rl.weights.transport import TensorSpec

A = TensorSpec("a", "float32", (2, 3))
B = TensorSpec("b", "bfloat16", ())


def test_a_manifest_keeps_order_names_dtypes_and_shapes() -> None:
    assert manifest_of({"a": torch.zeros(2, 3), "b": torch.zeros((), dtype=torch.bfloat16)}) == (A, B)


def test_bytes_count_items_and_a_scalar_has_one() -> None:
    assert [num_bytes(A), num_bytes(B), num_bytes(TensorSpec("c", "int64", (0, 5)))] == [24, 2, 0]


def test_an_unknown_dtype_is_refused_by_name() -> None:
    with pytest.raises(WeightSyncError, match="'z' has dtype complex64"):
        manifest_of({"z": torch.zeros(1, dtype=torch.complex64)})


def test_a_tensor_without_data_is_refused_by_name() -> None:
    tensors = {"w": torch.empty(2, 3, device="meta"), "v": torch.empty(2, 3, device="meta")}
    with pytest.raises(WeightSyncError, match=r"tensor 'w' \[2, 3\] is on the device meta and has no data; load it"):
        manifest_of(tensors)


def test_dtypes_survive_the_wire() -> None:
    assert torch_dtype(B) is torch.bfloat16


def test_a_wire_dtype_is_for_floating_point_numbers_of_more_than_eight_bits() -> None:
    dtypes = [torch.float64, torch.float32, torch.float16, torch.float8_e4m3fn, torch.int32, torch.bool]
    manifest = manifest_of({str(dtype): torch.zeros(1).to(dtype) for dtype in dtypes}, torch.bfloat16)
    assert [spec.dtype for spec in manifest] == ["bfloat16"] * 3 + ["float8_e4m3fn", "int32", "bool"]


def test_casts_on_the_way_are_among_three_dtypes() -> None:
    assert is_castable(torch.float32, torch.bfloat16) and is_castable(torch.float16, torch.float32)
    assert is_castable(torch.int8, torch.int8) and not is_castable(torch.int8, torch.uint8)
    assert not is_castable(torch.float64, torch.float32) and not is_castable(torch.bfloat16, torch.int16)


@pytest.mark.parametrize(
    ("left", "right", "text"),
    [
        ((A, B), (A, B), None),
        ((A, B), (A, TensorSpec("b", "float32", ())), "tensor 1: expected 'b' bfloat16[], got 'b' float32[]"),
        ((A, B), (A,), "tensor 1: expected 'b' bfloat16[], got none"),
        ((A,), (A, B), "tensor 1: expected none, got 'b' bfloat16[]"),
    ],
)
def test_the_first_differing_tensor_is_named(
    left: tuple[TensorSpec, ...], right: tuple[TensorSpec, ...], text: str | None
) -> None:
    assert first_difference(left, right) == text
