"""Where the tensors of a refit come from: what a sender asks, and the source whose tensors lie in this process.

A source knows names and layouts and moves nothing over the wire. Sources that gather, merge or slice are in
`rl.weights.shards`, `rl.weights.adapters` and `rl.weights.layout`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from rl.core.errors import WeightSyncError
from rl.weights.manifest import first_difference, manifest_of
from rl.weights.transport import TensorSpec


class WeightSource(Protocol):
    """Full tensors in the order of a manifest; every trainer rank has one, and they move in lockstep.

    `connect` is called once for a set of links. One refit is `begin`, `tensors` for the whole plan, in its order, and
    `end`; the weights do not change in between.
    """

    @property
    def is_sharded(self) -> bool:
        """Whether `tensors` is a collective: then all ranks go through the plan together and agree before each step."""
        ...

    @property
    def holds_tensors(self) -> bool:
        """Whether `tensors` costs no memory, so that all may be asked for at once; known after `begin`."""
        ...

    def manifest(self) -> tuple[TensorSpec, ...]:
        """Return the tensors in wire order, each in its wire dtype; the same on every rank, tied weights once."""
        ...

    def connect(self, name: str, timeout_s: float) -> None:
        """Meet the other ranks, if there are any, for the refits over a new set of links.

        Args:
            name: Of the links; the same on every rank, and never used before.
            timeout_s: In which all must be there.

        Raises:
            WeightSyncError: they are not.
        """
        ...

    def begin(self, timeout_s: float) -> None:
        """Begin a refit with the weights as they are now; no collective of it waits longer than `timeout_s`.

        Raises:
            WeightSyncError: the tensors are no longer those of the manifest; names the first that differs.
        """
        ...

    def agree(self, is_well: bool) -> bool:
        """Return whether all ranks are well; a collective where the source is sharded.

        Raises:
            WeightSyncError: a rank is gone, or did not answer in time.
        """
        ...

    def tensors(self, indices: Sequence[int], root: int | None = None) -> list[Tensor]:
        """Return these tensors of the manifest whole and contiguous; a collective where the source is sharded.

        A floating-point tensor may have another floating-point dtype than on the wire; whoever packs casts.

        Args:
            indices: Into the manifest.
            root: The only rank that needs them, others may return an empty list; None = all need them.

        Raises:
            WeightSyncError: a rank is gone, or did not answer in time.
        """
        ...

    def end(self) -> None:
        """Forget what the refit needed; idempotent, also after a failure."""
        ...

    def leave(self) -> None:
        """Leave the other ranks, so that none waits for this one, until the next `connect`; idempotent."""
        ...


class LocalSource:
    """Tensors of this process, whole.

    Args:
        named_tensors: Called at every refit; a tied weight travels once, under its first name.
        dtype: Of floating-point tensors on the wire; None = each its own.
    """

    def __init__(self, named_tensors: Callable[[], Mapping[str, Tensor]], dtype: torch.dtype | None = None) -> None:
        self._named_tensors = named_tensors
        self._dtype = dtype
        self._agreed: tuple[TensorSpec, ...] | None = None
        self._tensors: list[Tensor] = []

    @property
    def is_sharded(self) -> bool:
        """False: each rank has everything."""
        return False

    @property
    def holds_tensors(self) -> bool:
        """Whether every tensor can be sent as it lies."""
        return all(tensor.is_contiguous() for tensor in self._tensors)

    def manifest(self) -> tuple[TensorSpec, ...]:
        """Return the tensors in wire order."""
        self._agreed = manifest_of(without_ties(self._named_tensors()), self._dtype)
        return self._agreed

    def connect(self, name: str, timeout_s: float) -> None:
        """Meet nobody."""

    def begin(self, timeout_s: float) -> None:
        """Take the tensors as they are now; see `WeightSource.begin`."""
        tensors = without_ties(self._named_tensors())
        check_agreed(self._agreed, manifest_of(tensors, self._dtype))
        self._tensors = [tensor.detach() for tensor in tensors.values()]

    def agree(self, is_well: bool) -> bool:
        """Return what this rank says."""
        return is_well

    def tensors(self, indices: Sequence[int], root: int | None = None) -> list[Tensor]:
        """Return tensors as they lie; one that is not contiguous is copied."""
        return [self._tensors[index].contiguous() for index in indices]

    def end(self) -> None:
        """Forget the tensors."""
        self._tensors = []

    def leave(self) -> None:
        """Leave nobody."""


def without_ties(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the mapping without later names of the same memory."""
    found: dict[object, str] = {}
    for name, tensor in named.items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else name
        found.setdefault(place, name)
    return {name: named[name] for name in found.values()}


def check_agreed(agreed: Sequence[TensorSpec] | None, actual: Sequence[TensorSpec]) -> None:
    """Compare what a source has with the manifest that it gave.

    Raises:
        WeightSyncError: it gave none, or a tensor differs; names the first.
    """
    if agreed is None:
        raise WeightSyncError("a refit began before the manifest of its source was asked for")
    difference = first_difference(agreed, actual)
    if difference is not None:
        raise WeightSyncError(f"the trainer's tensors are not those that were agreed: {difference}")
