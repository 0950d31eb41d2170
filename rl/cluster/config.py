"""Settings of the `cluster` section: where workers run and with how many threads."""

from typing import Literal

from rl.core.config import ConfigModel, operational


class ThreadsConfig(ConfigModel):
    """CPU threads per worker process of each role; null divides the host's cores sensibly.

    Ray sets OMP_NUM_THREADS=1 in one-CPU actors, so every role gets an explicit count, printed at start.
    """

    policy: int | None = operational(None, ge=1, description="Threads of each trainer process; null = all cores.")
    generation: int | None = operational(None, ge=1, description="Threads of each generator; null = all cores.")


class ClusterConfig(ConfigModel):
    """The machines of a run."""

    kind: Literal["ray", "local"] = operational("ray", description="ray = Ray actors; local = threads in this process.")
    address: str | None = operational(None, description="Address of a running Ray cluster to join; null starts one.")
    num_nodes: int = operational(1, ge=1, description="Nodes of the run.")
    gpus_per_node: int = operational(0, ge=0, description="GPUs per node; 0 = CPU run.")
    start_timeout_s: float = operational(120.0, gt=0, description="Deadline of the start of Ray or of a process, in s.")
    call_timeout_s: float = operational(1800.0, gt=0, description="Deadline of a worker's call or construction, in s.")
    object_store_mib: int = operational(256, ge=80, description="Object store of a Ray that the run starts, in MiB.")
    threads: ThreadsConfig = ThreadsConfig()
