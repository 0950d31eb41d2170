"""The refit's self test compares what arrives, and says so when it is something else."""

import pytest
from torch import Tensor

from rl.controller import selftest_refit
from rl.controller.selftest_refit import refit_tests, send_tensors
from rl.weights.native import NativeReceiver


def test_both_transports_of_a_host_are_tried() -> None:
    assert [name for name, _ in refit_tests()] == ["refit, shared memory", "refit, TCP"]
    for _, test in refit_tests():
        assert test() == "5 tensors in 2 buckets arrived, digests agree"


def test_other_bytes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = NativeReceiver.receive

    def spoil(receiver: NativeReceiver, first: int, tensors: list[list[Tensor]]) -> None:
        receive(receiver, first, tensors)
        tensors[0][0][3, 5] += 1

    monkeypatch.setattr(NativeReceiver, "receive", spoil)
    with pytest.raises(RuntimeError, match="other bytes arrived in embed"):
        send_tensors("shm")


def test_digests_that_disagree_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest_refit, "digests_of", lambda tensors: bytes(8 * len(tensors)))
    with pytest.raises(RuntimeError, match="digests of both ends differ"):
        send_tensors("shm")
