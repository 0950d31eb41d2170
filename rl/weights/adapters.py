"""Low-rank adapters in a refit: merged into the weights that they adapt, or sent alone.

    W' = W + scale * B A        in float32, then cast to the wire dtype once

Merged, the generator needs to know nothing of adapters. Alone, only A and B travel, as an ordinary source over the
adapters' own tensors, and the generator's base weights are never written: see `split_adapters`.
"""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from rl.core.errors import WeightSyncError
from rl.weights.manifest import torch_dtype
from rl.weights.source import WeightSource, check_agreed
from rl.weights.transport import TensorSpec

T = TypeVar("T")
_ADAPTER_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(\.(?P<adapter>[^.]+))?\.weight")
_WRAPPER = "base_model.model."


@dataclass(frozen=True)
class Adapter:
    """The adapter of one weight [out, in].

    Attributes:
        a: Name of A [r, in].
        b: Name of B [out, r].
        scale: alpha / r.
    """

    a: str
    b: str
    scale: float


class MergedSource:
    """The tensors of `base`, each with its adapter added.

    Args:
        base: The frozen weights in their own dtypes: casting them before the sum would round twice.
        adapters: A and B of every pair.
        pairs: By name of the weight.
        dtype: Of floating-point tensors on the wire; None = each its own.
    """

    def __init__(
        self,
        base: WeightSource,
        adapters: WeightSource,
        pairs: Mapping[str, Adapter],
        dtype: torch.dtype | None = None,
    ) -> None:
        self._base = base
        self._adapters = adapters
        self._pairs = pairs
        self._dtype = dtype
        self._manifest: tuple[TensorSpec, ...] = ()
        self._factors: dict[int, tuple[int, int, float]] = {}

    @property
    def is_sharded(self) -> bool:
        """Whether either part is."""
        return self._base.is_sharded or self._adapters.is_sharded

    @property
    def holds_tensors(self) -> bool:
        """False: a merged tensor is a new one."""
        return False

    def manifest(self) -> tuple[TensorSpec, ...]:
        """Return the base's tensors in their wire dtype.

        Raises:
            WeightSyncError: an adapter that fits no weight, or a tensor that is no part of a pair; names it.
        """
        base, factors = self._base.manifest(), self._adapters.manifest()
        self._factors = _factors(base, factors, self._pairs)
        self._manifest = tuple(TensorSpec(spec.name, self._wire(spec), spec.shape) for spec in base)
        return self._manifest

    def connect(self, name: str, timeout_s: float) -> None:
        """Meet the other ranks for each part by itself; see `WeightSource.connect`."""
        deadline = time.monotonic() + timeout_s
        self._base.connect(f"{name}-base", timeout_s)
        self._adapters.connect(f"{name}-adapters", max(0.0, deadline - time.monotonic()))

    def begin(self, timeout_s: float) -> None:
        """Begin with both parts; see `WeightSource.begin`."""
        check_agreed(self._manifest or None, self._manifest)
        self._base.begin(timeout_s)
        self._adapters.begin(timeout_s)

    def agree(self, is_well: bool) -> bool:
        """Return whether all ranks are well."""
        return (self._base if self._base.is_sharded else self._adapters).agree(is_well)

    def tensors(self, indices: Sequence[int], root: int | None = None) -> list[Tensor]:
        """Return merged tensors in their wire dtype, and the others as the base has them."""
        adapted = [index for index in indices if index in self._factors]
        wanted = [factor for index in adapted for factor in self._factors[index][:2]]
        tensors = self._base.tensors(indices, root)
        factors = self._adapters.tensors(wanted, root) if wanted else []
        if not tensors or (wanted and not factors):
            return []
        sides = dict(zip(adapted, zip(factors[::2], factors[1::2], strict=True), strict=True))
        return [
            self._merged(index, tensor, *sides[index]) if index in sides else tensor
            for index, tensor in zip(indices, tensors, strict=True)
        ]

    def end(self) -> None:
        """Forget the tensors."""
        self._base.end()
        self._adapters.end()

    def leave(self) -> None:
        """Leave the other ranks."""
        self._base.leave()
        self._adapters.leave()

    def _merged(self, index: int, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        merged = torch.addmm(weight.float(), b.float(), a.float(), alpha=self._factors[index][2])
        return merged.to(torch_dtype(self._manifest[index]))

    def _wire(self, spec: TensorSpec) -> str:
        own = torch_dtype(spec)
        is_cast = self._dtype is not None and own.is_floating_point and own.itemsize > 1
        return str(self._dtype).removeprefix("torch.") if is_cast else spec.dtype


def split_adapters(named: Mapping[str, T], scale: float) -> tuple[dict[str, T], dict[str, T], dict[str, Adapter]]:
    """Split a model wrapped with low-rank adapters into checkpoint names and adapters.

    Args:
        named: By the wrapped model's names: `x.base_layer.weight`, `x.lora_A.<adapter>.weight`, and others, with or
            without the wrapper's prefix.
        scale: alpha / r of all adapters.

    Returns:
        The base under the names of the checkpoint; the adapters under `x.lora_A.weight` and `x.lora_B.weight`; the
        pairs, by name of the adapted weight.

    Raises:
        WeightSyncError: half a pair, or two adapters of one weight; names them.
    """
    base: dict[str, T] = {}
    adapters: dict[str, T] = {}
    for name, value in named.items():
        plain = name.removeprefix(_WRAPPER)
        match = _ADAPTER_NAME.fullmatch(plain)
        if match is None:
            base[plain.replace(".base_layer.", ".")] = value
            continue
        key = f"{match['module']}.lora_{match['side']}.weight"
        if key in adapters:
            raise WeightSyncError(f"'{name}' is a second adapter of {match['module']}; a refit carries one")
        adapters[key] = value
    modules = {key.rsplit(".lora_", 1)[0] for key in adapters}
    halves = sorted(module for module in modules for side in "AB" if f"{module}.lora_{side}.weight" not in adapters)
    if halves:
        raise WeightSyncError(f"the adapter of '{halves[0]}' has only one of lora_A and lora_B")
    pairs = {
        f"{module}.weight": Adapter(f"{module}.lora_A.weight", f"{module}.lora_B.weight", scale)
        for module in sorted(modules)
    }
    return base, adapters, pairs


def _factors(
    base: Sequence[TensorSpec], factors: Sequence[TensorSpec], pairs: Mapping[str, Adapter]
) -> dict[int, tuple[int, int, float]]:
    """Positions of A and B and the scale, by position of the weight; everything must fit and nothing be left over."""
    weights = {spec.name: index for index, spec in enumerate(base)}
    places = {spec.name: index for index, spec in enumerate(factors)}
    found: dict[int, tuple[int, int, float]] = {}
    for name, pair in pairs.items():
        missing = [part for part, known in ((name, weights), (pair.a, places), (pair.b, places)) if part not in known]
        if missing:
            raise WeightSyncError(f"the adapter of '{name}' lacks '{missing[0]}'")
        shape = base[weights[name]].shape
        a, b = factors[places[pair.a]].shape, factors[places[pair.b]].shape
        if len(a) != 2 or len(b) != 2 or shape != (b[0], a[1]) or a[0] != b[1]:
            raise WeightSyncError(f"the adapter of '{name}' {list(shape)} has B {list(b)} and A {list(a)}")
        found[weights[name]] = (places[pair.a], places[pair.b], pair.scale)
    used = {place for a_place, b_place, _ in found.values() for place in (a_place, b_place)}
    unused = [spec.name for index, spec in enumerate(factors) if index not in used]
    if unused:
        raise WeightSyncError(f"the adapter tensor '{unused[0]}' belongs to no pair; it would be skipped")
    return found
