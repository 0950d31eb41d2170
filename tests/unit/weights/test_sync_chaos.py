"""Random faults in random order: no mixture ever generates, every error names an end, and the next refit works.

In virtual time, with the fakes that check the contract themselves (epochs grow, dead links are not used, no engine is
loaded while it generates).
"""

import asyncio
from dataclasses import dataclass
from typing import Any, cast

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl.core.errors import InfraError, WeightSyncError
from rl.weights.attempt import PATIENCE
from rl.weights.config import RefitConfig
from rl.weights.faults import FIRST_READER, TransferError
from rl.weights.report import TRAINER, RefitError
from rl.weights.sync import WeightSync
from tests.support.refit_fakes import NAMES, FakeFleet, FakeReplica, FakeSender, word
from tests.support.virtual_loop import VirtualLoop, run_virtually

TIMEOUT_S = 60.0
# An attempt ends by its deadline, plus what the driver allows for last words; so does each of its retries.
LONGEST_ATTEMPT_S = 2 * (TIMEOUT_S + PATIENCE.late + PATIENCE.abort + PATIENCE.end)
UPDATES = tuple(f"update {position}" for position in range(len(NAMES)))
REPLICA_PHASES = ("pause", "init", "start", *UPDATES, "finish", "resume")
SENDER_PHASES = ("open", "join", *(f"send {position}" for position in range(len(NAMES))))
KINDS = ("raise once", "raise", "infra once", "die", "hang", "stop", "slow", "stale", "silent ack", "partition")


@dataclass(frozen=True)
class Fault:
    """Of the replica with this number (modulo those that are left)."""

    replica: int
    kind: str
    phase: str


@dataclass(frozen=True)
class Publish:
    """A refit, what goes wrong in it, and when somebody loses patience, in turns of the loop."""

    faults: tuple[Fault, ...]
    sender: tuple[str, str] | None
    cancel_after: int | None


FAULTS = st.builds(Fault, st.integers(0, 3), st.sampled_from(KINDS), st.sampled_from(REPLICA_PHASES))
SENDER = st.tuples(st.sampled_from(["raise once", "raise", "hang"]), st.sampled_from(SENDER_PHASES))
PUBLISH = st.builds(
    Publish, st.lists(FAULTS, max_size=2).map(tuple), st.none() | SENDER, st.none() | st.integers(0, 60)
)
STEPS = st.lists(PUBLISH | st.sampled_from(["pause", "resume"]), min_size=1, max_size=6)


class World:
    """A trainer, a fleet, and somebody who samples whenever the fleet is not paused."""

    def __init__(self, num_replicas: int, min_replicas: int) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.loop = loop
        self.sender = FakeSender()
        self.fleet = FakeFleet(self.sender, num_replicas)
        self.min_replicas = min_replicas
        config = RefitConfig(timeout_s=TIMEOUT_S, min_replicas=min_replicas)
        self.sync = WeightSync(self.sender, cast(Any, self.fleet), config, "tdm-chaos", loop)
        self.version = -1

    def sample(self) -> None:
        """Engines that generate hold one version, the one they say."""
        for name, version in self.fleet.sampled():
            assert version <= self.version + 1, f"{name} generates with a version that nobody published"

    async def publish(self, step: Publish) -> None:
        """One refit with its faults; what must be true after it."""
        for fault in step.faults:
            arm(self.fleet.replicas[fault.replica % self.fleet.num_replicas], fault)
        if step.sender is not None:
            arm_sender(self.sender, *step.sender)
        version, before, started = self.version + 1, self.sync.version, self.loop.time()
        living = {replica.replica for replica in self.fleet.replicas}
        task = asyncio.ensure_future(self.sync.publish(version))
        if step.cancel_after is not None:
            for _ in range(step.cancel_after):
                await asyncio.sleep(0)
            task.cancel()
        try:
            report = await task
        except asyncio.CancelledError:
            assert step.cancel_after is not None
            assert self.sync.version == before
        except RefitError as error:
            assert self.fleet.is_paused or error.phase in ("pause", "resume")
            assert self.sync.version == before
            assert error.end in {TRAINER, "every end", *living}
            guilty = {fault.kind for fault in step.faults} | ({step.sender[0]} if step.sender else set())
            assert guilty - {"slow"}, f"nobody did anything, but: {error}"
        else:
            self.version = version
            self.check_holds(version)
            assert report.replicas == self.fleet.num_replicas
        attempts = 2 + len(living) - self.fleet.num_replicas
        assert self.loop.time() - started <= attempts * LONGEST_ATTEMPT_S
        assert self.fleet.num_replicas >= self.min_replicas
        self.heal()

    def check_holds(self, version: int) -> None:
        """Everybody who is left generates with the version."""
        assert not self.fleet.is_paused
        assert (self.sync.state, self.sync.version) == ("CLEAN", version)
        for replica in self.fleet.replicas:
            assert (replica.version, replica.weights) == (version, {name: word(name, version) for name in NAMES})

    def heal(self) -> None:
        """Everything works again; the dead were replaced."""
        self.sender.at, self.sender.hang_at = (lambda phase: None), None
        for replica in self.fleet.replicas:
            replica.heal()
            replica.is_dead = False


def arm(replica: FakeReplica, fault: Fault) -> None:
    """Let the fault happen when its phase comes."""
    if fault.kind == "hang":
        replica.hang_at = fault.phase
    elif fault.kind == "stop":
        replica.is_stopped = True
    elif fault.kind == "slow":
        replica.laziness = 7
    elif fault.kind == "stale":
        replica.change = lambda one: one if NAMES[2] not in one else f"{one}?"
    elif fault.kind == "silent ack":
        replica.change_ack = lambda ack: None
    else:
        replica.at = _when(replica, fault)


def _when(replica: FakeReplica, fault: Fault) -> Any:
    def act(phase: str) -> None:
        if phase != fault.phase:
            return
        if fault.kind in ("raise once", "infra once"):
            replica.at = lambda phase: None
        if fault.kind == "die":
            replica.die()
        elif fault.kind == "partition":
            if replica._wire is not None:
                replica._wire.break_off(TransferError("reset by peer", "peer lost", FIRST_READER + replica.first))
        else:
            raise (InfraError if fault.kind == "infra once" else RuntimeError)(f"{fault.kind} at {phase}")

    return act


def arm_sender(sender: FakeSender, kind: str, at: str) -> None:
    """The same for the trainer."""
    if kind == "hang":
        sender.hang_at = at
        return

    def act(phase: str) -> None:
        if phase == at:
            if kind == "raise once":
                sender.at = lambda phase: None
            raise RuntimeError(f"{kind} at {phase}")

    sender.at = act


async def play(steps: list[Any], num_replicas: int, min_replicas: int) -> None:
    world = World(num_replicas, min_replicas)
    await world.sync.connect()
    world.loop.on_turn = world.sample
    for step in steps:
        if isinstance(step, Publish):
            await world.publish(step)
        elif step == "pause":
            await asyncio.gather(*(replica.pause("keep") for replica in world.fleet.replicas))
        elif world.sync.state == "CLEAN" and world.sync.version is not None:
            await asyncio.gather(
                *(replica.resume() for replica in world.fleet.replicas)
            )  # whoever resumes a DIRTY fleet asks for a mixture
    await world.sync.publish(world.version + 1)
    world.check_holds(world.version + 1)
    assert asyncio.all_tasks() == {asyncio.current_task()}, "a call of a refit outlives it"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS, num_replicas=st.integers(1, 3), min_replicas=st.integers(1, 2))
def test_no_order_of_faults_lets_a_mixture_generate_or_stops_the_next_refit(
    steps: list[Any], num_replicas: int, min_replicas: int
) -> None:
    run_virtually(play(steps, num_replicas, min(min_replicas, num_replicas)))


def test_links_that_cannot_be_made_again_leave_the_generator_paused() -> None:
    """A refit that was given up has no links any more, and the next one fails before it has any."""
    run_virtually(play([Publish((), None, 33), Publish((), ("raise", "open"), None)], 1, 1))


def test_versions_that_nobody_published_are_noticed_by_the_watcher() -> None:
    """The test's own eye: a mixture in an engine that generates is seen."""

    async def mixed() -> None:
        world = World(1, 1)
        await world.sync.connect()
        await world.sync.publish(0)
        world.version = 0
        world.fleet.replicas[0].weights[NAMES[0]] = word(NAMES[0], 9)
        try:
            world.fleet.sampled()
        except AssertionError:
            return
        raise WeightSyncError("the mixture was not seen")

    run_virtually(mixed())
