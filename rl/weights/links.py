"""From what the driver decided to what a native end needs: options of a link, and which memory it reads and writes.

It opens nothing. Paths of libraries are found on the host of each end, so that they need not be the same everywhere.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from rl.core.native import library_candidates
from rl.weights.native import LinkOptions
from rl.weights.transport import LinkSettings, TransportName

# By soname: whoever has torch for GPUs in the process has it loaded.
_NCCL_LIBRARY = "libnccl.so.2"
_CUDA_LIBRARY = "libtandem_cuda.so"
# Any address that is not of this host tells which network leads outside; nothing is sent to these two.
_OUTSIDE = ((socket.AF_INET, ("192.0.2.1", 9)), (socket.AF_INET6, ("2001:db8::1", 9)))


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


def own_address() -> str:
    """Return this host's address on the network that leads outside, or the loopback's where none does."""
    for family, outside in _OUTSIDE:
        # No such network, or not even its protocol: the next.
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(outside)  # a datagram socket: nothing is sent
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def check_own_host(host: str) -> None:
    """Refuse an address at which no process of this host can listen.

    Raises:
        OSError: it is another host's, or a name that is not known.
        UnicodeError: it is no name.
    """
    failure: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except OSError as error:
            failure = error
        else:
            return
    if failure is not None:
        raise failure


def _cuda_library() -> str:
    candidates = library_candidates(_CUDA_LIBRARY)
    return str(next((path for path in candidates if path.is_file()), candidates[-1]))
