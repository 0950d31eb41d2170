"""A refit over NCCL between two ranks on one GPU, where the library allows that; it usually refuses, and says so.

    outcome = nccl_pair(Libraries(nccl, device), device="cuda")
    # NcclPair(refused="", ok=True, gb_per_s=301.2) | NcclPair(refused="Duplicate GPU detected ...", ...)

The ranks are threads, whose calls run without the interpreter's lock. Nothing of NCCL is needed to import this.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata

import torch
from torch import Tensor

from rl.core.types import PolicyVersion
from rl.weights.faults import TransferError
from rl.weights.native import Finished, LinkOptions, NativeReceiver, NativeSender, Plan, nccl_unique_id
from rl.weights.transport import RefitStart, TensorSpec

_TIMEOUT_S = 30.0
_NUM_TENSORS = 4
_REFUSAL = "Duplicate GPU"  # NCCL's words for two ranks on one device


@dataclass(frozen=True)
class Libraries:
    """Paths of libnccl and of the library with the device's operations."""

    nccl: str
    device: str


@dataclass(frozen=True)
class NcclPair:
    """What came out.

    Attributes:
        refused: The library's own words where it refuses two ranks on one device, else "".
        ok: The bytes arrived and both ends have the same digests; False where it was refused.
        gb_per_s: Of the last refit, begin to end.
        error: What failed otherwise.
    """

    refused: str = ""
    ok: bool = False
    gb_per_s: float = 0.0
    error: str = ""

    def describe(self) -> str:
        """Return it as the line of a report."""
        if self.refused:
            return f"refused by the library: {self.refused}"
        return f"{self.gb_per_s:.1f} GB/s, equal" if self.ok else f"failed: {self.error}"


def installed_nccl() -> str:
    """Return the path of the installed wheel's libnccl, "" where there is none."""
    for wheel in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        try:
            files = metadata.files(wheel) or []
        except metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == "libnccl.so.2":
                return str(file.locate())
    return ""


def nccl_pair(libraries: Libraries, device: str, tensor_bytes: int = 64 << 20, num_refits: int = 3) -> NcclPair:
    """Send the same tensors `num_refits` times from one rank to another on the same device."""
    numel = tensor_bytes // 4
    plan = Plan.build([TensorSpec(f"t{i}", "float32", (numel,)) for i in range(_NUM_TENSORS)], 16 << 20)
    generator = torch.Generator().manual_seed(1)
    source = [torch.randn(numel, generator=generator).to(device) for _ in range(_NUM_TENSORS)]
    target = [torch.zeros_like(tensor) for tensor in source]
    try:
        options = LinkOptions(
            transport="nccl",
            num_slots=4,
            num_readers=1,
            nccl_library=libraries.nccl,
            device_library=libraries.device,
            unique_ids=(nccl_unique_id(libraries.nccl),),
        )
        seconds, equal_digests = _refits(plan, options, (source, target), num_refits)
    except TransferError as error:
        text = str(error)
        return NcclPair(refused=text) if _REFUSAL in text else NcclPair(error=text)
    arrived = all(torch.equal(one, other) for one, other in zip(source, target, strict=True))
    failure = "" if arrived and equal_digests else f"tensors equal: {arrived}, digests equal: {equal_digests}"
    return NcclPair(ok=not failure, gb_per_s=_NUM_TENSORS * numel * 4 / seconds / 1e9, error=failure)


def _refits(
    plan: Plan, options: LinkOptions, tensors: tuple[list[Tensor], list[Tensor]], num_refits: int
) -> tuple[float, bool]:
    """Return the seconds of the last refit, and whether the digests of all were equal."""
    source, target = tensors
    sender = NativeSender(plan, 0, "", options)
    try:
        receiver = NativeReceiver(plan, 0, [""], options)
        try:
            with ThreadPoolExecutor(2) as pool:
                joins = [pool.submit(end.join, _TIMEOUT_S) for end in (sender, receiver)]
                _raise_first(join.exception() for join in joins)
                equal = True
                for epoch in range(1, num_refits + 1):
                    start = RefitStart(epoch=epoch, version=PolicyVersion(epoch), timeout_s=_TIMEOUT_S)
                    received = pool.submit(_receive, receiver, plan, target, start)
                    sender.begin(start)
                    sender.send(0, _of_buckets(plan, source))
                    sent = sender.finish()
                    equal = equal and received.result().digests == sent.digests
                return sent.seconds["total"], equal
        finally:
            receiver.close()
    finally:
        sender.close()


def _raise_first(errors: Iterable[BaseException | None]) -> None:
    """Raise what says most: the library's refusal before a peer's complaint about the one that was refused."""
    found = [error for error in errors if error is not None]
    for error in sorted(found, key=lambda error: _REFUSAL not in str(error)):
        raise error


def _receive(receiver: NativeReceiver, plan: Plan, target: list[Tensor], start: RefitStart) -> Finished:
    receiver.begin(start)
    receiver.receive(0, _of_buckets(plan, target))
    return receiver.finish()


def _of_buckets(plan: Plan, tensors: list[Tensor]) -> list[list[Tensor]]:
    return [[tensors[piece.tensor] for piece in bucket.pieces] for bucket in plan.buckets]
