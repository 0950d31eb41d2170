"""Missing native code is found before a model loads, and the message says what to do."""

from pathlib import Path
from typing import Any

import pytest

from rl.cluster.worker_group import WorkerContext
from rl.core.errors import ConfigError, FatalError
from rl.trainer.kernels import require_kernels
from rl.trainer.worker import PolicyWorker
from tests.support.policies import make_request, make_settings


def test_plain_torch_needs_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []
    monkeypatch.setattr("rl.trainer.kernels.require_native", lambda: looks.append("native"))
    require_kernels("torch", on_gpu=True)
    assert looks == []
    require_kernels("native", on_gpu=False)
    assert looks == ["native"]


def test_on_a_gpu_the_cuda_kernels_must_be_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl.trainer.kernels.require_native", lambda: None)
    monkeypatch.setattr("rl.trainer.kernels.cuda_library_failure", lambda: "libtandem_cuda.so is nowhere")
    require_kernels("native", on_gpu=False)
    with pytest.raises(ConfigError, match="libtandem_cuda.so is nowhere; set policy.logprob_impl=torch"):
        require_kernels("native", on_gpu=True)
    monkeypatch.setattr("rl.trainer.kernels.cuda_library_failure", lambda: None)
    require_kernels("native", on_gpu=True)


def _missing(*_: Any, **__: Any) -> None:
    raise FatalError("the native library is nowhere")


def test_a_worker_misses_it_before_it_reads_a_model(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl.trainer.worker.require_kernels", _missing)
    monkeypatch.setattr("rl.trainer.worker.CausalModel", lambda *_, **__: pytest.fail("a model was loaded"))
    context = WorkerContext("policy", 0, 1, 0, "", "cpu", 1, "test")
    with pytest.raises(FatalError, match="nowhere"):
        PolicyWorker(context, make_settings(tiny_model, logprob_impl="native"), make_request(tiny_model))
