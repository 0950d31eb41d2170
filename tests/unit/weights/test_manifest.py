"""Manifests: what they list, and how they say where two of them differ."""

import pytest
import torch

from rl.core.errors import WeightSyncError
from rl.weights.manifest import fingerprint, first_difference, manifest_of, num_bytes, torch_dtype
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


def test_dtypes_survive_the_wire() -> None:
    assert torch_dtype(B) is torch.bfloat16


def test_fingerprints_differ_with_order_and_dtype() -> None:
    prints = {fingerprint(m) for m in [(A, B), (B, A), (A,), (TensorSpec("a", "float16", (2, 3)), B)]}
    assert len(prints) == 4


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
