"""Faults that a test can plant in a real generator worker, to see what a refit says about them.

A fault is planted by name and stays until `heal`; the worker is the product's own (`rl.generation.hf`), in a process of
its own. What a fault does stands beside its name in `_PLANTS`.
"""

import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from rl.cluster.worker_group import WorkerContext
from rl.generation.config import HfGenerationConfig
from rl.generation.generator import GeneratorRequest
from rl.generation.hf import HfWorker
from rl.weights.receiver import InPlace
from rl.weights.transport import RefitStart, TensorSpec, TransferInfo

# Longer than any deadline of a test, and still an end.
STALL_S = 30.0
STALE = "model.layers.1.mlp.down_proj.weight"
SWAPPED = ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight")
TRUNCATED = "model.layers.1.mlp.up_proj.weight"
WRONG_DTYPE = "model.norm.weight"
DEADLY = "model.layers.1.self_attn.q_proj.weight"


class _Astray(InPlace):
    """Leads one tensor into memory that nobody reads."""

    def __init__(self, targets: Mapping[str, Tensor], lost: str) -> None:
        super().__init__(targets)
        self._lost = lost

    def destination(self, spec: TensorSpec, slot: Tensor | None) -> Tensor:
        right = super().destination(spec, slot)
        return torch.empty_like(right) if spec.name == self._lost else right

    def deliver(self, tensors: list[tuple[str, Tensor]]) -> None:
        super().deliver([(name, tensor) for name, tensor in tensors if name != self._lost])


class _Deadly(InPlace):
    """Ends or stops the process when one tensor of many has arrived: others are loaded, or on their way."""

    def __init__(self, targets: Mapping[str, Tensor], number: signal.Signals) -> None:
        super().__init__(targets)
        self._number = number

    def prepare(self, manifest: Sequence[TensorSpec], memory: torch.device) -> bool:
        super().prepare(manifest, memory)
        return False  # bucket by bucket

    def deliver(self, tensors: list[tuple[str, Tensor]]) -> None:
        super().deliver(tensors)
        if any(name == DEADLY for name, _ in tensors):
            os.kill(os.getpid(), self._number)


class FaultyHfWorker(HfWorker):
    """The product's worker with switches."""

    def __init__(self, context: WorkerContext, config: HfGenerationConfig, request: GeneratorRequest) -> None:
        super().__init__(context, config, request)
        self._fault = ""
        self._stall = threading.Event()
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def plant(self, fault: str) -> None:
        """Switch a fault on."""
        self._fault = fault
        plant = _PLANTS.get(fault)
        if plant is not None:
            plant(self)

    def heal(self) -> None:
        """Switch every fault off; what it has broken is whole after the next refit."""
        self._fault = ""
        self._stall.set()
        self._stall = threading.Event()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.use_sink(InPlace(self._parameters))

    def use_sink(self, sink: InPlace) -> None:
        """Load through another sink; it stands for links made after it, and for those that are open."""
        receiver = self._receiver
        receiver._sink = sink
        if receiver._native is not None:
            receiver._all_direct = sink.prepare(receiver.manifest, receiver._memory)

    def scale_logits(self, temperature: float) -> None:
        """Compute at another temperature."""
        self._hooks.append(self._model.lm_head.register_forward_hook(lambda module, inputs, out: out / temperature))

    def pid(self) -> int:
        """Number of the process."""
        return os.getpid()

    def resources(self) -> dict[str, int]:
        """What a leak would show in: descriptors, resident bytes, segments that are mapped."""
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
        with open("/proc/self/maps") as file:
            segments = sum("/dev/shm/" in line and "-refit-" in line for line in file)
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "bytes": pages * os.sysconf("SC_PAGE_SIZE"),
            "segments": segments,
        }

    def is_paused(self) -> bool:
        """Whether nothing is sampled."""
        return self._batches.is_paused

    def spoil(self, name: str) -> None:
        """Change a weight behind the back of every digest."""
        with torch.no_grad():
            self._parameters[name].mul_(1.5)

    def parameter(self, name: str) -> Tensor:
        """One weight as the model has it."""
        return self._parameters[name].detach().clone()

    def init_transfer(self, info: TransferInfo, first_reader: int) -> None:
        """A late joiner comes when nobody waits any more."""
        if self._fault == "late joiner":
            self._stall.wait(STALL_S)
        super().init_transfer(info, first_reader)

    def start_update(self, start: RefitStart) -> None:
        """One fault refuses here."""
        if self._fault == "raises":
            raise RuntimeError("the engine cannot be paused any longer")
        super().start_update(start)

    def update(self) -> None:
        """Some faults happen while bytes arrive."""
        if self._fault == "dead receiver":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fault == "slow receiver":
            self._stall.wait(STALL_S)
        super().update()
        if self._fault == "truncated bucket":
            with torch.no_grad():
                self._parameters[TRUNCATED].view(-1)[-7:] = 0.0


def _stale(worker: FaultyHfWorker) -> None:
    worker.use_sink(_Astray(worker._parameters, STALE))


def _swapped(worker: FaultyHfWorker) -> None:
    first, second = SWAPPED
    targets = dict(worker._parameters)
    targets[first], targets[second] = targets[second], targets[first]
    worker.use_sink(InPlace(targets))


def _transposed(worker: FaultyHfWorker) -> None:
    name = square_tensor(worker._parameters)
    worker.use_sink(InPlace({**worker._parameters, name: worker._parameters[name].t()}))


def _wrong_dtype(worker: FaultyHfWorker) -> None:
    right = worker._parameters[WRONG_DTYPE]
    # Of links made from now on: dtypes are compared when an end joins.
    worker._receiver._sink = InPlace({**worker._parameters, WRONG_DTYPE: torch.zeros_like(right, dtype=torch.int32)})


def square_tensor(parameters: Mapping[str, Tensor]) -> str:
    """The first weight that a transposed view fits."""
    return next(name for name, one in parameters.items() if one.dim() == 2 and one.shape[0] == one.shape[1])


_PLANTS: Mapping[str, Callable[[FaultyHfWorker], None]] = {
    "stale layer": _stale,  # one tensor's bytes never reach the model
    "swapped names": _swapped,  # two tensors of one shape in each other's place
    "transposed view": _transposed,  # a square tensor through a view with its axes exchanged
    "wrong dtype": _wrong_dtype,  # the engine's tensor is of integers
    "dies midway": lambda worker: worker.use_sink(_Deadly(worker._parameters, signal.SIGKILL)),
    "stops midway": lambda worker: worker.use_sink(_Deadly(worker._parameters, signal.SIGSTOP)),
    "temperature": lambda worker: worker.scale_logits(0.7),  # logits divided once too often
}


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns of a table in plain text; the first row is its head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
