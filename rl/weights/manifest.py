"""What travels in a refit: the list of tensors in wire order.

It names tensors and compares lists; it cuts no buckets and moves no bytes. Both ends hold tensors of their own and must
agree on the list before the first byte is sent.
"""

from collections.abc import Mapping, Sequence

import torch

from rl.core.errors import WeightSyncError
from rl.weights.refit_library import WIRE_DTYPES, WIRE_NAMES
from rl.weights.transport import TensorSpec

_ITEM_BYTES = {name: dtype.itemsize for name, dtype in zip(WIRE_NAMES, WIRE_DTYPES, strict=True)}
_CASTABLE = (torch.float32, torch.bfloat16, torch.float16)


def wire_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a tensor travels: `dtype` for floating-point ones where it is given.

    Numbers of 8 bits have scales beside them and travel as they are.
    """
    is_cast = dtype is not None and tensor.is_floating_point() and tensor.dtype.itemsize > 1
    return dtype if dtype is not None and is_cast else tensor.dtype


def manifest_of(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> tuple[TensorSpec, ...]:
    """Return the manifest of named tensors, in the order of the mapping; floating-point ones travel as `dtype`.

    Raises:
        WeightSyncError: a dtype that the wire does not carry, or a tensor without data; names the tensor.
    """
    return tuple(spec_of(name, tensor, tuple(tensor.shape), dtype) for name, tensor in tensors.items())


def spec_of(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype | None) -> TensorSpec:
    """Return how one tensor travels.

    Args:
        name: Of the tensor.
        tensor: Itself, or a part of it.
        shape: Of the whole.
        dtype: As for `wire_dtype`.

    Raises:
        WeightSyncError: see `manifest_of`.
    """
    if tensor.is_meta:
        raise WeightSyncError(f"tensor '{name}' {list(shape)} is on the device meta and has no data; load it first")
    spec = TensorSpec(name, str(wire_dtype(tensor, dtype)).removeprefix("torch."), shape)
    num_bytes(spec)
    return spec


def num_bytes(spec: TensorSpec) -> int:
    """Return the bytes of one tensor on the wire.

    Raises:
        WeightSyncError: its dtype is not one that the wire carries.
    """
    if spec.dtype not in _ITEM_BYTES:
        raise WeightSyncError(f"tensor '{spec.name}' has dtype {spec.dtype}; a refit carries {', '.join(_ITEM_BYTES)}")
    size = _ITEM_BYTES[spec.dtype]
    for extent in spec.shape:
        size *= extent
    return size


def torch_dtype(spec: TensorSpec) -> torch.dtype:
    """Return the torch dtype of a tensor of a manifest that passed `num_bytes`."""
    dtype = vars(torch)[spec.dtype]
    assert isinstance(dtype, torch.dtype)
    return dtype


def is_castable(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a refit turns one dtype into another on the way: equal ones, and float32, bfloat16 and float16."""
    return source == target or (source in _CASTABLE and target in _CASTABLE)


def first_difference(expected: Sequence[TensorSpec], actual: Sequence[TensorSpec]) -> str | None:
    """Describe the first tensor in which two manifests differ; None when they are equal."""
    for position, (left, right) in enumerate(zip(expected, actual, strict=False)):
        if left != right:
            return f"tensor {position}: expected {_describe(left)}, got {_describe(right)}"
    if len(expected) > len(actual):
        return f"tensor {len(actual)}: expected {_describe(expected[len(actual)])}, got none"
    if len(actual) > len(expected):
        return f"tensor {len(expected)}: expected none, got {_describe(actual[len(expected)])}"
    return None


def _describe(spec: TensorSpec) -> str:
    return f"'{spec.name}' {spec.dtype}{list(spec.shape)}"
