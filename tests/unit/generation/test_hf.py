"""The transformers backend on the tiny model: exact logprobs, seeds, stops, refits, tied and untied."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch

from rl.core.clock import SystemClock
from rl.core.errors import ConfigError, DataError, InfraError, WeightSyncError
from rl.core.types import Completion, FinishReason, VersionSpan
from rl.generation import hf
from rl.generation.batching import Forward
from rl.generation.config import HfGenerationConfig
from rl.generation.generator import GeneratorRequest, SamplingParams
from rl.generation.hf import HfWorker, build
from rl.generation.parking import ParkedTensors
from rl.generation.pool import PooledGenerator
from rl.weights.config import RefitConfig
from rl.weights.signature import first_deviation
from rl.weights.sync import WeightSync
from rl.weights.transport import RefitStart
from tests.support.local_group import InProcessCluster
from tests.support.paused import pause, resume
from tests.support.refit_model import TrainerModel
from tests.support.tiny_model import EOS_ID, make_tiny_model

PROMPT = tuple(b"2+3=5\n4+1=5\n6+2=")
MAX_LEN = 48


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), tie_embeddings=request.param)


def generator_request(folder: Path, max_model_len: int = MAX_LEN) -> GeneratorRequest:
    return GeneratorRequest(str(folder), str(folder), "float32", max_model_len, 0, 1, 0, False, 30.0)


class Run:
    """A trainer, a generator and the refit between them."""

    def __init__(self, trainer: TrainerModel, generator: PooledGenerator[HfWorker], sync: WeightSync) -> None:
        self.trainer = trainer
        self.generator = generator
        self.sync = sync

    async def sample(self, seed: int = 0, request_id: str = "r", **changes: Any) -> Completion:
        params = replace(SamplingParams(1.0, 1.0, None, 8, (EOS_ID,), (), seed), **changes)
        return await self.generator.generate(PROMPT, params, request_id=request_id, session="s")

    def gap(self, completion: Completion, temperature: float = 1.0) -> float:
        right = self.trainer.logprobs(PROMPT, completion.tokens, temperature)
        return max(abs(a - b) for a, b in zip(completion.logprobs, right, strict=True))


@pytest.fixture
async def run(folder: Path) -> AsyncIterator[Run]:
    async with started(folder) as run:
        yield run


@asynccontextmanager
async def started(folder: Path) -> AsyncIterator[Run]:
    generator = await build(HfGenerationConfig(num_replicas=2), InProcessCluster("tdm-test"), generator_request(folder))
    trainer = TrainerModel(folder)
    sync = WeightSync(trainer.handle, generator, RefitConfig(bucket_mib=0.01), "tdm-test", SystemClock())
    await sync.connect()
    await sync.publish(0)
    yield Run(trainer, generator, sync)
    await sync.close()
    await generator.close()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
async def test_logprobs_equal_a_plain_forward_pass_at_the_same_temperature(run: Run, temperature: float) -> None:
    done = await asyncio.gather(*(run.sample(seed, f"r{seed}", temperature=temperature) for seed in range(8)))
    assert max(run.gap(completion, temperature) for completion in done) < 1e-5


async def test_a_seed_repeats_its_sample_in_any_company_and_seeds_differ(run: Run) -> None:
    alone = [await run.sample(seed) for seed in range(4)]
    together = await asyncio.gather(*(run.sample(seed, f"r{seed}") for seed in range(4)))
    assert [c.tokens for c in alone] == [c.tokens for c in together]
    assert len({c.tokens for c in alone}) == 4


async def test_after_each_refit_logprobs_and_versions_are_the_new_ones(run: Run) -> None:
    for version in range(1, 4):
        before = await run.sample(7)
        run.trainer.perturb(version, scale=0.3)
        assert run.gap(before) > 1e-2
        report = await run.sync.publish(version)
        assert report.replicas == 2
        assert run.generator.version == version
        done = await asyncio.gather(*(run.sample(seed, f"r{seed}") for seed in range(4)))
        assert all(c.version_spans == (VersionSpan(version, 0, len(c.tokens)),) for c in done)
        assert max(run.gap(completion) for completion in done) < 1e-5


async def test_weights_that_have_a_version_when_they_are_loaded_need_no_refit(folder: Path) -> None:
    request = replace(generator_request(folder), loaded_version=3)
    generator = await build(HfGenerationConfig(), InProcessCluster("tdm-test"), request)
    assert generator.version == 3
    params = SamplingParams(1.0, 1.0, None, 8, (EOS_ID,), (), 0)
    done = await generator.generate(PROMPT, params, request_id="r", session="s")
    assert {span.version for span in done.version_spans} == {3}
    await generator.close()


async def test_a_version_that_only_one_replica_took_is_noticed(run: Run) -> None:
    run.generator._versions[1] = 7
    with pytest.raises(WeightSyncError, match="different versions"):
        _ = run.generator.version


async def test_a_stop_token_ends_the_completion_and_belongs_to_it(run: Run) -> None:
    free = await run.sample(3)
    stop = free.tokens[2]
    done = await run.sample(3, stop_token_ids=(stop,))
    first = free.tokens.index(stop)
    assert done.tokens == free.tokens[: first + 1]
    assert done.finish_reason is FinishReason.STOP
    assert done.text == run.generator._group.workers[0]._decode(done.tokens[:-1])  # type: ignore[attr-defined]


async def test_greedy_is_the_most_likely_token(run: Run) -> None:
    done = await run.sample(temperature=0.0, max_new_tokens=1)
    with torch.no_grad():
        logits = run.trainer.model(torch.tensor([PROMPT])).logits[0, -1]
    assert done.tokens == (int(logits.argmax()),)


async def test_the_context_bounds_the_completion_and_a_full_prompt_is_refused(run: Run) -> None:
    params = SamplingParams(1.0, 1.0, None, 8, (), (), 0)
    done = await run.generator.generate([65] * (MAX_LEN - 1), params, request_id="r", session="s")
    assert len(done.tokens) == 1
    assert done.finish_reason is FinishReason.LENGTH
    with pytest.raises(DataError, match=f"{MAX_LEN} tokens; a prompt may have {MAX_LEN - 1}"):
        await run.generator.generate([65] * MAX_LEN, params, request_id="r", session="s")


async def test_sixty_four_requests_of_a_step_share_their_forward_passes(run: Run) -> None:
    workers = run.generator._group.workers  # type: ignore[attr-defined]
    sizes: list[int] = []
    for worker in workers:
        worker._batches._forward = counted(worker._batches._forward, sizes)
    await pause(run.generator, "keep")
    requests = [asyncio.ensure_future(run.sample(seed, f"r{seed}", stop_token_ids=())) for seed in range(64)]
    await holds(lambda: sum(len(worker._batches._waiting) for worker in workers) == 64)
    await resume(run.generator)
    done = await asyncio.gather(*requests)
    assert [len(completion.tokens) for completion in done] == [8] * 64
    # Two replicas, eight tokens each: one pass per token, each with the half of the requests.
    assert sizes == [32] * 16


def counted(forward: Forward, sizes: list[int]) -> Forward:
    """The same forward pass; notes how many sequences each call has."""

    def count(sequences: list[list[int]]) -> torch.Tensor:
        sizes.append(len(sequences))
        return forward(sequences)

    return count


async def holds(condition: Callable[[], bool]) -> None:
    """Let others run until the condition holds; the test fails when it does not within the deadline."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def test_requests_wait_while_paused_and_abort_means_retry(run: Run) -> None:
    await pause(run.generator, "keep")
    waiting = asyncio.ensure_future(run.sample(1, "waiting"))
    await holds(lambda: sum(run.generator._in_flight) > 0)
    assert await asyncio.wait({waiting}, timeout=0.1) == (set(), {waiting})
    await pause(run.generator, "abort")
    with pytest.raises(InfraError, match="request waiting was aborted"):
        await waiting
    await resume(run.generator)
    assert (await run.sample(1)).tokens


async def test_weights_are_not_taken_while_generating(run: Run) -> None:
    with pytest.raises(WeightSyncError, match="is not paused"):
        await run.generator.weight_receivers()[0].start(RefitStart(run.sync._epoch + 1, 1, 10.0))


async def test_a_cancelled_request_is_aborted_in_the_engine(run: Run) -> None:
    await pause(run.generator, "keep")
    task = asyncio.ensure_future(run.sample(1, "gone"))
    workers = run.generator._group.workers  # type: ignore[attr-defined]
    await holds(lambda: any(worker._batches._waiting for worker in workers))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.gather(*run.generator._late)
    assert not any(worker._batches._waiting for worker in workers)
    assert sum(run.generator._in_flight) == 0


async def test_every_replica_scores_as_a_plain_forward_pass_does(run: Run) -> None:
    right = run.trainer.logprobs(PROMPT[:1], PROMPT[1:])
    for scored in (await run.generator.score(PROMPT, 30.0)).values():
        assert max(abs(a - b) for a, b in zip(scored, right, strict=True)) < 1e-5
    with pytest.raises(DataError, match="leaves no room"):
        await run.generator.score([65] * (MAX_LEN + 1), 30.0)


async def test_every_parameter_is_signed_as_the_trainer_signs_it(run: Run) -> None:
    expected = await run.trainer.handle.signatures()
    for receiver in run.generator.weight_receivers():
        actual = await receiver.signatures()
        assert set(expected) <= set(actual)
        assert first_deviation(expected, actual, 1e-9) is None
    run.trainer.perturb(1, scale=0.3)
    assert first_deviation(await run.trainer.handle.signatures(), actual, 2e-5) is not None


async def test_a_parameter_that_does_not_hold_what_arrived_is_named(run: Run) -> None:
    worker = run.generator._group.workers[1]  # type: ignore[attr-defined]
    receive = worker._receiver.update

    def receive_and_spoil() -> None:
        receive()
        with torch.no_grad():
            worker._parameters["model.norm.weight"][3] += 1

    worker._receiver.update = receive_and_spoil
    with pytest.raises(WeightSyncError, match=r"generation\[1\].*model\.norm\.weight"):
        await run.sync.publish(1)


async def test_a_replica_that_dies_leaves_and_the_other_goes_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    end(run, monkeypatch, ("pause", "init_transfer", "start_update", "abort_update", "generate"))
    run.trainer.perturb(1, scale=0.3)
    report = await run.sync.publish(1)
    assert (report.replicas, run.generator.num_replicas, run.generator.version) == (1, 1, 1)
    done = await asyncio.gather(*(run.sample(seed, f"r{seed}") for seed in range(4)))
    assert max(run.gap(completion) for completion in done) < 1e-5


async def test_a_replica_that_dies_in_its_sleep_leaves_with_the_next_refit(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run.generator.sleep()
    end(run, monkeypatch, ("wake", "pause", "init_transfer", "start_update", "abort_update", "generate", "resume"))
    await run.generator.wake(("weights",))

    async def wake_caches() -> None:
        await run.generator.wake(("kv_cache",))

    report = await run.sync.publish(1, wake_caches)
    assert (report.replicas, run.generator.num_replicas, run.generator.version) == (1, 1, 1)
    assert (await run.sample()).tokens


def end(run: Run, monkeypatch: pytest.MonkeyPatch, methods: Sequence[str]) -> None:
    """Let the second replica's process be gone, as far as these methods tell."""
    victim = run.generator._group.workers[1]  # type: ignore[attr-defined]

    def dying(method: Any) -> Any:
        @wraps(method)
        def call(worker: HfWorker, *arguments: Any) -> Any:
            if worker is victim:
                raise InfraError("the process is gone")
            return method(worker, *arguments)

        return call

    for name in methods:
        monkeypatch.setattr(HfWorker, name, dying(vars(HfWorker)[name]))


async def test_a_sleeping_engine_keeps_requests_until_a_refit_has_woken_it(run: Run) -> None:
    workers = run.generator._group.workers  # type: ignore[attr-defined]
    running = [asyncio.ensure_future(run.sample(seed, f"r{seed}", stop_token_ids=())) for seed in range(2)]
    await holds(lambda: all(worker._batches._active for worker in workers))
    assert await run.generator.sleep() == 0, "nothing lies on a device"
    assert [len(done.tokens) for done in await asyncio.gather(*running)] == [8, 8], "what was under way is finished"
    waiting = asyncio.ensure_future(run.sample(9, "waiting"))
    await holds(lambda: any(worker._batches._waiting for worker in workers))
    assert await asyncio.wait({waiting}, timeout=0.1) == (set(), {waiting})
    for refused in (resume(run.generator), run.generator.score(PROMPT, 30.0)):
        with pytest.raises(WeightSyncError, match=r"cannot .*: it sleeps \(weights"):
            await refused
    run.trainer.perturb(1, scale=0.3)
    with pytest.raises(WeightSyncError, match=r"cannot take version 1: it sleeps \(weights\)"):
        await run.sync.publish(1)
    assert await run.generator.wake(("weights",)) == 0

    async def wake_caches() -> None:
        assert not waiting.done() and run.generator.version == 1
        with pytest.raises(WeightSyncError, match=r"cannot generate: it sleeps \(kv_cache\)"):
            await resume(run.generator)
        assert await run.generator.wake(("kv_cache",)) == 0

    await run.sync.publish(1, wake_caches)
    done = await waiting
    assert {span.version for span in done.version_spans} == {1} and run.gap(done) < 1e-5
    assert await run.generator.wake(("weights", "kv_cache")) == 0, "to wake what is awake is no error"


async def test_weights_on_a_device_leave_it_and_come_back_to_the_model_and_its_refits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if they lay on one: in memory of their own, as a move to a device gives it."""
    load = hf._load_model

    def load_copies(request: GeneratorRequest) -> Any:
        model = load(request)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        return model

    monkeypatch.setattr(hf, "_load_model", load_copies)
    async with started(folder) as run:
        workers = run.generator._group.workers  # type: ignore[attr-defined]
        for worker in workers:
            worker._parked = ParkedTensors(worker._parameters.values())
        total = 2 * sum(parameter.nbytes for parameter in workers[0]._model.parameters())
        expected = await run.sample(3)
        assert await run.generator.sleep() == total
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in workers[0]._parameters.values())
        assert await run.generator.wake(("kv_cache",)) == 0
        assert await run.generator.wake(("weights",)) == total
        await resume(run.generator)
        assert (await run.sample(3)) == expected
        await run.generator.sleep()
        await run.generator.wake(("weights", "kv_cache"))
        run.trainer.perturb(1, scale=0.3)
        await run.sync.publish(1)
        assert run.gap(await run.sample(3)) < 1e-5


async def test_tensors_of_another_model_are_refused_by_name(run: Run, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", tie_embeddings=True)
    trainer = TrainerModel(other)
    trainer.model.resize_token_embeddings(300)
    sync = WeightSync(trainer.handle, run.generator, RefitConfig(), "tdm-test", SystemClock())
    with pytest.raises(WeightSyncError, match=r"cannot take 'model.embed_tokens.weight' of shape \[300, 32\]"):
        await sync.connect()
    await sync.close()


async def test_a_context_longer_than_the_models_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="max_total_sequence_length=100000"):
        await build(HfGenerationConfig(), InProcessCluster("tdm-test"), generator_request(folder, 100_000))


async def test_texts_come_from_the_asked_tokenizer(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    other = tmp_path / "tokenizer"
    shutil.copytree(folder, other)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    request = replace(generator_request(folder), tokenizer_path=str(other))
    generator = await build(HfGenerationConfig(), InProcessCluster("tdm-test"), request)
    assert generator._group.workers[0]._decode(list(b"hi")) == "hi"  # type: ignore[attr-defined]
    await generator.close()


async def test_a_refit_waits_for_the_call_of_an_earlier_one(run: Run) -> None:
    await pause(run.generator, "keep")
    worker = run.generator._group.workers[0]  # type: ignore[attr-defined]
    with worker._refit_lock.held("a late call"):
        task = asyncio.ensure_future(
            run.generator.weight_receivers()[0].start(RefitStart(run.sync._epoch + 1, 1, 10.0))
        )
        assert await asyncio.wait({task}, timeout=0.1) == (set(), {task})
    await task


async def test_a_folder_whose_weights_break_off_is_named(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ConfigError, match=f"cannot load a causal language model from {broken}"):
        await build(HfGenerationConfig(num_replicas=1), InProcessCluster("tdm-test"), generator_request(broken))
