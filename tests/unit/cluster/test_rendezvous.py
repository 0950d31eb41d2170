"""The store of a group's collectives: no port is chosen before it is bound."""

import pytest

from rl.cluster.rendezvous import connect_store, serve_store
from rl.cluster.worker_group import WorkerContext
from rl.core.errors import FatalError


def context(rendezvous):
    """A context of the second of two workers."""
    return WorkerContext("policy", 1, 2, 1, rendezvous, "cpu", 1, "tdm-00000000")


def test_stores_served_at_once_have_ports_of_their_own():
    served = [serve_store("127.0.0.1") for _ in range(16)]
    assert len({address for _, address in served}) == 16
    store, address = served[3]
    store.set("key", "value")
    assert connect_store(context(address), timeout_s=5.0).get("key") == b"value"


def test_a_group_of_one_has_no_store():
    with pytest.raises(FatalError, match="group policy has one worker and no rendezvous"):
        connect_store(context(""), timeout_s=1.0)
