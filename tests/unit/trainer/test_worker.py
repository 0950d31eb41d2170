"""The worker guards what leaves it: weights of the asked version, under their own names."""

from pathlib import Path

import pytest
import torch

from rl.cluster.worker_group import WorkerContext
from rl.core.errors import WeightSyncError
from rl.trainer.worker import PolicyWorker
from rl.weights.transport import RefitStart
from tests.support.policies import make_request, make_settings


def make_worker(model: Path, precision: str = "float32", **changes: int) -> PolicyWorker:
    context = WorkerContext("policy", 0, 1, 0, "", "cpu", 1, "test")
    return PolicyWorker(context, make_settings(model, precision=precision), make_request(model, **changes))


def test_weights_of_another_version_are_not_sent(tiny_model: Path) -> None:
    worker = make_worker(tiny_model, version=3)
    with pytest.raises(WeightSyncError, match="version 4 asked for, but the trainer holds 3"):
        worker.sender_send(RefitStart(epoch=1, version=4, timeout_s=1.0))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_manifest_names_each_weight_once_with_its_full_shape(tiny_model: Path, precision: str) -> None:
    worker = make_worker(tiny_model, precision)
    tensors = worker._model.named_tensors()
    manifest = worker.sender_manifest()
    assert [spec.name for spec in manifest] == list(tensors)
    assert [spec.shape for spec in manifest] == [tuple(tensor.shape) for tensor in tensors.values()]
    assert {spec.dtype for spec in manifest} == {precision}


def test_the_version_grows_by_one_with_each_rl_step(tiny_model: Path) -> None:
    worker = make_worker(tiny_model, version=5)
    assert (worker.end_train(), worker.end_train()) == (6, 7)


def test_restore_brings_back_the_random_state(tiny_model: Path, tmp_path: Path) -> None:
    worker = make_worker(tiny_model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        worker.save(tmp_path, with_optimizer=True)
        expected = torch.rand(3)
        torch.manual_seed(12)
        worker.restore(tmp_path)
        assert torch.equal(torch.rand(3), expected)
