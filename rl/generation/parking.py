"""Tensors whose memory is given up for a while: the host keeps what they held.

    parked = ParkedTensors(model.parameters())
    freed = parked.park()
    taken = parked.unpark()     # the same tensors with the same values

Tensors keep their identity, and so does all that shares their memory: names of tied weights, detached views. Between
the two calls nobody may read or write them. It does not decide which tensors are worth it.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


class ParkedTensors:
    """See above.

    Args:
        tensors: On a device, as a rule; whatever shares memory counts once.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = [tensor.untyped_storage() for tensor in tensors]
        self._storages = list({storage.data_ptr(): storage for storage in storages}.values())
        self._copies: list[Tensor] = []

    def park(self) -> int:
        """Give the memory up; return its bytes, 0 where it is given up already."""
        if self._copies:
            return 0
        # All copies first: where the host has no room for one, nothing has changed.
        copies = [_bytes_of(storage).to("cpu", copy=True) for storage in self._storages]
        for storage in self._storages:
            storage.resize_(0)
        self._copies = copies
        torch.cuda.empty_cache()  # to other processes; without a GPU it does nothing
        return sum(copy.nbytes for copy in copies)

    def unpark(self) -> int:
        """Take memory again and fill it; return its bytes, 0 where it was not given up."""
        if not self._copies:
            return 0
        for storage, copy in zip(self._storages, self._copies, strict=True):
            storage.resize_(copy.nbytes)
            _bytes_of(storage).copy_(copy)
        taken = sum(copy.nbytes for copy in self._copies)
        self._copies = []
        return taken


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
