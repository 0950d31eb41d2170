"""Parts of tensors for receivers that say what they store: an expert's owner, a tensor-parallel rank.

A source over another one whose manifest holds boxes instead of whole tensors. It cuts what the other source yields, so
a slice crosses the wire once and nothing that no receiver stores crosses it at all.
"""

from collections.abc import Sequence

from torch import Tensor

from rl.core.errors import WeightSyncError
from rl.weights.source import WeightSource
from rl.weights.transport import StoredTensor, TensorSpec


class SlicedSource:
    """The boxes of `layout`, cut out of `source`.

    Args:
        source: Whole tensors.
        layout: What the receivers store; tensors that it does not name are not sent.
    """

    def __init__(self, source: WeightSource, layout: Sequence[StoredTensor]) -> None:
        self._source = source
        self._layout = {stored.name: stored for stored in layout}
        self._chosen: list[tuple[int, StoredTensor]] = []
        self._is_cut = True

    @property
    def is_sharded(self) -> bool:
        """As the source."""
        return self._source.is_sharded

    @property
    def holds_tensors(self) -> bool:
        """Whether nothing is cut, nor copied by the source."""
        return not self._is_cut and self._source.holds_tensors

    def manifest(self) -> tuple[TensorSpec, ...]:
        """Return the boxes in the order of the source.

        Raises:
            WeightSyncError: a box of no tensor, or outside of it; names it.
        """
        specs = self._source.manifest()
        unknown = set(self._layout).difference(spec.name for spec in specs)
        if unknown:
            raise WeightSyncError(f"receivers store a part of '{min(unknown)}', which the trainer does not have")
        self._chosen = [
            (index, self._layout[spec.name]) for index, spec in enumerate(specs) if spec.name in self._layout
        ]
        for index, stored in self._chosen:
            _check(stored, specs[index])
        self._is_cut = any(stored.shape != specs[index].shape for index, stored in self._chosen)
        return tuple(TensorSpec(stored.name, specs[index].dtype, stored.shape) for index, stored in self._chosen)

    def connect(self, name: str, timeout_s: float) -> None:
        """See `WeightSource.connect`."""
        self._source.connect(name, timeout_s)

    def begin(self, timeout_s: float) -> None:
        """See `WeightSource.begin`."""
        self._source.begin(timeout_s)

    def agree(self, is_well: bool) -> bool:
        """See `WeightSource.agree`."""
        return self._source.agree(is_well)

    def tensors(self, indices: Sequence[int], root: int | None = None) -> list[Tensor]:
        """Return boxes, contiguous."""
        chosen = [self._chosen[index] for index in indices]
        whole = self._source.tensors([index for index, _ in chosen], root)
        return [_cut(tensor, stored) for tensor, (_, stored) in zip(whole, chosen, strict=bool(whole))]

    def end(self) -> None:
        """See `WeightSource.end`."""
        self._source.end()

    def leave(self) -> None:
        """See `WeightSource.leave`."""
        self._source.leave()


def _check(stored: StoredTensor, spec: TensorSpec) -> None:
    fits = len(stored.start) == len(stored.shape) == len(spec.shape) and all(
        start >= 0 and length >= 0 and start + length <= extent
        for start, length, extent in zip(stored.start, stored.shape, spec.shape, strict=True)
    )
    if not fits:
        raise WeightSyncError(
            f"receivers store the box of shape {list(stored.shape)} at {list(stored.start)} of '{spec.name}', "
            f"whose shape is {list(spec.shape)}"
        )


def _cut(tensor: Tensor, stored: StoredTensor) -> Tensor:
    for axis, (start, length) in enumerate(zip(stored.start, stored.shape, strict=True)):
        tensor = tensor.narrow(axis, start, length)
    return tensor.contiguous()
