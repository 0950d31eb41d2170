"""The refit on one GPU: unpacking and digests as tables; overlap, CUDA IPC and NCCL as rows.

    for row in transfer_rows():        # {"name": "overlap of pack and wire", "ok": True, "hidden": 0.97, ...}
        print(row)

What a second GPU or a second host would add is not seen here: NCCL refuses two ranks on one GPU unless its release
allows them, and then the row says so.
"""

import importlib.util
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as torch_multiprocessing
from torch import Tensor

from rl.ops.bucket_copy import BucketPlan, tensor_digests
from rl.weights.faults import TransferError
from rl.weights.native import LinkOptions, NativeReceiver, NativeSender, Plan, nccl_unique_id
from rl.weights.transport import RefitStart, TensorSpec
from tools.bench import limits
from tools.bench.rounds import OURS, Case, Contender

TIMEOUT_S = 30.0
_LOOP = "torch copy_ loop"
_SHAPES = ((4096, 4096), (16384, 4096), (4096,))
_REPEATS = 20
_REFITS = 5
# Of the shorter one of two works that run side by side; less than that is no overlap.
_LEAST_HIDDEN = 0.5


def unpack_case(device: torch.device, shapes: Sequence[tuple[int, ...]] = _SHAPES * 3) -> Case:
    """Return the table of a bfloat16 bucket that is unpacked into float32 parameters."""
    targets = [torch.empty(shape, device=device) for shape in shapes]
    sizes = [target.numel() for target in targets]
    buffer = torch.randn(sum(sizes), device=device).to(torch.bfloat16)
    plan = BucketPlan(list(buffer.split(sizes)), targets)

    def unpack() -> Sequence[Tensor]:
        plan.run()
        return targets

    def loop() -> Sequence[Tensor]:
        for source, target in zip(plan.sources, targets, strict=True):
            target.view(-1).copy_(source)
        return targets

    copied = limits.memcpy(plan.bytes_moved // 2, device)
    return Case(
        f"unpack bfloat16 to float32, {len(targets)} tensors, {plan.bytes_moved / 1e6:.0f} MB moved",
        [Contender(OURS, unpack), Contender(_LOOP, loop), copied],
        _LOOP,
        {"memory": {copied.name: 1.0}},
    )


def digest_case(device: torch.device, shapes: Sequence[tuple[int, ...]] = _SHAPES * 3) -> Case:
    """Return the table of the digests of a bucket's tensors; the limit reads them once."""
    tensors = [torch.randn(shape, device=device).to(torch.bfloat16) for shape in shapes]
    num_bytes = sum(tensor.nbytes for tensor in tensors)

    def digests() -> Sequence[Tensor]:
        return (tensor_digests(tensors).view(torch.int16),)  # floats hold these

    read = limits.read(num_bytes, device)
    title = f"digests of {len(tensors)} tensors, {num_bytes / 1e6:.0f} MB"
    return Case(title, [Contender(OURS, digests), read], OURS, {"memory": {read.name: 1.0}})


def transfer_rows() -> Iterator[dict[str, Any]]:
    """Try overlap, IPC and NCCL on the first GPU; yield a row for each, faults too."""
    parts: Mapping[str, Callable[[], dict[str, Any]]] = {
        "overlap of pack and wire": overlap_row,
        "CUDA IPC, two processes on one GPU": ipc_row,
        "NCCL, two ranks on one GPU": nccl_row,
    }
    for name, part in parts.items():
        try:
            yield {"name": name, **part()}
        except Exception as error:  # one part's fault must not hide the others' results
            yield {"name": name, "ok": False, "error": f"{type(error).__name__}: {error}"[:500]}


def hidden_share(first_s: float, second_s: float, together_s: float) -> float:
    """Return which share of the shorter work takes no time of its own beside the longer: 1 is full overlap."""
    return (first_s + second_s - together_s) / min(first_s, second_s)


def overlap_row() -> dict[str, Any]:
    """Pack a bucket on one stream while another one goes to the host on a second stream."""
    device = torch.device("cuda")
    sources = [torch.randn(shape, device=device) for shape in _SHAPES * 3]
    bucket = torch.empty(sum(source.numel() for source in sources), dtype=torch.bfloat16, device=device)
    plan = BucketPlan(sources, list(bucket.split([source.numel() for source in sources])))
    other = torch.empty_like(bucket)
    host = torch.empty_like(other, device="cpu", pin_memory=True)
    streams = (torch.cuda.Stream(), torch.cuda.Stream())

    def pack() -> None:
        with torch.cuda.stream(streams[0]):
            for _ in range(_REPEATS):
                plan.run()

    def wire() -> None:
        with torch.cuda.stream(streams[1]):
            host.copy_(other, non_blocking=True)

    def both() -> None:
        wire()
        pack()

    pack_s, wire_s, together_s = (min(_timed(work) for _ in range(5)) for work in (pack, wire, both))
    hidden = hidden_share(pack_s, wire_s, together_s)
    return {
        "ok": hidden >= _LEAST_HIDDEN,
        "hidden": round(hidden, 3),
        "pack_s": pack_s,
        "wire_s": wire_s,
        "together_s": together_s,
        "pack_gb_per_s": plan.bytes_moved * _REPEATS / pack_s / 1e9,
        "wire_gb_per_s": other.nbytes / wire_s / 1e9,
    }


def _timed(work: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def ipc_row() -> dict[str, Any]:
    """Let another process unpack a bucket straight out of this one's memory."""
    bucket = torch.randn(sum(torch.Size(shape).numel() for shape in _SHAPES), device="cuda").to(torch.bfloat16)
    context = torch_multiprocessing.get_context("spawn")
    given, answers = context.SimpleQueue(), context.Queue()
    reader = context.Process(target=_read_over_ipc, args=(given, answers), daemon=True)
    reader.start()
    try:
        given.put(bucket)
        digests, seconds = answers.get(timeout=TIMEOUT_S)
        expected = tensor_digests(list(bucket.split([torch.Size(shape).numel() for shape in _SHAPES]))).tolist()
        given.put(None)  # the reader has let go before the memory does
        reader.join(TIMEOUT_S)
    finally:
        if reader.is_alive():
            reader.kill()
    return {"ok": digests == expected, "seconds": seconds, "gb_per_s": bucket.nbytes / seconds / 1e9}


def _read_over_ipc(given: Any, answers: Any) -> None:
    bucket: Tensor = given.get()
    targets = [torch.empty(shape, dtype=torch.bfloat16, device=bucket.device) for shape in _SHAPES]
    plan = BucketPlan(list(bucket.split([target.numel() for target in targets])), targets)
    plan.run()
    seconds = min(_timed(plan.run) for _ in range(5))
    answers.put((tensor_digests(targets).tolist(), seconds))
    given.get()


def nccl_row() -> dict[str, Any]:
    """Refit over NCCL from one process to another; a library that takes no GPU twice is no fault."""
    return nccl_transfer(find_nccl(), str(Path(os.environ["RL_NATIVE_DIR"]) / "libtandem_cuda.so"), "cuda", _SHAPES)


def nccl_transfer(
    nccl_library: str, device_library: str, device: str, shapes: Sequence[tuple[int, ...]]
) -> dict[str, Any]:
    """Refit some tensors a few times between two ranks on one device; return the row."""
    plan = Plan.build([TensorSpec(f"t{i}", "bfloat16", shape) for i, shape in enumerate(shapes)], 1 << 24)
    unique_id = nccl_unique_id(nccl_library)
    options = LinkOptions("nccl", 4, 1, TIMEOUT_S, nccl_library=nccl_library, device_library=device_library)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        ends: list[Future[tuple[list[int], float]]] = [
            pool.submit(_nccl_end, rank, plan, unique_id, options, device) for rank in range(2)
        ]
        try:
            (sent, seconds), (arrived, _) = (end.result(4 * TIMEOUT_S) for end in ends)
        except TransferError as error:
            if not is_refusal(error):
                raise
            return {"ok": True, "note": f"not possible with this library: {error}"[:300]}
    return {"ok": sent == arrived, "seconds": seconds, "gb_per_s": plan.total_bytes / seconds / 1e9}


def is_refusal(error: TransferError) -> bool:
    """Say whether a library will not have these ranks, rather than failed with them: NCCL's word is invalid usage."""
    return error.kind == "unavailable" or "invalid usage" in str(error)


def _nccl_end(rank: int, plan: Plan, unique_id: str, options: LinkOptions, device: str) -> tuple[list[int], float]:
    torch.manual_seed(rank)
    tensors = [torch.randn(spec.shape, device=device).to(torch.bfloat16) for spec in plan.tensors]
    buckets = [[tensors[piece.tensor] for piece in bucket.pieces] for bucket in plan.buckets]
    end = NativeSender(plan, 0, unique_id, options) if rank == 0 else NativeReceiver(plan, 0, [unique_id], options)
    try:
        end.join(TIMEOUT_S)
        seconds = []
        for epoch in range(1, 1 + _REFITS):
            start = time.perf_counter()
            end.begin(RefitStart(epoch, epoch, TIMEOUT_S))
            if isinstance(end, NativeSender):
                end.send(0, buckets)
            else:
                end.receive(0, buckets)
            end.finish()
            seconds.append(time.perf_counter() - start)
    finally:
        end.close()
    return tensor_digests(tensors).tolist(), min(seconds)


def find_nccl() -> str:
    """Return the library that torch brings along, else the system's name of it."""
    spec = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
    for folder in spec.submodule_search_locations or [] if spec else []:
        library = Path(folder) / "lib" / "libnccl.so.2"
        if library.is_file():
            return str(library)
    return "libnccl.so.2"
