"""The store through which the workers of one group find each other for collectives.

Rank 0's process serves it on a port that the system chooses at the moment of binding and never lets go of it, so no
other process can take the port in between. Workers connect as clients and hand the store to
`init_process_group(store=...)`.
"""

from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rl.cluster.worker_group import WorkerContext
from rl.core.errors import FatalError


def serve_store(host: str) -> tuple[TCPStore, str]:
    """Serve a store on this host.

    Args:
        host: Address by which other workers reach this one.

    Returns:
        The store, to be kept alive for as long as the group, and its `host:port` (an IPv6 host in brackets).
    """
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    shown = f"[{host}]" if ":" in host else host
    return store, f"{shown}:{store.port}"


def connect_store(context: WorkerContext, timeout_s: float) -> TCPStore:
    """Connect to the group's store; a worker's first step towards a process group.

    Raises:
        FatalError: the group has one worker only and therefore no store.
    """
    host, _, port = context.rendezvous.rpartition(":")
    if not host:
        raise FatalError(f"group {context.name} has one worker and no rendezvous; collectives need two")
    return TCPStore(host.strip("[]"), int(port), is_master=False, timeout=timedelta(seconds=timeout_s))
