"""Settings of a refit (`policy.generation.refit_cfg`)."""

from typing import Literal

from pydantic import Field

from rl.core.config import ConfigModel, operational


class RefitConfig(ConfigModel):
    """How weights reach the generators."""

    transport: Literal["shm"] = operational("shm", description="shm = POSIX shared memory on one host.")
    bucket_mib: float = operational(64.0, gt=0, description="Bytes of one bucket, in MiB; a larger tensor is split.")
    timeout_s: float = operational(300.0, gt=0, description="Deadline of one refit, in seconds.")
    pause_mode: Literal["drain", "keep", "abort"] = Field(
        "drain", description="Requests in flight: finish them, freeze and go on after, or abort and retry."
    )
