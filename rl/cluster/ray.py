"""Workers as Ray actors: starts or joins a Ray cluster, places workers by resources, and calls them with deadlines.

The only file of this package that knows Ray. It does not keep workers alive: a dead worker is an InfraError for the
caller, who may `restart` it. What Ray leaves behind after any death of the driver is the reaper's business
(`rl.core.resources`).
"""

import asyncio
import contextlib
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

import psutil
import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rl.cluster.calls import CalledGroup
from rl.cluster.config import ClusterConfig
from rl.cluster.daemon_pool import DaemonPool, run_or_undo
from rl.cluster.devices import count_gpus
from rl.cluster.environment import (
    exchanged_environment,
    import_variables,
    quiet_variables,
    thread_variables,
    worker_environment,
)
from rl.cluster.host import Failure, HostFacts, Success, WorkerHost, death_notice, last_lines, memory_shortage
from rl.cluster.worker_group import WorkerContext, WorkerGroup, WorkerRequest
from rl.core.concurrency import gather_or_cancel
from rl.core.errors import ConfigError, InfraError, RLError
from rl.core.resources import RunResources

W = TypeVar("W")
P = ParamSpec("P")

CONTROL = "control"
# Each worker takes one CPU slot. Slots bound the number of processes, not their threads, which are explicit.
OWN_CPU_SLOTS = 64
HEALTH_TIMEOUT_S = 10.0
KILL_TIMEOUT_S = 5.0
FREE_TIMEOUT_S = 10.0
FREE_POLL_S = 0.1
PLAIN_TYPES = (int, float, str, bytes, bool, type(None))


class HostActor(WorkerHost):
    """WorkerHost as an actor; these methods are called in the control group, which answers while the worker is busy."""

    def where(self) -> HostFacts:
        """Say where this process runs."""
        return self.facts(ray.get_runtime_context().get_node_id())

    def open_rendezvous(self) -> str:
        """Serve the store of the group's collectives."""
        return self.serve_rendezvous(ray.util.get_node_ip_address())


def control(method: Any) -> Any:
    """Call an actor's method on its control threads; return the reference of the result."""
    return method.options(concurrency_group=CONTROL).remote()


@dataclass
class RaySlot:
    """One worker process: its actor, where it runs, and its place in the placement group."""

    actor: Any
    facts: HostFacts
    context: WorkerContext | None = None


@dataclass(frozen=True)
class Blueprint:
    """How the workers of a group are built and what they inherit."""

    build: tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]
    environment: dict[str, str]
    run_tag: str
    start_timeout_s: float
    node: str


class RayWorkerGroup(CalledGroup[W]):
    """A WorkerGroup of Ray actors."""

    def __init__(self, request: WorkerRequest, blueprint: Blueprint, placement: PlacementGroup | None) -> None:
        super().__init__(request)
        self._blueprint = blueprint
        self._placement = placement
        self._slots: list[RaySlot] = []
        self._closed = False

    async def start(self) -> None:
        """Start the processes, agree on a rendezvous, and construct the workers, all ranks at once."""
        ranks = range(self.world_size)
        actors = [self._create(rank) for rank in ranks]
        self._slots = [RaySlot(actor, HostFacts(0, "", "", "")) for actor in actors]
        facts = await gather_or_cancel([self._start_call(rank, control(actors[rank].where)) for rank in ranks])
        for slot, found in zip(self._slots, facts, strict=True):
            slot.facts = found
        rendezvous = ""
        if self.world_size > 1:
            rendezvous = await self._start_call(0, control(actors[0].open_rendezvous))
        for rank, slot in enumerate(self._slots):
            slot.context = self._context(rank, rendezvous)
        await gather_or_cancel([self._construct(rank) for rank in ranks])

    async def check_health(self) -> list[bool]:
        """Whether each worker's process answers; a busy worker does."""
        return list(await asyncio.gather(*(self._answers(slot) for slot in self._slots)))

    async def restart(self, rank: int) -> None:
        """Replace one worker by a fresh process. The rendezvous of a collective group is not renewed for its peers."""
        self.check_rank(rank)
        if self._closed:
            raise self.closed(rank, "restart")
        old = self._slots[rank]
        await asyncio.to_thread(self._kill, [old])
        actor = self._create(rank)
        self._slots[rank] = RaySlot(actor, HostFacts(0, "", "", ""), old.context)
        self._slots[rank].facts = await self._start_call(rank, control(actor.where))
        if rank == 0 and self.world_size > 1:
            rendezvous = await self._start_call(0, control(actor.open_rendezvous))
            self._slots[0].context = self._context(0, rendezvous)
        await self._construct(rank)

    async def close(self) -> None:
        """End all workers and their child processes; idempotent."""
        if self._closed:
            return
        self._closed = True
        await asyncio.to_thread(self._kill, self._slots)
        if self._placement is not None:
            remove_placement_group(self._placement)

    def _create(self, rank: int) -> Any:
        request = self.request
        options: dict[str, Any] = {
            "num_cpus": 1,
            "num_gpus": request.gpus_per_worker,
            "max_concurrency": request.concurrency,
            "max_restarts": 0,
            "name": f"{request.name}-{rank}-{secrets.token_hex(3)}",
            "runtime_env": {"env_vars": self._blueprint.environment},
        }
        if self._placement is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group=self._placement, placement_group_bundle_index=rank
            )
        return ray.remote(concurrency_groups={CONTROL: 2})(HostActor).options(**options).remote()

    def _context(self, rank: int, rendezvous: str) -> WorkerContext:
        node = self._slots[rank].facts.node
        return WorkerContext(
            name=self.request.name,
            rank=rank,
            world_size=self.world_size,
            local_rank=sum(slot.facts.node == node for slot in self._slots[:rank]),
            rendezvous=rendezvous,
            # Ray shows each worker only its own GPUs, numbered from 0.
            device="cuda:0" if self.request.gpus_per_worker else "cpu",
            num_threads=self.request.num_threads,
            run_tag=self._blueprint.run_tag,
        )

    async def _construct(self, rank: int) -> None:
        slot = self._slots[rank]
        worker_class, args, kwargs = self._blueprint.build
        # Loading a model may take far longer than starting a process: construction has the deadline of a call.
        deadline_s = max(self._blueprint.start_timeout_s, self.request.call_timeout_s)
        reference = slot.actor.build.remote(worker_class, slot.context, args, kwargs)
        outcome = await self._await(rank, "its start", reference, deadline_s)
        if isinstance(outcome, Success):
            return
        error = outcome.error(f"{self.label(rank)}.__init__")
        tail = self._tail(slot)
        if isinstance(error, RLError):
            error.add_note(tail)
            raise error
        raise InfraError(f"{self.label(rank)} could not be built: {outcome.summary}{tail}") from error

    async def _start_call(self, rank: int, reference: Any) -> Any:
        return await self._await(rank, "its start", reference, self._blueprint.start_timeout_s)

    async def _invoke(self, rank: int, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self._closed:
            raise self.closed(rank, method)
        # References must stand at the top level of a call to be fetched: hence the flat argument list.
        reference = self._slots[rank].actor.invoke_flat.remote(method, tuple(kwargs), *args, *kwargs.values())
        outcome: Success | Failure = await self._await(rank, method, reference, self.request.call_timeout_s)
        if isinstance(outcome, Success):
            return outcome.value
        raise outcome.error(f"{self.label(rank)}.{method}")

    async def _await(self, rank: int, method: str, reference: Any, timeout_s: float) -> Any:
        """Wait for a reference; turn Ray's errors and the deadline into InfraError."""
        slot = self._slots[rank]
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(reference.future())
        except TimeoutError as error:
            problem = self.overdue(rank, method, timeout_s)
            problem.add_note(self._tail(slot))
            raise problem from error
        except RayActorError as error:
            where = f"pid {slot.facts.pid} on {slot.facts.hostname}" if slot.facts.pid else "not yet started"
            story = f"died during {method}: {death_notice(str(error))}{self._tail(slot)}"
            raise InfraError(f"{self.label(rank)} ({where}) {story}") from error
        except OutOfMemoryError as error:
            raise InfraError(f"{self.label(rank)} ended during {method}: {memory_shortage(str(error))}") from error
        except RayError as error:
            raise InfraError(f"{self.label(rank)} failed in {method}: {error}{self._tail(slot)}") from error

    async def _answers(self, slot: RaySlot) -> bool:
        if self._closed:
            return False
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                await asyncio.wrap_future(control(slot.actor.where).future())
        except (TimeoutError, RayError):
            return False
        return True

    def _share(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Store each large argument once, however many workers fetch it."""
        if self.world_size == 1:
            return arguments
        return tuple(value if isinstance(value, PLAIN_TYPES) else ray.put(value) for value in arguments)

    def _tail(self, slot: RaySlot) -> str:
        """The worker's last lines on standard error, for a message; says where they are when they are elsewhere."""
        if slot.facts.node != self._blueprint.node:
            return f"\nits standard error: {slot.facts.stderr_path} on {slot.facts.hostname}" if slot.facts.pid else ""
        lines = last_lines(slot.facts.stderr_path)
        return f"\nlast lines of its standard error ({slot.facts.stderr_path}):\n{lines}" if lines else ""

    def _kill(self, slots: Sequence[RaySlot]) -> None:
        """End processes and, on this node, whatever they started."""
        family: list[psutil.Process] = []
        for slot in slots:
            if slot.facts.pid and slot.facts.node == self._blueprint.node:
                family += family_of(slot.facts.pid)
            ray.kill(slot.actor, no_restart=True)
        own = {slot.facts.pid for slot in slots}
        for process in family:
            if process.pid not in own:
                signal_process(process, psutil.Process.terminate)
        _, alive = psutil.wait_procs(family, timeout=KILL_TIMEOUT_S)
        for process in alive:
            signal_process(process, psutil.Process.kill)


def family_of(pid: int) -> list[psutil.Process]:
    """A process and its descendants; empty when it is gone."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def signal_process(process: psutil.Process, action: Callable[[psutil.Process], None]) -> None:
    """Signal a process that may have ended meanwhile."""
    with contextlib.suppress(psutil.NoSuchProcess):
        action(process)


class RayVirtualCluster:
    """A Cluster over Ray, started by the run or joined."""

    def __init__(self, config: ClusterConfig, run: RunResources, ray_thread: DaemonPool) -> None:
        self._config = config
        self._run = run
        self._ray_thread = ray_thread
        self._groups: list[RayWorkerGroup[Any]] = []
        self._open = True

    async def start_workers(
        self,
        worker_class: Callable[Concatenate[WorkerContext, P], W],
        request: WorkerRequest,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> WorkerGroup[W]:
        """Start a group; each worker is built as `worker_class(context, *args, **kwargs)` in its own process."""
        await check_resources(request)
        blueprint = Blueprint(
            build=(worker_class, args, dict(kwargs)),
            environment=self._worker_variables(request),
            run_tag=self._run.tag,
            start_timeout_s=self._config.start_timeout_s,
            node=ray.get_runtime_context().get_node_id(),
        )
        group = RayWorkerGroup[W](request, blueprint, await self._place(request))
        try:
            await group.start()
        except BaseException:
            await group.close()
            raise
        self._groups.append(group)
        return group

    async def shutdown(self) -> None:
        """Close every group, then end Ray, or leave it if it was joined; idempotent."""
        if not self._open:
            return
        self._open = False
        try:
            await gather_or_cancel([group.close() for group in self._groups])
        finally:
            ending = self._ray_thread.submit(ray.shutdown)
            self._ray_thread.close()
            await asyncio.wrap_future(ending)

    def _worker_variables(self, request: WorkerRequest) -> dict[str, str]:
        threads = thread_variables(request.num_threads, os.environ)
        return self._run.environment() | quiet_variables(os.environ) | import_variables() | threads

    async def _place(self, request: WorkerRequest) -> PlacementGroup | None:
        """Reserve the GPUs of a group: one bundle for each worker, neighbours together."""
        if request.gpus_per_worker == 0:
            return None
        bundles = [{"CPU": 1, "GPU": request.gpus_per_worker} for _ in range(request.num_workers)]
        placement = placement_group(bundles, strategy="PACK")
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                await asyncio.wrap_future(placement.ready().future())
        except TimeoutError as error:
            remove_placement_group(placement)
            raise InfraError(
                f"Ray did not reserve {len(bundles)} bundles of {bundles[0]} for group {request.name} within "
                f"cluster.start_timeout_s={self._config.start_timeout_s:g} s; other work may hold the GPUs"
            ) from error
        return placement


async def check_resources(request: WorkerRequest) -> None:
    """Refuse a group that the cluster cannot hold, before anything waits for it.

    What Ray calls free lags behind: a new node's slots and those of an ended worker appear a moment later.

    Raises:
        ConfigError: the cluster is too small, or stays too busy for FREE_TIMEOUT_S.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    total = {name: sum(node.get(name, 0.0) for node in nodes) for name in ("CPU", "GPU")}
    most = max((node.get("GPU", 0.0) for node in nodes), default=0.0)
    can_fit = fits(request, total) and request.gpus_per_worker <= most
    deadline = asyncio.get_running_loop().time() + FREE_TIMEOUT_S
    while not fits(request, free := ray.available_resources()) or not can_fit:
        if not can_fit or asyncio.get_running_loop().time() > deadline:
            offered = ", ".join(f"{free.get(name, 0.0):g} of {total[name]:g} {name} slots" for name in total)
            raise ConfigError(
                f"group {request.name} wants {request.num_workers} CPU slots and "
                f"{request.num_workers * request.gpus_per_worker} GPU slots "
                f"({request.num_workers} workers x {request.gpus_per_worker} GPUs); free in the cluster: {offered}; "
                f"largest node: {most:g} GPUs; "
                "ask for less, or set cluster.gpus_per_node or cluster.address to a cluster that has them"
            )
        await asyncio.sleep(FREE_POLL_S)


def fits(request: WorkerRequest, slots: Mapping[str, float]) -> bool:
    """Whether `slots` hold all workers of the group."""
    gpus = request.num_workers * request.gpus_per_worker
    return request.num_workers <= slots.get("CPU", 0.0) and gpus <= slots.get("GPU", 0.0)


async def start_ray(config: ClusterConfig, run: RunResources) -> RayVirtualCluster:
    """Start a Ray for this run, or join the one at `cluster.address`.

    Raises:
        ConfigError: this process has a Ray already, or the configuration asks for nodes or GPUs that are not there.
        InfraError: Ray did not start.
    """
    if ray.is_initialized():
        raise ConfigError("this process is connected to a Ray cluster already; shut that down first (one per process)")
    settings = join_settings(config) if config.address is not None else own_settings(config, run)
    # Ray's processes die with the thread that started them, so the thread lives as long as the cluster.
    ray_thread = DaemonPool("ray", 1)
    start = partial(connect, settings, ray_variables(config))
    try:
        await run_or_undo(ray_thread, start, ray.shutdown, config.start_timeout_s)
    except TimeoutError as error:
        raise InfraError(f"Ray did not start within cluster.start_timeout_s={config.start_timeout_s:g} s") from error
    except (RayError, RuntimeError, ConnectionError, ValueError) as error:
        raise InfraError(f"Ray did not start ({settings.get('address', 'own cluster')}): {error}") from error
    cluster = RayVirtualCluster(config, run, ray_thread)
    alive = sum(bool(node["Alive"]) for node in ray.nodes())
    if alive < config.num_nodes:
        await cluster.shutdown()
        raise ConfigError(f"cluster.num_nodes={config.num_nodes}, but Ray has {alive} nodes; start the others")
    return cluster


def own_settings(config: ClusterConfig, run: RunResources) -> dict[str, Any]:
    """Arguments of ray.init for a cluster of this run alone."""
    if config.num_nodes > 1:
        raise ConfigError(
            f"cluster.num_nodes={config.num_nodes} needs a running Ray cluster over those nodes; set cluster.address"
        )
    present = count_gpus()
    if config.gpus_per_node > present:
        raise ConfigError(
            f"cluster.gpus_per_node={config.gpus_per_node}, but this host shows {present} GPUs; lower it, or set "
            "cluster.address to a cluster that has them"
        )
    return {
        # Without it Ray would join the cluster that RAY_ADDRESS names.
        "address": "local",
        "_temp_dir": str(run.temp_dir / "r"),
        "num_cpus": max(OWN_CPU_SLOTS, os.cpu_count() or 1),
        "num_gpus": config.gpus_per_node,
        "object_store_memory": config.object_store_mib << 20,
        "include_dashboard": False,
        # Idle workers without our environment would be started for every slot and never used.
        "_system_config": {"prestart_worker_first_driver": False, "enable_worker_prestart": False},
    }


def join_settings(config: ClusterConfig) -> dict[str, Any]:
    """Arguments of ray.init for a cluster that somebody else runs."""
    return {"address": config.address}


def ray_variables(config: ClusterConfig) -> dict[str, str]:
    """Variables that Ray's own processes get beside the allow-list."""
    variables = quiet_variables(os.environ) | {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    chosen = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & set(os.environ)
    if config.address is None and not chosen:
        # A token of our own, so that Ray writes none to the home folder. Ray reads it once per process and keeps it, so
        # later clusters of this process must have the same one. Ray itself switches its authentication on.
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    return variables


def connect(settings: Mapping[str, Any], variables: Mapping[str, str]) -> None:
    """Run ray.init with the environment that workers may inherit."""
    with exchanged_environment(worker_environment(os.environ) | dict(variables)):
        ray.init(**settings, log_to_driver=False, logging_level="ERROR")
