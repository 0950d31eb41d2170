"""Settings of a refit (`policy.generation.refit_cfg`), and what its open choices come to."""

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from rl.core.config import ConfigModel, operational
from rl.weights.transport import LinkSettings, TransportName

_MIB = 1 << 20
# Small slots of shared memory stay in the cache between the two copies; a wire wants fewer, larger messages.
_BUCKET_MIB: dict[TransportName, float] = {"shm": 1.0, "tcp": 4.0, "nccl": 512.0}
# Slots cost memory on both ends, on a GPU the one that the model wants.
_NUM_BUFFERS: dict[TransportName, int] = {"shm": 4, "tcp": 4, "nccl": 2}
# Mean |difference| in nats over the probe's tokens that rounding stays below. Measured with a model of 135M: at most
# 1.6e-5, and 0.11 in bfloat16, whose logits of 16 to 32 are multiples of 1/8.
_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.3}
_CHECK_EVERY_ON_GPUS = 20
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_LOOPBACK = "127.0.0.1"


class RefitConfig(ConfigModel):
    """How weights reach the generators, and how that is proved."""

    transport: Literal["auto", "shm", "tcp", "nccl"] = operational(
        "auto",
        description="shm = shared memory of one host; tcp = between hosts; nccl = between GPUs; "
        "auto = nccl with GPUs, shm on one host, else tcp.",
    )
    bucket_mib: float | None = operational(
        None,
        ge=0.001,
        le=1048576,
        description="Size of one bucket, in MiB; a larger tensor is split. null = 1 (shm), 4 (tcp) or 512 (nccl).",
    )
    num_buffers: int | None = operational(
        None, ge=2, le=65536, description="Buckets under way at once; null = 4 (shm, tcp) or 2 (nccl)."
    )
    host: str | None = operational(
        None,
        min_length=1,
        description="tcp: the address at which the trainer listens and is reached, IPv4, IPv6 or a name; null = "
        "127.0.0.1 where everything is on one host, else each sending rank's own on the network that leads outside.",
    )
    silence_s: float = operational(
        20.0, ge=0.5, le=86400, description="tcp: a peer that says nothing for so long, in seconds, is lost."
    )
    timeout_s: float = operational(
        300.0,
        gt=0,
        description="Deadline of one attempt, in seconds; a refit that fails is tried once more. Also that of a probe.",
    )
    pause_mode: Literal["drain", "keep", "abort"] = Field(
        "drain", description="Requests in flight: finish them, freeze and go on after, or abort and retry."
    )
    recompute_kv_cache_after_weight_updates: bool = Field(
        True,
        description="pause_mode keep: frozen requests compute their keys and values again with the new weights; "
        "false = they go on with those of the old ones.",
    )
    min_replicas: int = operational(
        1, ge=1, description="A replica that dies in a refit is given up as long as so many are left."
    )
    check_every: int | None = operational(
        None, ge=1, description="Steps between two probes that both sides score; null = 1 on a CPU, 20 with GPUs."
    )
    check_tolerance: float | None = operational(
        None,
        gt=0,
        description="Mean difference of a probe, in nats, that stops the run; null = 0.0001 (float32), 0.3 (bfloat16).",
    )
    servers: list[str] = operational(
        [],
        description="URLs of vLLM servers that Tandem did not start; each gets every version. How to start one: "
        "docs/refit.md.",
    )

    @field_validator("host")
    @classmethod
    def _is_an_address(cls, host: str | None) -> str | None:
        bare = host if host is None else host.removeprefix("[").removesuffix("]")
        if bare in ("0.0.0.0", "::"):
            raise ValueError(
                f"nobody can be reached at '{host}'; write the address by which generators reach the trainer"
            )
        return bare

    @field_validator("servers")
    @classmethod
    def _are_urls(cls, servers: list[str]) -> list[str]:
        for url in servers:
            if not _is_server(url):
                raise ValueError(f"'{url}' is no URL of a server; write for example http://10.0.0.7:8000")
            if urlsplit(url).path.rstrip("/").endswith("/v1"):
                raise ValueError(f"'{url}' is where a server's clients ask; leave out /v1")
        twice = next((url for position, url in enumerate(servers) if url in servers[:position]), None)
        if twice is not None:
            raise ValueError(f"'{twice}' stands twice; a server is refitted once per version")
        return servers

    def transport_for(self, *, on_gpus: bool, num_hosts: int) -> TransportName:
        """Return the transport, where auto decides by where trainer and engines are."""
        if self.transport != "auto":
            return self.transport
        if on_gpus:
            return "nccl"
        return "shm" if num_hosts == 1 and not self.remote_servers else "tcp"

    @property
    def remote_servers(self) -> list[str]:
        """Servers that are, by their URL, not on this host."""
        return [url for url in self.servers if urlsplit(url).hostname not in _LOCAL_HOSTS]

    @property
    def host_is_local(self) -> bool:
        """Whether only processes of the trainer's own host reach it at `host`."""
        return self.host in _LOCAL_HOSTS

    def link_for(self, *, num_hosts: int) -> LinkSettings:
        """Return what the ends of a link are told; roots on several hosts find their addresses themselves."""
        is_one_host = num_hosts == 1 and not self.remote_servers
        host = self.host or (_LOOPBACK if is_one_host else "")
        return LinkSettings(host=host, silence_s=self.silence_s)

    def bucket_bytes_for(self, transport: TransportName) -> int:
        """Return the capacity of a bucket."""
        return int((_BUCKET_MIB[transport] if self.bucket_mib is None else self.bucket_mib) * _MIB)

    def num_buffers_for(self, transport: TransportName) -> int:
        """Return the number of buckets under way at once."""
        return _NUM_BUFFERS[transport] if self.num_buffers is None else self.num_buffers

    def check_every_for(self, *, on_gpus: bool) -> int:
        """Return the steps between two probes."""
        if self.check_every is not None:
            return self.check_every
        return _CHECK_EVERY_ON_GPUS if on_gpus else 1

    def tolerance_for(self, precision: str) -> float:
        """Return the mean difference of a probe that ends the run.

        Args:
            precision: Torch dtype name of weights and arithmetic ("float32", "bfloat16").
        """
        return rounding_below(precision) if self.check_tolerance is None else self.check_tolerance


def _is_server(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port beyond 65535, or half an IPv6 address
        return False


def rounding_below(precision: str) -> float:
    """Return the mean difference of a probe, in nats, that is no rounding any more."""
    return _TOLERANCE[precision]
