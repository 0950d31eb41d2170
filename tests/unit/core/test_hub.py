"""The short probe of the hub."""

import socket
import threading
import time

from rl.core import hub
from rl.core.hub import is_hub_reachable


def test_a_listening_endpoint_is_reachable_and_a_closed_one_is_not(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert is_hub_reachable(timeout_s=2.0)
    assert not is_hub_reachable(timeout_s=2.0)


def test_a_name_that_never_resolves_does_not_outlast_the_probe(monkeypatch):
    never = threading.Event()

    def hang(*_, **__):
        never.wait(60)
        raise OSError("no such host")

    monkeypatch.setattr(hub.socket, "create_connection", hang)
    start = time.monotonic()
    assert not is_hub_reachable(0.1)
    assert time.monotonic() - start < 5
    never.set()
