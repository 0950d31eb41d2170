"""From what the driver decided to what a native end needs: options of a link, and which memory it reads and writes.

It opens nothing. Paths of libraries are found on the host of each end, so that they need not be the same everywhere.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rl.core.native import library_candidates
from rl.weights.native import LinkOptions
from rl.weights.transport import LinkSettings, TransportName

# By soname: whoever has torch for GPUs in the process has it loaded.
_NCCL_LIBRARY = "libnccl.so.2"
_CUDA_LIBRARY = "libtandem_cuda.so"


def link_options(
    transport: TransportName, num_slots: int, num_readers: int, device: torch.device, settings: LinkSettings
) -> LinkOptions:
    """Return the options of a native end on this host.

    Args:
        transport: Backend.
        num_slots: Buckets under way at once.
        num_readers: Readers of every root.
        device: Where the weights of this process lie.
        settings: What the driver says beside.
    """
    is_nccl = transport == "nccl"
    return LinkOptions(
        transport=transport,
        num_slots=num_slots,
        num_readers=num_readers,
        digests=settings.digests,
        silence_s=settings.silence_s,
        host=settings.host,
        nccl_library=(settings.nccl_library or _NCCL_LIBRARY) if is_nccl else "",
        device_library=(settings.device_library or _cuda_library()) if is_nccl else "",
        nccl_dialect=settings.nccl_dialect,
        device=device.index or 0,
    )


def memory_of(transport: TransportName, device: torch.device) -> torch.device:
    """Return where tensors must lie for a transport: on the device for nccl, else in host memory."""
    return device if transport == "nccl" else torch.device("cpu")


@contextmanager
def on_default_stream(memory: torch.device) -> Iterator[None]:
    """Let torch work on the device's default stream, as its only one that native ends are ordered with (device_ops.h).

    An engine may have set another one: without this it would read a bucket before it is unpacked, or free its memory
    while it is. Whoever waits for the streams, it is never the host.

    Args:
        memory: Where the tensors of a transfer lie.
    """
    if memory.type != "cuda":
        yield
        return
    engines, default = torch.cuda.current_stream(memory), torch.cuda.default_stream(memory)
    default.wait_stream(engines)
    try:
        with torch.cuda.stream(default):
            yield
    finally:
        engines.wait_stream(default)


def _cuda_library() -> str:
    candidates = library_candidates(_CUDA_LIBRARY)
    return str(next((path for path in candidates if path.is_file()), candidates[-1]))
