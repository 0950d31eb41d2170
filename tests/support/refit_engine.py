"""A real vLLM engine, the trainer's model beside it, and the refit between them: for tests on a CPU.

engine = RefitEngine(folder, bucket_mib=0.01)
await engine.sync.connect(); await engine.publish()
assert await engine.gap() <= EXACT
"""

import asyncio
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl.core.clock import SystemClock
from rl.core.resources import RunResources
from rl.core.types import Completion
from rl.generation.config import VllmGenerationConfig
from rl.generation.generator import GeneratorRequest, SamplingParams
from rl.generation.pool import PooledGenerator
from rl.generation.vllm.config import VllmEngineConfig
from rl.generation.vllm.generator import build
from rl.generation.vllm.worker import VllmWorker
from rl.weights.config import RefitConfig
from rl.weights.sync import BeforeResume, SyncReport, WeightSync
from tests.support.local_group import InProcessCluster
from tests.support.refit_model import TrainerModel
from tests.support.tiny_model import EOS_ID

PROMPT = tuple(b"2+3=5\n4+1=5\n6+2=8\n3+4=")
MAX_LEN = 256
EXACT = 1e-4
CALL_S = 60.0
PROBE = {"worker_extension_cls": "tests.support.refit_probe.RefitProbe"}


def start_engine(folder: Path, tag: str, refit: RefitConfig, **settings: Any) -> PooledGenerator[VllmWorker]:
    """Start one replica; `settings` are those of the engine."""
    engine = VllmEngineConfig(**({"kv_cache_gib": 0.25, "max_num_seqs": 64, "request_timeout_s": CALL_S} | settings))
    config = VllmGenerationConfig(vllm_cfg=engine, refit_cfg=refit)
    request = GeneratorRequest(str(folder), str(folder), "float32", MAX_LEN, 0, 2, 0, False, 120.0)
    return asyncio.run(build(config, InProcessCluster(tag), request))


class RefitEngine:
    """Owns all three; `close` ends them.

    Args:
        folder: Of the model.
        refit: Settings of the refit.
        settings: Of the engine.
    """

    def __init__(self, folder: Path, refit: RefitConfig, **settings: Any) -> None:
        # With its reaper, so that a test run that is killed leaves no shared memory.
        self.run = RunResources.create()
        self.tag = self.run.tag
        self.generator = start_engine(folder, self.tag, refit, **settings)
        self.trainer = TrainerModel(folder)
        self.sync = WeightSync(self.trainer.handle, self.generator, refit, self.tag, SystemClock())
        self.version = -1

    @property
    def worker(self) -> VllmWorker:
        """The worker behind the generator's one replica."""
        worker = self.generator._group.workers[0]  # type: ignore[attr-defined]
        assert isinstance(worker, VllmWorker)
        return worker

    async def publish(self, train: bool = True, before_resume: BeforeResume | None = None) -> SyncReport:
        """Change the weights and bring them to the engine as the next version."""
        if train:
            self.trainer.reset()
            self.trainer.perturb(self.version + 10, scale=0.3)
        report = await self.sync.publish(self.version + 1, before_resume)
        self.version += 1
        assert report.version == self.generator.version == self.version
        return report

    async def sample(self, seed: int = 0, request_id: str = "", prompt: Any = PROMPT, **changes: Any) -> Completion:
        """Sample one completion; `changes` are those of the sampling parameters."""
        params = replace(SamplingParams(1.0, 1.0, None, 8, (EOS_ID,), (), seed), **changes)
        name = request_id or f"r{secrets.token_hex(4)}"
        return await self.generator.generate(prompt, params, request_id=name, session="s")

    async def gap(self, **changes: Any) -> float:
        """Largest logprob difference to the trainer over some samples."""
        done = await asyncio.gather(*(self.sample(seed, **changes) for seed in range(8)))
        prompt, temperature = changes.get("prompt", PROMPT), changes.get("temperature", 1.0)
        right = [self.trainer.logprobs(prompt, completion.tokens, temperature) for completion in done]
        pairs = [pair for c, values in zip(done, right, strict=True) for pair in zip(c.logprobs, values, strict=True)]
        return max(abs(left - right) for left, right in pairs)

    async def is_paused(self) -> bool:
        """Whether the engine's scheduler is."""
        work = self.worker._engine.is_paused()
        return bool(await asyncio.to_thread(self.worker._call, work, CALL_S, "is_paused"))

    async def probe(self, method: str, *arguments: Any) -> list[Any]:
        """Call a switch of `refit_probe` in every process of the engine."""
        work = self.worker._engine.collective_rpc(method, args=arguments)
        return list(await asyncio.to_thread(self.worker._call, work, CALL_S, method))

    def close(self) -> None:
        """End everything; idempotent as far as its parts are."""
        try:
            asyncio.run(self.sync.close())
            asyncio.run(self.generator.close())
        finally:
            self.run.close()
