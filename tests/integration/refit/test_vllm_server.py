"""A vLLM server that Tandem did not start: it knows the weight transfer by the wheel's plug-in and is refitted by HTTP.

The plug-in is installed as the wheel installs it: by the entry points in the metadata of a distribution.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rl.core.clock import SystemClock
from rl.core.errors import InfraError, WeightSyncError
from rl.core.resources import RunResources
from rl.generation.vllm import http_receiver
from rl.generation.vllm.http_receiver import HttpReceiver
from rl.weights.config import RefitConfig
from rl.weights.sync import WeightSync
from rl.weights.transport import ReceiverHandle
from tests.support.refit_engine import EXACT, PROMPT
from tests.support.refit_model import TrainerModel
from tests.support.tiny_model import make_tiny_model
from tools.wheel.make_wheel import entry_points

ROOT = Path(http_receiver.__file__).absolute().parents[3]
REFIT = RefitConfig(bucket_mib=0.01, pause_mode="keep", timeout_s=30)
START_S = 240.0
CALL_S = 30.0


class NobodyElse:
    """A generator without replicas: the server alone is refitted."""

    num_replicas = 0

    def weight_receivers(self) -> list[ReceiverHandle]:
        return []

    async def remove_replica(self, name: str, reason: str) -> None:
        raise InfraError(name)


class VllmServer:
    """What `vllm serve` runs, in a process group of its own; the command itself wants a distribution named vllm."""

    def __init__(self, model: Path, site: Path, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self.scratch = tempfile.TemporaryDirectory(prefix="vs-", dir="/tmp")  # sockets have short paths
        command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(model),
            "--port",
            str(port),
        ]
        command += ["--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "256", "--enforce-eager"]
        command += ["--kv-cache-memory-bytes", str(1 << 28), "--max-num-seqs", "16"]
        command += ["--weight-transfer-config", json.dumps({"backend": "tandem"})]
        environment = os.environ | {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "TMPDIR": self.scratch.name,
            "PYTHONPATH": os.pathsep.join([str(site), str(ROOT), *sys.path]),
        }
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=output, start_new_session=True
            )

    async def wait_until_ready(self) -> None:
        async with asyncio.timeout(START_S):
            while not await asyncio.to_thread(self.is_ready):
                assert self.process.poll() is None, self.log.read_text()[-4000:]
                await asyncio.sleep(0.5)  # it tells nobody when it is ready

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def greedy(self, count: int) -> tuple[list[int], list[float]]:
        """Complete the prompt as any client would."""
        body = {"model": self.model(), "prompt": list(PROMPT), "max_tokens": count, "temperature": 0, "logprobs": 0}
        body |= {"return_token_ids": True, "ignore_eos": True}
        choice = self.post("v1/completions", body)["choices"][0]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    def model(self) -> str:
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=CALL_S) as response:
            return str(json.load(response)["data"][0]["id"])

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"{self.url}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=CALL_S) as response:
            return json.load(response)

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)
        self.scratch.cleanup()


def installed_plugin(site: Path) -> Path:
    """Write the metadata that the wheel would install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folder = site / f"tandem_rl-{project['version']}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tandem-rl\nVersion: {project['version']}\n")
    (folder / "entry_points.txt").write_text(entry_points(project))
    return site


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), num_heads=8, num_kv_heads=4)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    folder = tmp_path_factory.mktemp("server")
    server = VllmServer(model, installed_plugin(folder / "site"), folder / "server.log")
    yield server
    server.close()


@pytest.fixture
def run() -> Iterator[RunResources]:
    with RunResources.create() as resources:
        yield resources


async def test_a_server_gives_the_trainers_tokens_after_each_refit_over_either_transport(
    server: VllmServer, model: Path, run: RunResources
) -> None:
    await server.wait_until_ready()
    trainer = TrainerModel(model)
    version = 0
    for transport in ("shm", "tcp"):
        handle = await HttpReceiver.connect(server.url, CALL_S, keeps_caches=False)
        assert handle.num_readers == 1
        config = REFIT.model_copy(update={"transport": transport})
        sync = WeightSync(trainer.handle, NobodyElse(), config, run.tag, SystemClock(), [handle])
        await sync.connect()
        for _ in range(2):
            trainer.reset()
            trainer.perturb(version, scale=0.3)
            report = await sync.publish(version)
            assert (report.replicas, report.attempts) == (1, 1)
            tokens, logprobs = await asyncio.to_thread(server.greedy, 8)
            assert tokens == trainer.greedy(PROMPT, 8)
            right = trainer.logprobs(PROMPT, tokens)
            assert max(abs(a - b) for a, b in zip(logprobs, right, strict=True)) <= EXACT
            scored = await handle.score(PROMPT)
            right = trainer.logprobs(PROMPT[:1], PROMPT[1:])
            assert max(abs(a - b) for a, b in zip(scored, right, strict=True)) <= EXACT
            version += 1
        assert await sync.explain("float32") is None
        trainer.perturb(99, scale=0.3)
        assert "model.embed_tokens.weight" in str(await sync.explain("float32"))
        await sync.close()


async def test_a_refit_that_is_given_up_says_why_and_the_next_one_works(
    server: VllmServer, model: Path, run: RunResources
) -> None:
    await server.wait_until_ready()
    trainer = TrainerModel(model)
    handle = await HttpReceiver.connect(server.url, CALL_S, keeps_caches=False)
    sync = WeightSync(trainer.handle, NobodyElse(), REFIT, run.tag, SystemClock(), [handle])
    await sync.connect()
    update = handle.update

    async def abort_then_update() -> None:
        handle.update = update  # type: ignore[method-assign]
        await handle.abort("planted: somebody gave up")
        await update()

    handle.update = abort_then_update  # type: ignore[method-assign]
    report = await sync.publish(100)
    assert report.attempts == 2
    tokens, _ = await asyncio.to_thread(server.greedy, 8)
    assert tokens == trainer.greedy(PROMPT, 8)
    with pytest.raises(WeightSyncError, match=r"server http.*update without start"):
        await handle.update()
    await sync.close()


async def test_a_server_that_is_not_there_is_an_infra_error() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(InfraError, match="cannot be reached"):
        await HttpReceiver.connect(url, CALL_S, keeps_caches=False)
