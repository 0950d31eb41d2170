"""A few numbers of a weight matrix that every engine can give, also one that packs or splits it.

Bytes can be compared only where they can be read. What a linear layer answers to a fixed input shows its weight however
it is stored: y = W x, with a vector x of signs that depends on name and width alone. A signature is the first
`NUM_ROWS` numbers of y, their sum over all rows and their Euclidean norm; float64. It is a diagnosis, not a digest: two
weights that differ by less than the tolerance look the same.

    trainer:    signature_of(name, weight)
    engine:     numbers_of(layer(probe_vector(name, width)))
"""

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

NUM_ROWS = 8
# Rows of a matrix that are float64 at a time: a large embedding is never doubled as a whole.
_BLOCK_ELEMENTS = 1 << 22


def probe_vector(name: str, width: int) -> Tensor:
    """Return x of a tensor's name and the extent of its last axis, [width] float64 of -1 and 1."""
    generator = torch.Generator("cpu").manual_seed(zlib.crc32(f"{name}:{width}".encode()))
    return torch.randint(0, 2, (width,), generator=generator, device="cpu").to(torch.float64) * 2 - 1


def numbers_of(products: Tensor) -> tuple[float, ...]:
    """Return the signature of y = W x, [rows] of any floating-point dtype: the first rows, the sum, the norm."""
    y = products.detach().to("cpu", torch.float64).reshape(-1)
    return (*y[:NUM_ROWS].tolist(), float(y.sum()), float(y.norm()))


def signature_of(name: str, tensor: Tensor) -> tuple[float, ...]:
    """Return the signature of a whole tensor; more than two axes are rows of the last one, one axis is one row."""
    return numbers_of(products_of(name, tensor))


def products_of(name: str, tensor: Tensor) -> Tensor:
    """Return y = W x of a whole tensor, [rows] float64 on the CPU."""
    if tensor.numel() == 0:
        return torch.zeros(0, dtype=torch.float64)
    width = tensor.shape[-1] if tensor.dim() else 1
    x = probe_vector(name, width)
    rows = tensor.detach().reshape(-1, width)
    step = max(1, _BLOCK_ELEMENTS // width)
    parts = [rows[first : first + step] for first in range(0, rows.shape[0], step)]
    return torch.cat([part.to("cpu", torch.float64) @ x for part in parts])


def first_deviation(
    expected: Mapping[str, Sequence[float]], actual: Mapping[str, Sequence[float]], tolerance: float
) -> str | None:
    """Describe the first tensor, in the order of `expected`, whose signature is another; None when all agree.

    Args:
        expected: The trainer's.
        actual: An engine's; tensors that it lacks are skipped.
        tolerance: Relative to the root mean square of y, for a product of one row; 2e-5 suits float32, 2e-2 bfloat16.
    """
    for name, right in expected.items():
        left = actual.get(name)
        if left is not None and not _agree(right, left, tolerance):
            return f"'{name}': W x is {_shown(right)} at the trainer, {_shown(left)} at the generator"
    return None


def _agree(expected: Sequence[float], actual: Sequence[float], tolerance: float) -> bool:
    """The norm bounds every row; the sum of n rows is allowed the error of a random walk, which is the norm's too."""
    if len(expected) != len(actual):
        return False
    allowed = tolerance * max(expected[-1], 1e-30)
    return all(abs(left - right) <= allowed for left, right in zip(expected, actual, strict=True))


def _shown(numbers: Sequence[float]) -> str:
    return f"[{', '.join(f'{value:.6g}' for value in numbers[:3])}, ..., sum {numbers[-2]:.6g}]"
