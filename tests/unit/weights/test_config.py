"""What the open choices of a refit come to."""

from typing import Any

import pytest
from pydantic import ValidationError

from rl.weights.config import RefitConfig


@pytest.mark.parametrize(
    ("settings", "on_gpus", "hosts", "transport"),
    [
        ({}, False, 1, "shm"),
        ({}, False, 2, "tcp"),
        ({}, True, 1, "nccl"),
        ({}, True, 4, "nccl"),
        ({"servers": ["http://localhost:8000"]}, False, 1, "shm"),
        ({"servers": ["http://[::1]:8000"]}, False, 1, "shm"),
        ({"servers": ["http://10.0.0.7:8000"]}, False, 1, "tcp"),
        ({"transport": "tcp"}, True, 1, "tcp"),
    ],
)
def test_the_transport_follows_where_trainer_and_engines_are(
    settings: dict[str, Any], on_gpus: bool, hosts: int, transport: str
) -> None:
    assert RefitConfig(**settings).transport_for(on_gpus=on_gpus, num_hosts=hosts) == transport


@pytest.mark.parametrize(
    ("settings", "hosts", "host"),
    [
        ({}, 1, "127.0.0.1"),
        ({}, 2, ""),
        ({"servers": ["http://10.0.0.7:8000"]}, 1, ""),
        ({"servers": ["http://localhost:8000"]}, 1, "127.0.0.1"),
        ({"host": "10.0.0.7"}, 1, "10.0.0.7"),
        ({"host": "[fd00::7]"}, 3, "fd00::7"),
    ],
)
def test_the_trainer_is_reached_at_the_loopback_of_one_host_else_at_its_own_address(
    settings: dict[str, Any], hosts: int, host: str
) -> None:
    link = RefitConfig(**settings, silence_s=7.0).link_for(num_hosts=hosts)
    assert (link.host, link.silence_s) == (host, 7.0)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]"])
def test_an_address_that_nobody_can_reach_is_refused(host: str) -> None:
    with pytest.raises(ValidationError, match="nobody can be reached"):
        RefitConfig(host=host)


@pytest.mark.parametrize("silence_s", [0.4, 86401.0])
def test_a_silence_has_bounds(silence_s: float) -> None:
    with pytest.raises(ValidationError, match="silence_s"):
        RefitConfig(silence_s=silence_s)


def test_sizes_are_the_transports_unless_they_are_set() -> None:
    config = RefitConfig()
    assert [config.bucket_bytes_for(name) >> 20 for name in ("shm", "tcp", "nccl")] == [1, 4, 512]
    assert [config.num_buffers_for(name) for name in ("shm", "tcp", "nccl")] == [4, 4, 2]
    config = RefitConfig(bucket_mib=0.5, num_buffers=3)
    assert (config.bucket_bytes_for("nccl"), config.num_buffers_for("shm")) == (1 << 19, 3)


def test_a_bucket_too_small_for_a_piece_is_refused_at_once() -> None:
    """Pieces begin at multiples of 1 KiB: less than that, and a plan could not be made."""
    with pytest.raises(ValidationError, match="bucket_mib"):
        RefitConfig(bucket_mib=0.0009)
    assert RefitConfig(bucket_mib=0.001).bucket_bytes_for("shm") >= 1024


@pytest.mark.parametrize(
    ("key", "value"), [("num_buffers", 1), ("num_buffers", 65537), ("bucket_mib", 1e13), ("bucket_mib", float("inf"))]
)
def test_sizes_that_no_link_has_are_refused_by_their_key(key: str, value: float) -> None:
    with pytest.raises(ValidationError, match=key):
        RefitConfig.model_validate({key: value})


def test_the_probe_is_rarer_on_gpus_and_as_strict_as_the_precision_allows() -> None:
    config = RefitConfig()
    assert (config.check_every_for(on_gpus=False), config.check_every_for(on_gpus=True)) == (1, 20)
    assert config.tolerance_for("float32") < config.tolerance_for("bfloat16")
    config = RefitConfig(check_every=7, check_tolerance=0.5)
    assert (config.check_every_for(on_gpus=True), config.tolerance_for("float32")) == (7, 0.5)


@pytest.mark.parametrize(
    ("servers", "words"),
    [
        (["10.0.0.7:8000"], "is no URL"),
        (["ftp://a"], "is no URL"),
        (["http://a:99999"], "is no URL"),
        (["http://a:0"], "is no URL"),
        (["http://[::1:8000"], "is no URL"),
        (["http://a:8000/v1/"], "leave out /v1"),
        (["http://a", "http://a"], "stands twice"),
    ],
)
def test_servers_are_urls(servers: list[str], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        RefitConfig(servers=servers)
