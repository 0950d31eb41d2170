"""Adapters of some layers of a model, and the refit source that merges them into it.

adapted = Adapted(trainer.model, [Q_PROJ], rank=4)
adapted.train(seed=1)           # A and B get values; the model itself is never touched
adapted.source()                # sends W + scale * B A
with adapted.merged(): ...      # the model computes as the generators should
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rl.weights.adapters import MergedSource, split_adapters
from rl.weights.native import digests_of
from rl.weights.source import LocalSource

SCALE = 2.0


class Adapted:
    """A frozen model with adapters beside it.

    Args:
        model: Of the trainer.
        names: Weights that have an adapter.
        rank: Of the adapters.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], rank: int = 4) -> None:
        self.base = {name: parameter.detach() for name, parameter in model.named_parameters()}
        self.names = tuple(names)
        self.adapters: dict[str, Tensor] = {}
        for name in names:
            module = name.removesuffix(".weight")
            rows, width = self.base[name].shape
            self.adapters[f"{module}.lora_A.default.weight"] = torch.zeros(rank, width)
            self.adapters[f"{module}.lora_B.default.weight"] = torch.zeros(rows, rank)

    def train(self, seed: int) -> None:
        """Give A and B other values; seed 0 makes every B zero, as at the start of a training."""
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in self.adapters.items():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
            if seed == 0 and ".lora_B." in name:
                tensor.zero_()

    def source(self) -> MergedSource:
        """What sends the sums."""
        base, adapters, pairs = split_adapters({**self.base, **self.adapters}, SCALE)
        return MergedSource(LocalSource(lambda: base), LocalSource(lambda: adapters), pairs)

    def wholes(self) -> dict[str, Tensor]:
        """The weights that generators should have, computed on their own."""
        found = dict(self.base)
        for name in self.names:
            module = name.removesuffix(".weight")
            a, b = (self.adapters[f"{module}.lora_{side}.default.weight"] for side in "AB")
            found[name] = torch.addmm(self.base[name], b, a, alpha=SCALE)
        return found

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Let the model compute with the sums for the block."""
        saved = {name: self.base[name].clone() for name in self.names}
        for name, whole in self.wholes().items():
            self.base[name].copy_(whole)
        try:
            yield
        finally:
            for name, tensor in saved.items():
                self.base[name].copy_(tensor)

    def digests(self) -> bytes:
        """Of the model's own weights."""
        return digests_of(list(self.base.values()))
