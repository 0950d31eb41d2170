"""The driver's side: which replica gets a request."""

import asyncio
import contextlib
import threading
from collections import Counter

import pytest

from rl.cluster.worker_group import WorkerRequest
from rl.core.errors import CompletionError, InfraError, WeightSyncError
from rl.core.types import NO_VERSION, Completion, FinishReason, PolicyVersion, VersionSpan
from rl.generation.generator import WAKE_TAGS, GeneratorRequest, SamplingParams, WakeTag
from rl.generation.pool import PooledGenerator, replicas_of
from rl.weights.transport import Ack, PauseMode
from tests.support.local_group import InProcessGroup
from tests.support.waiting import wait_until

PARAMS = SamplingParams(1.0, 1.0, None, 4, (), (), 0)
REQUEST = GeneratorRequest("/model", "/model", "float32", 64, 0, 1, 0, False, 10.0)


class Worker:
    """Counts the requests that reach it."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.closed = 0

    def generate(self, prompt_tokens: tuple[int, ...], params: SamplingParams, request_id: str) -> Completion:
        self.requests.append(request_id)
        return Completion((1,), (-0.5,), FinishReason.STOP, (VersionSpan(0, 0, 1),), "")

    def close(self) -> None:
        self.closed += 1


def pool(replicas: int) -> tuple[PooledGenerator[Worker], list[Worker]]:  # type: ignore[type-var]
    workers = [Worker() for _ in range(replicas)]
    group = InProcessGroup(workers, WorkerRequest("generation", replicas, 1, 0, 4, 10.0))
    return PooledGenerator(group, Worker, REQUEST, 4), workers  # type: ignore[type-var]


def test_the_replica_with_the_fewest_requests_in_flight_is_chosen() -> None:
    generator, _ = pool(3)
    generator._in_flight = [4, 1, 2]
    assert generator._choose("any") == 1


def test_ties_go_to_the_home_of_the_session_so_that_siblings_share_a_cache() -> None:
    generator, _ = pool(3)
    homes = {session: generator._choose(session) for session in map(str, range(20))}
    assert homes == {session: generator._choose(session) for session in homes}
    assert set(homes.values()) == {0, 1, 2}


async def test_requests_return_their_place_and_closing_ends_every_worker_once() -> None:
    generator, workers = pool(2)
    assert generator.version == NO_VERSION
    for index in range(6):
        await generator.generate([1], PARAMS, request_id=str(index), session=str(index))
    assert generator._in_flight == [0, 0]
    assert sorted(request for worker in workers for request in worker.requests) == [str(i) for i in range(6)]
    await generator.close()
    await generator.close()
    assert [worker.closed for worker in workers] == [1, 1]


class Mortal(Worker):
    """A worker that can die, or answer with what cannot be used."""

    def __init__(self) -> None:
        super().__init__()
        self.error: InfraError | None = None

    def generate(self, prompt_tokens: tuple[int, ...], params: SamplingParams, request_id: str) -> Completion:
        completion = super().generate(prompt_tokens, params, request_id)
        if self.error is not None:
            raise self.error
        return completion

    def finish_update(self, version: PolicyVersion) -> Ack:
        return Ack("", version, 0, (b"",), {})


@pytest.mark.parametrize(
    ("error", "tried"), [(InfraError("the process is gone"), 1), (CompletionError("one bad token"), 4)]
)
async def test_a_replica_that_fails_fast_does_not_draw_the_requests_until_a_refit_has_reached_it(
    error: InfraError, tried: int
) -> None:
    workers = [Mortal(), Mortal()]
    group = InProcessGroup(workers, WorkerRequest("generation", 2, 1, 0, 4, 10.0))
    generator = PooledGenerator(group, Mortal, REQUEST, 4)  # type: ignore[type-var]
    session = next(one for one in map(str, range(9)) if generator._choose(one) == 1)

    async def ask(count: int) -> None:
        for index in range(count):
            with contextlib.suppress(InfraError):
                await generator.generate([1], PARAMS, request_id=str(index), session=session)

    workers[1].error = error
    await ask(4)
    assert (len(workers[0].requests), len(workers[1].requests)) == (4 - tried, tried)
    workers[1].error = None
    await generator.weight_receivers()[1].finish(1)
    await ask(3)
    assert len(workers[1].requests) == tried + 3


class Hanging(Worker):
    """A worker that answers nothing while it hangs."""

    def __init__(self) -> None:
        super().__init__()
        self.is_free = threading.Event()
        self.is_free.set()

    def generate(self, prompt_tokens: tuple[int, ...], params: SamplingParams, request_id: str) -> Completion:
        completion = super().generate(prompt_tokens, params, request_id)
        self.is_free.wait(20)
        return completion

    def abort(self, request_id: str) -> None:
        self.is_free.wait(20)


async def test_a_replica_that_hangs_gets_no_more_requests_before_it_answers_the_abort_of_the_last() -> None:
    workers = [Hanging(), Hanging()]
    group = InProcessGroup(workers, WorkerRequest("generation", 2, 1, 0, 4, 30.0))
    generator = PooledGenerator(group, Hanging, REQUEST, 4)  # type: ignore[type-var]
    session = next(one for one in map(str, range(9)) if generator._choose(one) == 1)
    workers[1].is_free.clear()
    late = asyncio.ensure_future(generator.generate([1], PARAMS, request_id="late", session=session))
    await asyncio.to_thread(wait_until, lambda: workers[1].requests == ["late"], "the request at the worker")
    late.cancel()
    with pytest.raises(asyncio.CancelledError):
        await late
    for index in range(3):
        async with asyncio.timeout(10):
            await generator.generate([1], PARAMS, request_id=str(index), session=session)
    assert (len(workers[0].requests), workers[1].requests) == (3, ["late"])
    workers[1].is_free.set()
    await asyncio.gather(*generator._late)
    await generator.generate([1], PARAMS, request_id="again", session=session)
    assert workers[1].requests == ["late", "again"]


class Busy:
    """A worker whose requests end when they are aborted or let go, and not before."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.changed = threading.Condition()
        self.running: set[str] = set()
        self.ended: set[str] = set()
        self.is_open = False

    def generate(self, prompt_tokens: tuple[int, ...], params: SamplingParams, request_id: str) -> Completion:
        with self.changed:
            self.running.add(request_id)
            self.changed.wait_for(lambda: self.is_open or request_id in self.ended, timeout=20)
            self.running.discard(request_id)
        if request_id in self.ended:
            raise InfraError(f"request {request_id} was aborted")
        return Completion((1,), (-0.5,), FinishReason.STOP, (VersionSpan(0, 0, 1),), "")

    def pause(self, mode: PauseMode) -> None:
        with self.changed:
            self.calls[mode] += 1
            if mode == "abort":
                self.ended |= self.running
                self.changed.notify_all()

    def abort(self, request_id: str) -> None:
        with self.changed:
            self.ended.add(request_id)
            self.changed.notify_all()

    def let_go(self) -> None:
        with self.changed:
            self.is_open = True
            self.changed.notify_all()


PLACES = 3


async def crowd(count: int) -> tuple[PooledGenerator[Busy], Busy, list["asyncio.Task[Completion]"]]:  # type: ignore[type-var]
    """A replica with every place taken and more requests than threads."""
    worker = Busy()
    group = InProcessGroup([worker], replicas_of(REQUEST, 1, PLACES, 10.0))
    generator = PooledGenerator(group, Busy, REQUEST, PLACES)  # type: ignore[type-var]
    tasks = [
        asyncio.ensure_future(generator.generate([1], PARAMS, request_id=str(index), session="s"))
        for index in range(count)
    ]
    async with asyncio.timeout(10):
        while len(worker.running) < PLACES:
            await asyncio.sleep(0)
    return generator, worker, tasks


@pytest.mark.parametrize("mode", ["keep", "abort"])
async def test_a_pause_does_not_wait_behind_more_requests_than_there_are_threads(mode: PauseMode) -> None:
    generator, worker, tasks = await crowd(100)
    async with asyncio.timeout(5):
        await generator.weight_receivers()[0].pause(mode)
    assert worker.calls[mode] == 1
    worker.let_go()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    aborted = [result for result in results if isinstance(result, InfraError)]
    assert len(aborted) == (PLACES if mode == "abort" else 0)


async def test_cancelled_requests_give_their_places_back_wherever_they_were() -> None:
    generator, worker, tasks = await crowd(8)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    worker.let_go()
    done = [generator.generate([1], PARAMS, request_id=f"new-{index}", session="s") for index in range(5)]
    async with asyncio.timeout(5):
        assert len(await asyncio.gather(*done)) == 5
    assert worker.ended == {"0", "1", "2"}
    assert generator._in_flight == [0]


async def test_a_replica_that_is_given_up_fails_its_requests_and_gets_no_more() -> None:
    workers = [Busy(), Busy()]
    group = InProcessGroup(workers, replicas_of(REQUEST, 2, 1, 10.0))
    generator = PooledGenerator(group, Busy, REQUEST, 1)  # type: ignore[type-var]
    tasks = [
        asyncio.ensure_future(generator.generate([1], PARAMS, request_id=str(index), session="s")) for index in range(4)
    ]
    async with asyncio.timeout(10):
        while not all(worker.running for worker in workers):
            await asyncio.sleep(0)
    names = [receiver.replica for receiver in generator.weight_receivers()]
    await generator.remove_replica(names[0], "planted")
    async with asyncio.timeout(10):
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        while len(ended) < 2:
            ended, _ = await asyncio.wait(tasks, timeout=0.01)
    # One in flight and one that waited for its place.
    for task in ended:
        with pytest.raises(InfraError, match=r"generation\[0\] was given up with request"):
            task.result()
    assert (generator.num_replicas, [r.replica for r in generator.weight_receivers()]) == (1, names[1:])
    workers[1].let_go()
    workers[0].let_go()
    rest = [task for task in tasks if task not in ended]
    assert [completion.tokens for completion in await asyncio.gather(*rest)] == [(1,), (1,)]
    for index in range(3):
        await generator.generate([1], PARAMS, request_id=f"later{index}", session=str(index))
    with pytest.raises(InfraError, match="the last replica"):
        await generator.remove_replica(names[1], "planted")
    with pytest.raises(InfraError, match="is none of"):
        await generator.remove_replica(names[0], "planted")


class Deaf(Busy):
    """A worker that cannot be reached where it is told so; awake, it holds 100 bytes of weights and 10 of caches."""

    def __init__(self, is_deaf: bool) -> None:
        super().__init__()
        self.is_deaf = is_deaf

    def pause(self, mode: PauseMode) -> None:
        if self.is_deaf:
            raise InfraError("the process is gone")
        super().pause(mode)

    def score(self, tokens: tuple[int, ...]) -> list[float]:
        if self.is_deaf:
            raise InfraError("the process is gone")
        return [-float(token) for token in tokens[1:]]

    def sleep(self) -> int:
        self.pause("drain")
        return 110

    def wake(self, tags: tuple[WakeTag, ...]) -> int:
        if self.is_deaf:
            raise InfraError("the process is gone")
        return sum({"weights": 100, "kv_cache": 10}[tag] for tag in tags)


async def test_scores_come_by_name_from_the_replicas_that_can_be_reached() -> None:
    workers = [Deaf(one) for one in (False, True, False)]
    group = InProcessGroup(workers, replicas_of(REQUEST, 3, 1, 10.0))
    generator = PooledGenerator(group, Deaf, REQUEST, 1)  # type: ignore[type-var]
    assert await generator.score([1, 2], 10.0) == {"generation[0]": [-2.0], "generation[2]": [-2.0]}
    await generator.remove_replica("generation[0]", "planted")
    await generator.remove_replica("generation[2]", "planted")
    with pytest.raises(InfraError, match="the process is gone"):
        await generator.score([1, 2], 10.0)


class Mute(Deaf):
    """A deaf one says nothing at all, until it is let go."""

    def score(self, tokens: tuple[int, ...]) -> list[float]:
        if self.is_deaf:
            with self.changed:
                self.changed.wait_for(lambda: self.is_open, timeout=20)
        return [-float(token) for token in tokens[1:]]


async def test_a_replica_that_hangs_holds_the_scores_of_the_others_no_longer_than_it_is_given() -> None:
    workers = [Mute(one) for one in (False, True)]
    group = InProcessGroup(workers, replicas_of(REQUEST, 2, 1, 10.0))
    generator = PooledGenerator(group, Mute, REQUEST, 1)  # type: ignore[type-var]
    async with asyncio.timeout(10):
        assert await generator.score([1, 2], 2.0) == {"generation[0]": [-2.0]}
        await generator.remove_replica("generation[0]", "planted")
        with pytest.raises(InfraError, match="no answer within 0.1 s"):
            await generator.score([1, 2], 0.1)
    workers[1].let_go()


@pytest.mark.parametrize("deaf", [[False], [True, False, False], [True], [True, True]])
async def test_what_sleeps_and_wakes_is_summed_over_the_replicas_that_can_be_reached(deaf: list[bool]) -> None:
    workers = [Deaf(one) for one in deaf]
    group = InProcessGroup(workers, replicas_of(REQUEST, len(workers), 1, 10.0))
    generator = PooledGenerator(group, Deaf, REQUEST, 1)  # type: ignore[type-var]
    if all(deaf):
        for call in (generator.sleep(), generator.wake(WAKE_TAGS)):
            with pytest.raises(InfraError, match="the process is gone"):
                await call
        return
    reached = deaf.count(False)
    assert await generator.sleep() == 110 * reached
    assert await generator.wake(("weights",)) == 100 * reached
    assert await generator.wake(("kv_cache",)) == 10 * reached
    assert [worker.calls["drain"] for worker in workers] == [0 if one else 1 for one in deaf]


async def test_a_replica_that_was_given_up_is_not_asked_to_sleep() -> None:
    workers = [Deaf(False), Deaf(False)]
    group = InProcessGroup(workers, replicas_of(REQUEST, 2, 1, 10.0))
    generator = PooledGenerator(group, Deaf, REQUEST, 1)  # type: ignore[type-var]
    await generator.remove_replica("generation[0]", "planted")
    assert (await generator.sleep(), await generator.wake(WAKE_TAGS)) == (110, 110)
    assert workers[0].calls["drain"] == 0


async def test_what_is_no_matter_of_reach_is_raised_although_others_sleep() -> None:
    workers = [Deaf(False), Deaf(True), Deaf(False)]
    workers[2].pause = refuse  # type: ignore[method-assign]
    group = InProcessGroup(workers, replicas_of(REQUEST, 3, 1, 10.0))
    generator = PooledGenerator(group, Deaf, REQUEST, 1)  # type: ignore[type-var]
    with pytest.raises(WeightSyncError, match="planted"):
        await generator.sleep()


def refuse(mode: PauseMode) -> None:
    raise WeightSyncError("planted")
