"""A sender sends what its source yields, in lockstep with the other ranks, and tells everybody when it cannot."""

import time
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from rl.core.errors import WeightSyncError
from rl.weights.adapters import MergedSource, split_adapters
from rl.weights.boxes import chunks
from rl.weights.faults import TransferError
from rl.weights.receiver import InPlace, Staged, WeightReceiver
from rl.weights.sender import TrainerRank, WeightSender
from rl.weights.shards import MakeGroup, Part, ShardedSource
from rl.weights.signature import signature_of
from rl.weights.source import LocalSource
from rl.weights.transport import LinkSettings, OpenRequest, RefitStart, StoredTensor
from tests.support.connected_ends import ConnectedEnds
from tests.support.gloo_ranks import group_makers, in_threads

Tensors = dict[str, Tensor]


def model() -> Tensors:
    torch.manual_seed(7)
    return {
        "embed": torch.randn(90, 40),
        "up": torch.randn(64, 40),
        "down": torch.randn(40, 64),
        "norm": torch.ones(40),
        "none": torch.randn(0, 3),
        "scale": torch.tensor(3.0),
    }


def blank(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def parts_of(tensors: Tensors, rank: int, world_size: int) -> dict[str, Tensor | Part]:
    axes = {"embed": 0, "up": 0, "down": 1, "none": 0}
    parts: dict[str, Tensor | Part] = dict(tensors)
    for name, axis in axes.items():
        extents = chunks(tensors[name].shape[axis], world_size)
        parts[name] = Part(tensors[name].narrow(axis, sum(extents[:rank]), extents[rank]), axis, extents)
    return parts


def sharded_senders(
    tensors: Tensors, makers: Sequence[MakeGroup], dtype: torch.dtype | None = None
) -> list[WeightSender]:
    size = len(makers)
    return [
        WeightSender(
            ShardedSource(lambda rank=rank: parts_of(tensors, rank, size), rank, size, maker, dtype),
            TrainerRank(rank, size, name=f"policy[{rank}]"),
        )
        for rank, maker in enumerate(makers)
    ]


@pytest.mark.parametrize(("world_size", "num_roots"), [(1, 0), (2, 0), (2, 1), (3, 0), (3, 2)])
def test_shards_of_all_ranks_reach_every_reader_whole(world_size: int, num_roots: int) -> None:
    tensors = model()
    targets = [blank(tensors), blank(tensors)]
    receivers = [WeightReceiver(InPlace(one), f"generation[{reader}]") for reader, one in enumerate(targets)]
    makers = group_makers(world_size)
    senders = sharded_senders(tensors, makers)
    with ConnectedEnds(senders, receivers, num_roots=num_roots) as ends:
        assert len(ends.info.addresses) == (num_roots or world_size)
        for version in (1, 2):
            tensors["up"].mul_(-2.0)
            reports, received = ends.refit(version)
            for one in targets:
                assert all(torch.equal(one[name], tensor) for name, tensor in tensors.items())
            merged = sum(int.from_bytes(report.digests, "little") for report in reports)
            assert {int.from_bytes(one.digests, "little") for one in received} == {merged}
            assert sum(report.num_bytes for report in reports) == sum(t.nbytes for t in tensors.values())


def test_shards_are_cast_before_they_cross_and_equal_the_whole_cast() -> None:
    tensors = model()
    targets = {name: torch.zeros(tensor.shape, dtype=torch.bfloat16) for name, tensor in tensors.items()}
    senders = sharded_senders(tensors, group_makers(2), torch.bfloat16)
    with ConnectedEnds(senders, [WeightReceiver(InPlace(targets), "g[0]")]) as ends:
        ends.refit(1)
    assert all(torch.equal(targets[name], tensor.bfloat16()) for name, tensor in tensors.items())


def test_several_roots_of_replicated_weights_send_a_part_each() -> None:
    tensors = model()
    target = blank(tensors)
    senders = [WeightSender(LocalSource(lambda: tensors), TrainerRank(rank, 3, name=f"p[{rank}]")) for rank in range(3)]
    receiver = WeightReceiver(InPlace(target), "g[0]")
    with ConnectedEnds(senders, [receiver]) as ends:
        assert len(ends.info.addresses) == 1
        reports, _ = ends.refit(1)
        assert [report.num_bytes > 0 for report in reports] == [True, False, False]
    ends = ConnectedEnds(senders, [receiver], num_roots=2)
    ends.epoch = 1
    with ends:
        tensors["down"].zero_()
        reports, _ = ends.refit(2)
        assert [report.num_bytes > 0 for report in reports] == [True, True, False]
    assert all(torch.equal(target[name], tensor) for name, tensor in tensors.items())
    with pytest.raises(WeightSyncError, match="4 trainer ranks shall send, there are 3"):
        ConnectedEnds(senders, [receiver], num_roots=4).open()


def test_merged_adapters_arrive_as_the_sum_and_a_change_of_an_adapter_changes_the_weight() -> None:
    torch.manual_seed(1)
    named = {
        "q.base_layer.weight": torch.randn(30, 20),
        "q.lora_A.default.weight": torch.randn(4, 20),
        "q.lora_B.default.weight": torch.zeros(30, 4),
        "norm.weight": torch.ones(20),
    }
    base, adapters, pairs = split_adapters(named, 2.0)
    source = MergedSource(LocalSource(lambda: base), LocalSource(lambda: adapters), pairs)
    target = {"q.weight": torch.zeros(30, 20), "norm.weight": torch.zeros(20)}
    with ConnectedEnds([WeightSender(source)], [WeightReceiver(InPlace(target), "g[0]")]) as ends:
        ends.refit(1)
        assert torch.equal(target["q.weight"], base["q.weight"])
        adapters["q.lora_B.weight"].normal_()
        ends.refit(2)
    expected = base["q.weight"] + 2.0 * (adapters["q.lora_B.weight"] @ adapters["q.lora_A.weight"])
    torch.testing.assert_close(target["q.weight"], expected, rtol=2e-6, atol=2e-6)
    assert not torch.equal(target["q.weight"], base["q.weight"])


@pytest.mark.parametrize("is_sharded", [False, True])
def test_receivers_that_store_parts_get_only_those(is_sharded: bool) -> None:
    tensors = model()
    halves = [(StoredTensor("up", (32 * rank, 0), (32, 40)), StoredTensor("norm", (0,), (40,))) for rank in range(2)]
    for rank, layout in enumerate(halves):
        target = {"up": torch.zeros(32, 40), "norm": torch.zeros(40)}
        makers = group_makers(2) if is_sharded else []
        senders = sharded_senders(tensors, makers) if is_sharded else [WeightSender(LocalSource(lambda: tensors))]
        with ConnectedEnds(senders, [WeightReceiver(InPlace(target), "g[0]")], layout=layout) as ends:
            reports, _ = ends.refit(1)
        assert torch.equal(target["up"], tensors["up"][32 * rank : 32 * (rank + 1)])
        assert torch.equal(target["norm"], tensors["norm"])
        assert sum(report.num_bytes for report in reports) == 4 * (32 * 40 + 40)


def test_a_rank_whose_tensors_changed_ends_all_ranks_and_the_readers_within_the_step() -> None:
    tensors = model()
    shapes = [dict(tensors), dict(tensors)]
    makers = group_makers(2)
    senders = [
        WeightSender(
            ShardedSource(lambda rank=rank: parts_of(shapes[rank], rank, 2), rank, 2, maker),
            TrainerRank(rank, 2, name=f"policy[{rank}]"),
        )
        for rank, maker in enumerate(makers)
    ]
    receiver = WeightReceiver(InPlace(blank(tensors)), "g[0]")
    with ConnectedEnds(senders, [receiver], num_roots=1) as ends:
        shapes[1]["up"] = torch.randn(66, 40)
        start = ends.start(1)
        first, second, update = ends.outcomes([*ends.sends(start), *ends.updates(start)])
        assert isinstance(second, WeightSyncError) and "'up' float32[64, 40], got 'up' float32[66, 40]" in str(second)
        assert isinstance(first, TransferError) and first.kind == "aborted"
        assert isinstance(update, TransferError) and update.root == 0
        shapes[1]["up"] = tensors["up"]
        ends.open()
        ends.refit(1)


def test_a_reader_that_fails_ends_all_ranks_of_a_sharded_trainer() -> None:
    tensors = model()

    def load(new: list[tuple[str, Tensor]]) -> None:
        raise RuntimeError("no memory")

    senders = sharded_senders(tensors, group_makers(3))
    with ConnectedEnds(senders, [WeightReceiver(Staged(load, keeps_tensors=False), "g[0]")]) as ends:
        start = ends.start(1)
        outcomes = ends.outcomes([*ends.sends(start), *ends.updates(start)])
        assert all(isinstance(outcome, TransferError) for outcome in outcomes[:3])
        assert any("no memory" in str(outcome) for outcome in outcomes[:3])


class Failing(ShardedSource):
    """Fails on its own between two collectives, once."""

    failure: BaseException | None = None

    def tensors(self, indices: Sequence[int], root: int | None = None) -> list[Tensor]:
        if 2 in indices and self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        return super().tensors(indices, root)


@pytest.mark.parametrize("failure", [MemoryError("no room for 'down'"), KeyboardInterrupt(), SystemExit(3)])
def test_a_rank_that_fails_alone_ends_all_ends_long_before_the_deadline_and_the_next_links_work(
    failure: BaseException,
) -> None:
    tensors = model()
    sources = [
        Failing(lambda rank=rank: parts_of(tensors, rank, 3), rank, 3, maker)
        for rank, maker in enumerate(group_makers(3))
    ]
    sources[1].failure = failure
    target = blank(tensors)
    senders = [
        WeightSender(source, TrainerRank(rank, 3, name=f"policy[{rank}]")) for rank, source in enumerate(sources)
    ]
    with ConnectedEnds(senders, [WeightReceiver(InPlace(target), "g[0]")], timeout_s=60.0) as ends:
        start = ends.start(1)
        begin = time.monotonic()
        outcomes = ends.outcomes([*ends.sends(start), *ends.updates(start)])
        assert time.monotonic() - begin < 20.0
        assert outcomes.pop(1) is failure
        assert all(isinstance(outcome, WeightSyncError) for outcome in outcomes), outcomes
        assert isinstance(outcomes[2], TransferError) and outcomes[2].root is not None
        ends.open()
        ends.refit(1)
    assert all(torch.equal(target[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), SystemExit(3)])
def test_an_interrupt_in_a_readers_loader_ends_the_sender_at_once(failure: BaseException) -> None:
    def load(new: list[tuple[str, Tensor]]) -> None:
        raise failure

    reader = WeightReceiver(Staged(load, keeps_tensors=False), "g[0]")
    with ConnectedEnds([WeightSender(LocalSource(model))], [reader], timeout_s=60.0) as ends:
        start = ends.start(1)
        begin = time.monotonic()
        sent, updated = ends.outcomes([*ends.sends(start), *ends.updates(start)])
        assert time.monotonic() - begin < 20.0
        assert updated is failure
        assert (
            isinstance(sent, TransferError) and sent.reader == 0 and (str(failure) or "KeyboardInterrupt") in str(sent)
        )


def test_an_abort_ends_every_rank_also_one_that_only_gathers() -> None:
    tensors = model()
    senders = sharded_senders(tensors, group_makers(2))
    receiver = WeightReceiver(InPlace(blank(tensors)), "g[0]")
    with ConnectedEnds(senders, [receiver], num_roots=1) as ends:
        start = ends.start(1)  # nobody receives: the root waits for a free slot

        def abort() -> None:
            for sender in senders:
                sender.abort("the driver gave up")

        first, second, aborted = ends.outcomes([*ends.sends(start), abort])
        assert aborted is None
        for outcome in (first, second):
            assert isinstance(outcome, TransferError) and outcome.kind == "aborted"
        assert "the driver gave up" in str(first)


def test_old_epochs_closed_senders_and_foreign_plans_are_refused() -> None:
    tensors = model()
    sender = WeightSender(LocalSource(lambda: tensors))
    with pytest.raises(WeightSyncError, match=r"policy\[0\]: send of version 3, but the sender is not open"):
        sender.send(RefitStart(1, 3, 1.0))
    receiver = WeightReceiver(InPlace(blank(tensors)), "g[0]")
    with ConnectedEnds([sender], [receiver]) as ends:
        ends.refit(1)
        with pytest.raises(WeightSyncError, match=r"epoch 1 of version 2 is old; 1 was the last"):
            sender.send(RefitStart(1, 2, 1.0))
        request = OpenRequest("shm", "tdm-test-never", 4096, 2, ("g[0]",), 1.0, LinkSettings(1.0))
        blob, digest = WeightSender(LocalSource(lambda: {"embed": torch.ones(2)})).plan(request)
        with pytest.raises(
            WeightSyncError, match=r"tensor 0: expected 'embed' float32\[2\], got 'embed' float32\[90, 40"
        ):
            sender.open(blob, digest, request)
        with pytest.raises(WeightSyncError, match="digest"):
            sender.open(blob, "0" * 16, request)
    with pytest.raises(WeightSyncError, match="at least one tensor"):
        WeightSender(LocalSource(dict)).plan(request)


def test_signatures_are_those_of_the_tensors_as_they_travel() -> None:
    tensors = model()
    whole = WeightSender(LocalSource(lambda: tensors, torch.bfloat16)).signatures(5.0)
    assert whole == {name: signature_of(name, tensor.bfloat16()) for name, tensor in tensors.items()}

    def sign(rank: int, make_group: MakeGroup) -> object:
        source = ShardedSource(lambda: parts_of(tensors, rank, 2), rank, 2, make_group, torch.bfloat16)
        source.connect("links-1", 30.0)
        return WeightSender(source, TrainerRank(rank, 2)).signatures(30.0)

    assert in_threads(2, sign) == [whole, whole]


@pytest.mark.parametrize("host", ["192.0.2.1", "::", "no-such-host.invalid"])
def test_an_address_at_which_the_trainer_cannot_listen_is_named_by_its_key(host: str) -> None:
    sender = WeightSender(LocalSource(lambda: {"w": torch.ones(3)}))
    request = OpenRequest("tcp", "", 1 << 16, 2, ("generation[0].0",), 5.0, LinkSettings(5.0, host=host))
    with pytest.raises(TransferError, match=f"^policy.generation.refit_cfg.host={host}: .*{host}") as caught:
        sender.open(*sender.plan(request), request)
    assert caught.value.kind in ("unavailable", "invalid")
