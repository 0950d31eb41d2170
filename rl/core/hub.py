"""Whether the model hub answers: a short probe, so that a machine without network does not wait for time-outs."""

import os
import socket
import threading
from urllib.parse import urlsplit

PROBE_TIMEOUT_S = 3.0


def is_hub_reachable(timeout_s: float = PROBE_TIMEOUT_S) -> bool:
    """Whether the hub (or HF_ENDPOINT) accepts a connection in time; name resolution is under the deadline too."""
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    address = (endpoint.hostname or "", endpoint.port or (80 if endpoint.scheme == "http" else 443))
    answered = threading.Event()

    def probe() -> None:
        try:
            socket.create_connection(address, timeout=timeout_s).close()
        except OSError:
            return
        answered.set()

    prober = threading.Thread(target=probe, daemon=True, name="hub-probe")
    prober.start()
    prober.join(timeout_s)
    return answered.is_set()
