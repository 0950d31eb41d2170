"""Gradient sums add over ranks in place, and a missing rank is an error within the deadline."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rl.cluster.rendezvous import serve_store
from rl.cluster.worker_group import WorkerContext
from rl.core.errors import InfraError
from rl.trainer.parallel import GradientSum


def make_context(rank: int, world_size: int, rendezvous: str) -> WorkerContext:
    return WorkerContext("policy", rank, world_size, rank, rendezvous, "cpu", 1, "test")


def test_one_rank_needs_no_meeting_and_changes_nothing() -> None:
    tensor = torch.ones(3)
    GradientSum(make_context(0, 1, ""), 1.0).add_over_ranks([tensor])
    assert tensor.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("world_size", [2, 3])
def test_each_tensor_becomes_its_sum_over_ranks_whatever_its_dtype_and_shape(world_size: int) -> None:
    store, address = serve_store("127.0.0.1")

    def rank_sums(rank: int) -> list[torch.Tensor]:
        tensors = [torch.full((2, 3), rank + 1.0), torch.arange(4.0) * rank, torch.ones(5, dtype=torch.bfloat16)]
        GradientSum(make_context(rank, world_size, address), 60.0).add_over_ranks(tensors)
        return tensors

    with ThreadPoolExecutor(world_size) as pool:
        results = list(pool.map(rank_sums, range(world_size)))
    total = sum(range(world_size))
    for tensors in results:
        assert tensors[0].tolist() == [[total + world_size] * 3] * 2
        assert tensors[1].tolist() == [place * total for place in range(4)]
        assert tensors[2].tolist() == [world_size] * 5
    assert store.port > 0


def test_a_rank_that_never_comes_is_an_infra_error_that_names_the_group() -> None:
    store, address = serve_store("127.0.0.1")
    with pytest.raises(InfraError, match="policy rank 0 of 2"):
        GradientSum(make_context(0, 2, address), 1.0).add_over_ranks([torch.ones(1)])
    assert store.port > 0
