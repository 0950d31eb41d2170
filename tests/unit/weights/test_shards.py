"""Parts of several ranks become whole tensors, on the rank that wants them; ranks that fail let the others know."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from rl.core.errors import WeightSyncError
from rl.weights.boxes import chunks
from rl.weights.shards import MakeGroup, Part, ShardedSource
from tests.support.gloo_ranks import in_threads


def whole_tensors() -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {
        "rows": torch.randn(7, 5),
        "columns": torch.randn(4, 9),
        "transposed": torch.randn(6, 4).t(),
        "middle": torch.randn(2, 5, 3),
        "few": torch.randn(1, 2),
        "none": torch.randn(0, 4),
        "bytes": torch.randint(-128, 127, (11,), dtype=torch.int8),
        "halves": torch.randn(5, 3).bfloat16(),
        "scalar": torch.tensor(2.5),
        "everywhere": torch.randn(3),
    }


AXES = {"rows": 0, "columns": 1, "transposed": 1, "middle": 1, "few": 0, "none": 0, "bytes": 0, "halves": 0}


def parts_of(tensors: Mapping[str, Tensor], rank: int, world_size: int) -> dict[str, Tensor | Part]:
    """The parts of a rank; axes are spread as torch.distributed does."""
    found: dict[str, Tensor | Part] = {}
    for name, tensor in tensors.items():
        if name not in AXES:
            found[name] = tensor.clone()
            continue
        extents = chunks(tensor.shape[AXES[name]], world_size)
        local = tensor.narrow(AXES[name], sum(extents[:rank]), extents[rank])
        found[name] = Part(local, AXES[name], extents)
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("root", [None, 0])
def test_tensors_of_any_split_come_out_whole_where_they_are_wanted(world_size: int, root: int | None) -> None:
    tensors = whole_tensors()

    def gather(rank: int, make_group: MakeGroup) -> list[Tensor]:
        source = ShardedSource(lambda: parts_of(tensors, rank, world_size), rank, world_size, make_group)
        assert [(spec.name, spec.shape) for spec in source.manifest()] == [
            (name, tuple(tensor.shape)) for name, tensor in tensors.items()
        ]
        source.connect("links-1", 30.0)
        source.begin(30.0)
        try:
            return source.tensors([4, 0, 5, 6, 1, 2, 3, 7, 8, 9], root)
        finally:
            source.end()

    names = [list(tensors)[index] for index in (4, 0, 5, 6, 1, 2, 3, 7, 8, 9)]
    for rank, found in enumerate(in_threads(world_size, gather)):
        if root not in (None, rank):
            assert found == []
            continue
        for name, tensor in zip(names, found, strict=True):
            assert tensor.is_contiguous() and tensor.dtype == tensors[name].dtype
            torch.testing.assert_close(tensor, tensors[name], rtol=0, atol=0)


def test_parts_cross_in_the_dtype_of_the_wire_and_equal_the_whole_cast() -> None:
    tensors = whole_tensors()

    def gather(rank: int, make_group: MakeGroup) -> list[Tensor]:
        source = ShardedSource(lambda: parts_of(tensors, rank, 2), rank, 2, make_group, torch.bfloat16)
        specs = source.manifest()
        assert [spec.dtype for spec in specs[:2]] == ["bfloat16", "bfloat16"] and specs[6].dtype == "int8"
        source.connect("links-1", 30.0)
        source.begin(30.0)
        return source.tensors([0, 1, 6])

    for found in in_threads(2, gather):
        assert torch.equal(found[0], tensors["rows"].bfloat16())
        assert torch.equal(found[1], tensors["columns"].bfloat16())
        assert torch.equal(found[2], tensors["bytes"])


def test_a_tied_weight_travels_once_also_from_a_rank_that_has_none_of_it() -> None:
    table = torch.randn(1, 3)  # one row: rank 1 has none

    def names(rank: int, make_group: MakeGroup) -> list[str]:
        extents = chunks(1, 2)
        local = table.narrow(0, sum(extents[:rank]), extents[rank])
        part = Part(local, 0, extents)
        source = ShardedSource(lambda: {"embed": part, "norm": torch.ones(3), "head": part}, rank, 2, make_group)
        return [spec.name for spec in source.manifest()]

    assert in_threads(2, names) == [["embed", "norm"], ["embed", "norm"]]


def test_all_ranks_learn_that_one_is_not_well() -> None:
    def agree(rank: int, make_group: MakeGroup) -> tuple[bool, bool]:
        source = ShardedSource(lambda: {"w": torch.ones(2)}, rank, 3, make_group)
        source.manifest()
        source.connect("links-1", 30.0)
        source.begin(30.0)
        return source.agree(True), source.agree(rank != 1)

    assert in_threads(3, agree) == [(True, False)] * 3


def test_a_rank_that_stays_away_is_an_error_within_the_deadline_of_the_refit() -> None:
    def gather(rank: int, make_group: MakeGroup) -> str:
        source = ShardedSource(lambda: {"w": Part(torch.ones(2), 0, (2, 2))}, rank, 2, make_group)
        source.manifest()
        source.connect("links-1", 30.0)
        source.begin(0.5)
        if rank == 1:
            return ""
        with pytest.raises(WeightSyncError, match="rank 0 of 2 failed at gathering") as caught:
            source.tensors([0])
        return str(caught.value)

    assert "another rank has died, hangs or gave up" in in_threads(2, gather)[0]


def test_parts_that_are_not_the_whole_tensor_together_are_an_error_on_every_rank() -> None:
    def gather(rank: int, make_group: MakeGroup) -> str:
        extents = ((2, 2), (1, 3))[rank]
        source = ShardedSource(lambda: {"w": Part(torch.ones(extents[rank], 3), 0, extents)}, rank, 2, make_group)
        source.manifest()
        source.connect("links-1", 30.0)
        source.begin(30.0)
        with pytest.raises(WeightSyncError) as caught:
            source.tensors([0], root=0)
        return str(caught.value)

    text = "the parts of all ranks have 15 numbers of 'w' [4, 3], not 12: [2, 3] at [0, 0], [3, 3] at [1, 0]"
    assert in_threads(2, gather) == [text] * 2


def test_a_rank_that_spreads_otherwise_than_when_it_met_the_others_needs_new_links() -> None:
    def gather(rank: int, make_group: MakeGroup) -> list[Tensor]:
        extents = [(2, 2)]
        whole = torch.arange(12.0).reshape(4, 3)

        def part() -> Part:
            return Part(whole.split(extents[0])[rank], 0, extents[0])

        source = ShardedSource(lambda: {"w": part()}, rank, 2, make_group)
        source.manifest()
        source.connect("links-1", 30.0)
        source.begin(30.0)
        assert torch.equal(source.tensors([0])[0], whole)
        extents[0] = (1, 3)
        with pytest.raises(WeightSyncError, match=r"of 'w', but \[2, 3\] at .* when it met the others"):
            source.begin(30.0)
        source.connect("links-2", 30.0)
        source.begin(30.0)
        return source.tensors([0])

    for (found,) in in_threads(2, gather):
        assert torch.equal(found, torch.arange(12.0).reshape(4, 3))


def test_a_part_of_the_wrong_size_and_changed_tensors_are_named() -> None:
    def try_both(rank: int, make_group: MakeGroup) -> None:
        parts: dict[str, Tensor | Part] = {"w": Part(torch.ones(2, 3), 0, (2, 2))}
        source = ShardedSource(lambda: parts, rank, 2, make_group)
        source.manifest()
        parts["w"] = Part(torch.ones(2, 4), 0, (2, 2))
        with pytest.raises(WeightSyncError, match=r"'w' float32\[4, 3\], got 'w' float32\[4, 4\]"):
            source.begin(1.0)
        parts["w"] = Part(torch.ones(3, 3), 0, (2, 2))
        with pytest.raises(
            WeightSyncError, match=r"shape \[3, 3\] of 'w' \[4, 3\]; as it is spread it should have \[2, 3\]"
        ):
            source.manifest()

    in_threads(2, try_both)
