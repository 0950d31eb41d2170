"""Real vLLM engines of one process and of two (tensor parallel) on a CPU: every refit arrives, whatever went before.

The oracle is the trainer's own forward pass: the most likely tokens and their log-probabilities after each refit, and
of every tensor what its layer makes of a fixed input. One engine serves all tests of a size; the last one kills it.
"""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from rl.core.clock import SystemClock
from rl.core.errors import InfraError, WeightSyncError
from rl.weights.config import RefitConfig
from rl.weights.sender import WeightSender
from rl.weights.signature import first_deviation
from rl.weights.sync import SyncReport, WeightSync
from rl.weights.transport import LinkSettings, OpenRequest, RefitStart
from tests.support.low_rank import Adapted
from tests.support.paused import pause, resume
from tests.support.refit_engine import CALL_S, EXACT, PROBE, PROMPT, RefitEngine
from tests.support.refit_model import LocalSender
from tests.support.tiny_model import make_tiny_model

REFIT = RefitConfig(bucket_mib=0.01, pause_mode="keep", timeout_s=30)
GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "stop_token_ids": ()}
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
DOWN_PROJ = "model.layers.0.mlp.down_proj.weight"
ENDURANCE = 20
# What allocators keep of 20 refits of a model of 0.3 MB; a leak of the weights alone would be 6 MB in each process.
MAX_GROWTH = 3 << 20


class Engine(RefitEngine):
    """An engine of some processes."""

    def __init__(self, folder: Path, num_processes: int) -> None:
        super().__init__(folder, REFIT, tensor_parallel_size=num_processes, vllm_kwargs=PROBE)
        self.last = num_processes - 1

    async def assert_equal_to_trainer(self) -> None:
        """Greedy tokens, their log-probabilities, and a scored prompt are the trainer's."""
        done = await self.sample(**GREEDY)
        assert list(done.tokens) == self.trainer.greedy(PROMPT, len(done.tokens))
        right = self.trainer.logprobs(PROMPT, done.tokens)
        assert max(abs(a - b) for a, b in zip(done.logprobs, right, strict=True)) <= EXACT
        assert {span.version for span in done.version_spans} == {self.version}
        (scored,) = (await self.generator.score(PROMPT, CALL_S)).values()
        right = self.trainer.logprobs(PROMPT[:1], PROMPT[1:])
        assert max(abs(a - b) for a, b in zip(scored, right, strict=True)) <= EXACT

    def processes(self) -> list[psutil.Process]:
        return [child for child in psutil.Process().children(recursive=True) if not _outlives_engines(child)]


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"), num_heads=8, num_kv_heads=4)
    with pytest.MonkeyPatch.context() as patch:
        if request.param == 2:
            # One core for each process: vLLM wants as many groups as there are processes.
            patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, sorted(os.sched_getaffinity(0))[:2])))
        engine = Engine(folder, request.param)
    yield engine
    engine.close()


@pytest.fixture
async def engine(shared: Engine) -> AsyncIterator[Engine]:
    """The shared engine with some version of the trainer's weights, generating."""
    if shared.version < 0:
        await shared.sync.connect()
        await shared.publish(train=False)
    yield shared


async def test_tokens_and_logprobs_equal_the_trainers_after_each_of_five_refits(engine: Engine) -> None:
    await engine.assert_equal_to_trainer()
    for _ in range(5):
        before = (await engine.sample(**GREEDY)).logprobs
        report = await engine.publish()
        assert (report.attempts, report.changed) == (1, report.tensors)
        await engine.assert_equal_to_trainer()
        assert before != (await engine.sample(**GREEDY)).logprobs


async def test_an_engine_that_slept_before_each_refit_computes_with_the_new_weights(engine: Engine) -> None:
    async def wake_caches() -> None:
        assert await engine.generator.wake(("kv_cache",)) == 0

    for _ in range(3):
        assert await engine.generator.sleep() == 0
        waiting = asyncio.ensure_future(engine.sample(**GREEDY))
        assert await engine.generator.wake(("weights",)) == 0
        await engine.publish(before_resume=wake_caches)
        assert {span.version for span in (await waiting).version_spans} == {engine.version}
        await engine.assert_equal_to_trainer()


async def test_every_tensor_shows_itself_through_its_layer(engine: Engine) -> None:
    await engine.publish()
    expected = await engine.trainer.handle.signatures()
    (receiver,) = engine.generator.weight_receivers()
    actual = await receiver.signatures()
    assert list(actual) == list(expected)
    assert first_deviation(expected, actual, 2e-5) is None
    assert await engine.sync.explain("float32") is None


async def test_merged_adapters_never_add_up_and_the_base_computes_as_before(engine: Engine) -> None:
    await engine.publish()
    (handle,) = engine.generator.weight_receivers()
    before = await handle.signatures()
    adapted = Adapted(engine.trainer.model, (Q_PROJ, DOWN_PROJ))
    base = adapted.digests()
    sync = WeightSync(LocalSender(WeightSender(adapted.source())), engine.generator, REFIT, engine.tag, SystemClock())
    try:
        await sync.connect()
        for seed in (1, 2, 0):
            adapted.train(seed)
            engine.version += 1
            await sync.publish(engine.version)
            with adapted.merged():
                await engine.assert_equal_to_trainer()
            now = await handle.signatures()
            changed = {name for name in before if now[name] != before[name]}
            assert changed == (set(adapted.names) if seed else set())
            assert adapted.digests() == base
    finally:
        await sync.close()
        engine.sync._epoch = sync._epoch  # an engine refuses what is not newer than all that it has seen


async def test_a_tensor_that_one_process_holds_transposed_is_named(engine: Engine) -> None:
    await engine.probe("probe_load", engine.last, Q_PROJ, "transpose", 1)
    # What arrived was right: it went wrong between the loader and the packed layer, which no digest sees.
    await engine.publish()
    text = await engine.sync.explain("float32")
    assert text is not None and Q_PROJ in text
    assert await engine.gap() > 1e-2
    await engine.publish()
    assert await engine.sync.explain("float32") is None
    await engine.assert_equal_to_trainer()


async def test_a_cached_prefix_does_not_outlive_a_refit(engine: Engine) -> None:
    prompt = tuple(range(32, 32 + 64))
    first = await engine.sample(prompt=prompt, **GREEDY)
    again = await engine.sample(prompt=prompt, **GREEDY)
    assert again.tokens == first.tokens
    await engine.publish()
    done = await engine.sample(prompt=prompt, **GREEDY)
    assert list(done.tokens) == engine.trainer.greedy(prompt, len(done.tokens))
    assert await engine.gap(prompt=prompt) <= EXACT


async def test_keys_of_old_weights_that_frozen_requests_keep_are_no_prefix_of_new_ones(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`recompute_kv_cache_after_weight_updates: false`, as the engine's builder sets it."""
    monkeypatch.setattr(engine.worker, "_keeps_caches", True)
    monkeypatch.setattr(engine.worker._refit, "_clears_caches", False)
    prompt = tuple(range(40, 40 + 64))
    frozen = asyncio.ensure_future(engine.sample(1, prompt=prompt, max_new_tokens=150, stop_token_ids=()))
    await engine.sample(2, prompt=prompt, max_new_tokens=2)
    before = engine.version
    await engine.publish()
    assert await engine.gap(prompt=prompt) <= EXACT
    assert [span.version for span in (await frozen).version_spans] == [before, before + 1]


async def test_a_process_that_fails_once_is_retried_with_new_links(engine: Engine) -> None:
    await engine.probe("probe_load", engine.last, Q_PROJ, "raise", 1)
    assert (await engine.publish()).attempts == 2
    await engine.assert_equal_to_trainer()


async def test_a_process_that_always_fails_is_named_and_the_next_refit_works(engine: Engine) -> None:
    await engine.probe("probe_load", engine.last, Q_PROJ, "raise", 1000)
    with pytest.raises(WeightSyncError, match=f"planted: '{Q_PROJ}' is refused") as caught:
        await engine.publish()
    assert "DIRTY" in str(caught.value)
    assert engine.generator.version == engine.version
    assert await asyncio.to_thread(engine.worker._call, engine.worker._engine.is_paused(), 60.0, "is_paused")
    await engine.probe("probe_load", engine.last, Q_PROJ, "none", 0)
    await engine.publish(train=False)
    await engine.assert_equal_to_trainer()


async def test_an_abort_ends_every_process_that_waits_for_a_silent_sender(engine: Engine) -> None:
    (receiver,) = engine.generator.weight_receivers()
    sender = engine.trainer.handle
    await sender.manifest()
    readers = tuple(f"{receiver.replica}.{rank}" for rank in range(receiver.num_readers))
    info = await sender.open(OpenRequest("shm", f"{engine.tag}-silent", 1 << 14, 2, readers, 30.0, LinkSettings(30.0)))
    await asyncio.gather(receiver.init(info, 0), sender.join())
    await pause(engine.generator, "drain")
    engine.sync._epoch += 1
    await receiver.start(RefitStart(engine.sync._epoch, 1000, 600.0))
    update = asyncio.ensure_future(receiver.update())
    done, _ = await asyncio.wait({update}, timeout=0.2)
    assert not done
    async with asyncio.timeout(20):
        await receiver.abort("the driver changed its mind")
        with pytest.raises(WeightSyncError, match="the driver changed its mind"):
            await update
    await engine.publish()
    await engine.assert_equal_to_trainer()


def footprint(engine: Engine) -> tuple[Counter[str], Counter[str], int, dict[int, int]]:
    """Descriptors by process name, open shared memory, segments, and resident bytes by process."""
    processes = engine.processes()
    files = Counter({f"{process.pid}": process.num_fds() for process in [psutil.Process(), *processes]})
    shared = Counter(path.name.split("-refit-")[0] for path in Path("/dev/shm").iterdir() if engine.tag in path.name)
    resident = {process.pid: process.memory_info().rss for process in processes}
    return files, shared, len(processes), resident


async def test_twenty_refits_leave_memory_files_and_segments_as_they_were(engine: Engine) -> None:
    reports: list[SyncReport] = []
    for _ in range(ENDURANCE):  # allocators and caches settle
        reports.append(await engine.publish())
    files, segments, count, resident = footprint(engine)
    for _ in range(ENDURANCE):
        reports.append(await engine.publish())
    after = footprint(engine)
    assert (after[0], after[1], after[2]) == (files, segments, count)
    growth = {pid: after[3][pid] - size for pid, size in resident.items()}
    assert max(growth.values()) <= MAX_GROWTH, growth
    assert {report.attempts for report in reports} == {1}
    await engine.assert_equal_to_trainer()


async def test_a_process_killed_in_mid_refit_is_noticed_and_the_engine_ends(engine: Engine) -> None:
    """The last one: the engine does not survive it."""
    children = engine.processes()
    await engine.probe("probe_load", engine.last, Q_PROJ, "kill", 1)
    async with asyncio.timeout(60):
        with pytest.raises(WeightSyncError, match=r"generation\[0\]") as caught:
            await engine.publish()
    assert any(word in str(caught.value) for word in ("died", "dead", "Executor failed"))
    # Of the kind that others of its fleet survive.
    for call in (engine.sample(), pause(engine.generator, "drain"), resume(engine.generator)):
        with pytest.raises(InfraError):
            await call
    await engine.generator.close()
    await engine.sync.close()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []
    assert [path for path in Path("/dev/shm").iterdir() if engine.tag in path.name] == []


def _outlives_engines(process: psutil.Process) -> bool:
    """The run's reaper and Python's own tracker of shared memory belong to the test's process."""
    words = " ".join(process.cmdline())
    return "reaper" in words or "resource_tracker" in words
