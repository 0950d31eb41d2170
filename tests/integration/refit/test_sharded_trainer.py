"""Trainers that spread their weights over processes send them whole, and never hold them whole themselves."""

import secrets
from typing import Any

import pytest

from rl.core.errors import WeightSyncError
from tests.support.gloo_ranks import in_processes
from tests.support.sharded_trainer import (
    BUCKET_BYTES,
    NUM_LAYERS,
    WIDTH,
    make_stack,
    refit_of_a_sharded_trainer,
    refit_with_a_stopped_rank,
)


def run(world_size: int, kind: str, num_roots: int, dtype: str, width: int, num_layers: int) -> list[dict[str, Any]]:
    channel = f"tdm-test-{secrets.token_hex(6)}"
    return in_processes(
        world_size, refit_of_a_sharded_trainer, kind, num_roots, dtype, channel, width, num_layers, deadline_s=200.0
    )


@pytest.mark.parametrize(
    ("world_size", "kind", "num_roots", "dtype"),
    [
        (2, "fsdp", 0, "float32"),
        (2, "dtensor", 1, "bfloat16"),
        (3, "plain", 0, "bfloat16"),
        (3, "fsdp", 2, "float32"),
        (2, "grid", 0, "float32"),
        (4, "fsdp and tp", 2, "bfloat16"),
    ],
)
def test_shards_of_every_kind_arrive_whole_at_every_reader(
    world_size: int, kind: str, num_roots: int, dtype: str
) -> None:
    results = run(world_size, kind, num_roots, dtype, width=96, num_layers=5)
    sent = 0
    for rank, result in enumerate(results):
        assert result["held"] == result["expected"] == result["received"], rank
        sent |= int.from_bytes(result["sent"], "little")
        assert (result["bytes"] != 0) == (rank < (num_roots or world_size))
    assert sent == int.from_bytes(results[0]["expected"], "little")


def test_a_stopped_rank_is_an_error_on_all_ranks_within_the_deadline_and_new_links_work_when_it_goes_on() -> None:
    results = in_processes(2, refit_with_a_stopped_rank, f"tdm-test-{secrets.token_hex(6)}", 3.0, deadline_s=100.0)
    for result in results:
        assert all(isinstance(error, WeightSyncError) for error in result["errors"]), result["errors"]
        assert result["held"] == result["expected"]
    assert "trainer rank 0 of 2 failed at gathering for a refit" in str(results[0]["errors"][0])
    assert 2.5 < results[0]["seconds"] < 10.0


@pytest.mark.parametrize("kind", ["fsdp", "plain"])
def test_a_refit_needs_memory_for_some_buckets_and_not_for_the_model(kind: str) -> None:
    model_kib = sum(parameter.nbytes for parameter in make_stack(WIDTH, NUM_LAYERS).parameters()) >> 10
    results = run(2, kind, 0, "float32", WIDTH, NUM_LAYERS)
    for result in results:
        assert result["held"] == result["expected"]
        # Slots of the links, mapped by sender and reader; per bucket its shards, their messages, and what came of them.
        assert result["growth_kib"] < 20 * (BUCKET_BYTES >> 10), result["growth_kib"]
        assert result["growth_kib"] < model_kib / 4
