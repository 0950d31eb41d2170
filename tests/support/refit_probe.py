"""Faults that an engine test can switch on inside vLLM's worker processes, by collective_rpc.

vLLM mixes the class into its workers (`worker_extension_cls`); importing it registers the weight transfer too.
"""

import os
import signal
from typing import Any, Literal

import torch

from rl.core.errors import WeightSyncError
from rl.generation.vllm.extension import RefitExtension
from rl.generation.vllm.receiver import TandemWeightEngine

LoadFault = Literal["none", "raise", "kill", "stop", "transpose", "drop"]


class RefitProbe(RefitExtension):
    """Switches."""

    weight_transfer_engine: TandemWeightEngine
    rank: int

    def probe_packing(self, enabled: bool, checked: bool) -> None:
        """Pack tied output layers at the end of a refit or not; compare them with their weights or not."""
        reload: Any = self.weight_transfer_engine.reload
        kind = type(reload)
        reload.pack_heads = kind.pack_heads.__get__(reload) if enabled else lambda heads: None
        reload.check_heads = kind.check_heads.__get__(reload) if checked else lambda: None

    def probe_load(self, rank: int, name: str, fault: LoadFault, times: int) -> None:
        """Let a fault happen on one rank when the tensor `name` is about to be loaded, `times` times."""
        engine: Any = self.weight_transfer_engine
        if self.rank == rank:
            engine._load = TandemWeightEngine._load.__get__(engine)
            if fault != "none":
                engine._load = _Faulty(engine._load, name, fault, times)


class _Faulty:
    def __init__(self, load: Any, name: str, fault: LoadFault, times: int) -> None:
        self.load = load
        self.name = name
        self.fault = fault
        self.left = times

    def __call__(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        meant = any(name == self.name for name, _ in tensors)
        if meant and self.left > 0:
            self.left -= 1
            tensors = self.strike(tensors)
        self.load(tensors)

    def strike(self, tensors: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        if self.fault == "raise":
            raise WeightSyncError(f"planted: '{self.name}' is refused")
        if self.fault in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if self.fault == "kill" else signal.SIGSTOP)
        if self.fault == "drop":
            return [(name, tensor) for name, tensor in tensors if name != self.name]
        return [(name, _transposed(tensor) if name == self.name else tensor) for name, tensor in tensors]


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers in the order of the transposed matrix."""
    return tensor.t().contiguous().reshape(tensor.shape)
