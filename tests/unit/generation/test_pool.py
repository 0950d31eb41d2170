"""The driver's side: which replica gets a request."""

from rl.cluster.worker_group import WorkerRequest
from rl.core.types import Completion, FinishReason, VersionSpan
from rl.generation.generator import SamplingParams
from rl.generation.pool import NO_VERSION, PooledGenerator
from tests.support.local_group import InProcessGroup

PARAMS = SamplingParams(1.0, 1.0, None, 4, (), (), 0)


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

    def health(self) -> None:
        if self.closed:
            raise RuntimeError("closed")


def pool(replicas: int) -> tuple[PooledGenerator[Worker], list[Worker]]:  # type: ignore[type-var]
    workers = [Worker() for _ in range(replicas)]
    group = InProcessGroup(workers, WorkerRequest("generation", replicas, 1, 0, 4, 10.0))
    return PooledGenerator(group, Worker, 64), workers  # type: ignore[type-var]


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
    assert await generator.check_health() == [True, True]
    await generator.close()
    await generator.close()
    assert [worker.closed for worker in workers] == [1, 1]
