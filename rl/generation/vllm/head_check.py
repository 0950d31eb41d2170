"""Tell whether an output layer computes with the weights that it shows, when it may keep a packed copy of them.

A product with a unit vector is a column of the weights, without any rounding: every other term is zero. So equality is
exact, and a change of the last bit of one weight in a probed column is seen. One optimizer step changes all columns.
"""

from collections.abc import Callable

import torch
from torch import Tensor

NUM_COLUMNS = 16


def largest_difference(weight: Tensor, product: Callable[[Tensor], Tensor], shift: int) -> float:
    """Return the largest absolute difference between probed columns and what the layer makes of unit vectors.

    Args:
        weight: [V, D] floating point.
        product: The layer: [N, D] to [N, V].
        shift: Moves the probed columns, so that several calls see different ones.

    Returns:
        0.0 when both are equal; numbers too small to be normal count as zero, as some kernels take them.
    """
    width = weight.shape[1]
    count = min(NUM_COLUMNS, width)
    columns = (torch.arange(count, device=weight.device) * width // count + shift) % width
    probe = torch.zeros(count, width, dtype=weight.dtype, device=weight.device)
    probe[torch.arange(count), columns] = 1
    gap = (product(probe).float() - weight[:, columns].t().float()).abs().max().item()
    return gap if not gap <= torch.finfo(weight.dtype).tiny else 0.0
