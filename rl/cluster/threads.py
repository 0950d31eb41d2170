"""How the host's cores are divided among trainer and generators. It starts no thread and sets no count."""

from dataclasses import dataclass

from rl.cluster.config import ThreadsConfig
from rl.core.resources import usable_cores


@dataclass(frozen=True)
class ThreadPlan:
    """CPU threads of each worker by role.

    Attributes:
        policy: Threads of each trainer process.
        generation: Threads of each generator process.
        cores: Cores that this host gives the run.
        overlapping: Whether trainer and generator work at the same time.
    """

    policy: int
    generation: int
    cores: int
    overlapping: bool

    def describe(self) -> str:
        """One line for the start of a run."""
        manner = "at the same time" if self.overlapping else "in turns"
        return f"threads: policy {self.policy}, generation {self.generation}, working {manner} on {self.cores} cores"


def thread_plan(
    threads: ThreadsConfig,
    overlapping: bool,
    policy_workers: int = 1,
    generation_workers: int = 1,
    cores: int | None = None,
) -> ThreadPlan:
    """Divide the host's cores among the roles.

    Explicit counts are taken as they are. Otherwise each role divides its cores among its workers: all cores when
    trainer and generator work in turns, half of them each when they overlap.

    Args:
        threads: The explicit counts.
        overlapping: Whether trainer and generator work at the same time.
        policy_workers: Trainer processes on this host.
        generation_workers: Generator processes on this host.
        cores: Cores to divide; None asks the host.
    """
    total = cores if cores is not None else usable_cores()
    policy_cores = max(1, total // 2) if overlapping else total
    generation_cores = max(1, total - policy_cores) if overlapping else total
    policy = max(1, policy_cores // policy_workers)
    generation = max(1, generation_cores // generation_workers)
    return ThreadPlan(
        policy=threads.policy if threads.policy is not None else policy,
        generation=threads.generation if threads.generation is not None else generation,
        cores=total,
        overlapping=overlapping,
    )
