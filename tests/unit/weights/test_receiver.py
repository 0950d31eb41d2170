"""A receiver puts whole tensors where the engine wants them, bit for bit, whatever their shapes and the buckets."""

from contextlib import closing

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl.core.errors import WeightSyncError
from rl.weights.faults import TransferError
from rl.weights.native import digests_of
from rl.weights.receiver import InPlace, Staged, WeightReceiver
from rl.weights.sender import TrainerRank, WeightSender
from rl.weights.source import LocalSource
from rl.weights.transport import RefitStart, TransportName
from tests.support.connected_ends import ConnectedEnds

Tensors = dict[str, Tensor]


def odd_tensors() -> Tensors:
    """Sizes 0, exact fit, three buckets of 4 KiB; 0-dim; not contiguous; mixed dtypes."""
    torch.manual_seed(0)
    return {
        "fits": torch.randn(1024),
        "large": torch.randn(3072),
        "larger": torch.randn(1000, 5),
        "none": torch.empty(0, 7),
        "scalar": torch.tensor(-1.5),
        "turned": torch.randn(33, 17).t(),
        "strided": torch.randn(40, 40)[::2, ::3],
        "halves": torch.randn(77).bfloat16(),
        "bytes": torch.randint(-128, 127, (5, 5), dtype=torch.int8),
        "flags": torch.rand(9) > 0.5,
        "long": torch.tensor([2**40, -1]),
        "doubles": torch.randn(3, dtype=torch.float64),
    }


def blank(tensors: Tensors) -> Tensors:
    return {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}


def assert_same(expected: Tensors, actual: Tensors) -> None:
    assert list(expected) == list(actual)
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_both_ways_of_taking_tensors_deliver_every_bit_and_the_same_digests(transport: TransportName) -> None:
    tensors = odd_tensors()
    targets, kept = blank(tensors), {}
    borrowed: Tensors = {}
    receivers = [
        WeightReceiver(InPlace(targets), "generation[0]"),
        WeightReceiver(Staged(kept.update, keeps_tensors=True), "generation[1]"),
        WeightReceiver(
            Staged(lambda new: borrowed.update({name: tensor.clone() for name, tensor in new}), keeps_tensors=False),
            "generation[2]",
        ),
    ]
    with ConnectedEnds([WeightSender(LocalSource(lambda: tensors))], receivers, transport) as ends:
        for version in (1, 2):
            for tensor in tensors.values():
                tensor.copy_(torch.ones(()) - tensor.float()) if tensor.dtype != torch.bool else tensor.logical_not_()
            kept.clear()
            (report,), received = ends.refit(version)
            for result in (targets, kept, borrowed):
                assert_same(tensors, {name: result[name] for name in tensors})
            assert {one.digests for one in received} == {report.digests}
            assert report.digests == digests_of([tensor.contiguous() for tensor in tensors.values()])
            assert [one.num_tensors for one in received] == [len(tensors)] * 3
            assert report.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
            assert set(received[0].seconds) == {"copy", "digest", "wire", "total", "load"}


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.bool]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    shapes=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 40), max_size=3)), min_size=1, max_size=12
    ),
    bucket_bytes=st.integers(1024, 9000),
    num_roots=st.integers(1, 3),
    keeps=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_tensors_arrive_through_any_buckets_from_any_number_of_roots(
    shapes: list[tuple[torch.dtype, list[int]]], bucket_bytes: int, num_roots: int, keeps: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"t{number}": (torch.randn(shape, generator=generator) * 50).to(dtype)
        for number, (dtype, shape) in enumerate(shapes)
    }
    loaded: Tensors = {}
    sink = Staged(
        lambda new: loaded.update({name: tensor if keeps else tensor.clone() for name, tensor in new}),
        keeps_tensors=keeps,
    )
    targets = blank(tensors)
    receivers = [WeightReceiver(sink, "staged"), WeightReceiver(InPlace(targets), "in place")]
    senders = senders_of(tensors, num_roots)
    with ConnectedEnds(senders, receivers, bucket_bytes=bucket_bytes, num_roots=num_roots) as ends:
        ends.refit(1)
    assert_same(tensors, {name: loaded[name] for name in tensors})
    assert_same(tensors, targets)


def senders_of(tensors: Tensors, num_roots: int) -> list[WeightSender]:
    return [
        WeightSender(LocalSource(lambda: tensors), TrainerRank(rank, num_roots, name=f"policy[{rank}]"))
        for rank in range(num_roots)
    ]


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
def test_casts_on_the_way_are_those_of_torch(wire: torch.dtype, own: torch.dtype) -> None:
    tensors = {"w": torch.randn(50, 30), "b": torch.randn(7).bfloat16(), "d": torch.randn(9, dtype=torch.float64)}
    targets = {name: torch.zeros(tensor.shape, dtype=own) for name, tensor in tensors.items()}
    receiver = WeightReceiver(InPlace(targets), "generation[0]")
    with ConnectedEnds([WeightSender(LocalSource(lambda: tensors, wire))], [receiver]) as ends:
        ends.refit(1)
    for name, tensor in tensors.items():
        assert torch.equal(targets[name], tensor.to(wire).to(own)), name


def test_targets_that_are_not_dense_are_written_through() -> None:
    tensors = {"turned": torch.randn(700, 5), "dense": torch.randn(3)}
    memory = torch.zeros(5, 700)
    targets = {"turned": memory.t(), "dense": torch.zeros(3)}
    receiver = WeightReceiver(InPlace(targets), "generation[0]")
    with ConnectedEnds([WeightSender(LocalSource(lambda: tensors))], [receiver]) as ends:
        (report,), (received,) = ends.refit(1)
    assert torch.equal(memory.t(), tensors["turned"]) and torch.equal(targets["dense"], tensors["dense"])
    assert received.digests == report.digests


def test_tied_names_of_the_engine_are_filled_by_one_tensor() -> None:
    table = torch.zeros(4, 2)
    receiver = WeightReceiver(InPlace({"embed": table, "head": table, "norm": torch.zeros(2)}), "generation[0]")
    tensors = {"embed": torch.randn(4, 2), "norm": torch.ones(2)}
    with ConnectedEnds([WeightSender(LocalSource(lambda: tensors))], [receiver]) as ends:
        ends.refit(1)
    assert torch.equal(table, tensors["embed"])


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ({"w": torch.zeros(2, 3)}, r"g\[0\]: cannot take 'v' of shape \[3\]: the generator's model has no such tensor"),
        ({"w": torch.zeros(3, 2), "v": torch.zeros(3)}, r"cannot take 'w' of shape \[2, 3\]: .* has shape \[3, 2\]"),
        (
            {"w": torch.zeros(2, 3), "v": torch.zeros(3, device="meta")},
            r"cannot take 'v': the generator's is on the device meta",
        ),
        (
            {"w": torch.zeros(2, 3), "v": torch.zeros(3).int()},
            r"cannot take 'v' as float32: the generator's is torch.i",
        ),
        (
            {"w": torch.zeros(2, 3), "v": torch.zeros(3), "x": torch.zeros(1)},
            r"the trainer does not send 'x' \(1 tensors in all\)",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_engine_are_named_before_a_link_is_joined(targets: Tensors, message: str) -> None:
    source = LocalSource(lambda: {"w": torch.ones(2, 3), "v": torch.ones(3)})
    ends = ConnectedEnds([WeightSender(source)], [WeightReceiver(InPlace(targets), "g[0]")], timeout_s=0.5)
    with closing(ends), pytest.raises(WeightSyncError, match=message):
        ends.open()


def test_the_engine_s_own_check_of_the_manifest_is_heard() -> None:
    def refuse(manifest: object) -> None:
        raise WeightSyncError("no")

    receiver = WeightReceiver(Staged(lambda new: None, keeps_tensors=False, check=refuse), "g[0]")
    ends = ConnectedEnds([WeightSender(LocalSource(lambda: {"w": torch.ones(1)}))], [receiver], timeout_s=0.5)
    with closing(ends), pytest.raises(WeightSyncError, match=r"g\[0\]: no"):
        ends.open()


def test_calls_out_of_order_a_second_commit_and_old_epochs_are_refused() -> None:
    tensors = {"w": torch.randn(5)}
    receiver = WeightReceiver(InPlace(blank(tensors)), "g[0]")
    with pytest.raises(WeightSyncError, match="start before the receiver was initialised"):
        receiver.start(RefitStart(1, 1, 1.0))
    with ConnectedEnds([WeightSender(LocalSource(lambda: tensors))], [receiver]) as ends:
        with pytest.raises(WeightSyncError, match="update while the refit is joined"):
            receiver.update()
        ends.refit(1)
        with pytest.raises(WeightSyncError, match="finish while the refit is finished"):
            receiver.finish()
        with pytest.raises(WeightSyncError, match=r"g\[0\]: epoch 1 of version 2 is old; 1 was the last"):
            receiver.start(RefitStart(1, 2, 1.0))
        ends.open()  # new links do not make an old epoch new
        with pytest.raises(WeightSyncError, match="epoch 1 of version 2 is old"):
            receiver.start(RefitStart(1, 2, 1.0))
        ends.refit(2)


def test_a_loader_that_fails_ends_the_sender_with_its_reason_and_needs_new_links() -> None:
    tensors = {f"w{number}": torch.randn(900) for number in range(8)}
    failing = True

    def load(new: list[tuple[str, Tensor]]) -> None:
        if failing and new[0][0] == "w3":
            raise RuntimeError("the layer cannot take it")

    receiver = WeightReceiver(Staged(load, keeps_tensors=False), "g[0]")
    with ConnectedEnds([WeightSender(LocalSource(lambda: tensors))], [receiver]) as ends:
        start = ends.start(1)
        sent, loaded = ends.outcomes([*ends.sends(start), *ends.updates(start)])
        assert isinstance(loaded, RuntimeError)
        assert isinstance(sent, TransferError) and "the layer cannot take it" in str(sent)
        assert sent.reader == 0
        with pytest.raises(WeightSyncError, match="finish while the refit is broken"):
            receiver.finish()
        with pytest.raises(WeightSyncError, match="start of version 2 while the refit is broken"):
            receiver.start(ends.start(2))
        failing = False
        ends.open()
        ends.refit(1)


def test_an_abort_from_another_thread_ends_an_update_that_waits() -> None:
    receiver = WeightReceiver(InPlace({"w": torch.zeros(3)}), "g[0]")
    with ConnectedEnds([WeightSender(LocalSource(lambda: {"w": torch.ones(3)}))], [receiver]) as ends:
        start = ends.start(1)

        def abort() -> None:
            receiver.abort("the driver gave up")
            receiver.abort("again")

        update, aborted = ends.outcomes([*ends.updates(start), abort])
        assert aborted is None
        assert isinstance(update, TransferError) and update.kind == "aborted"
        assert "the driver gave up" in str(update)
    receiver.abort("after the end: nothing happens")


def test_partial_targets_leave_the_rest_bit_identical() -> None:
    engine = {"base": torch.randn(64), "a": torch.zeros(2, 3), "b": torch.zeros(3, 2)}
    before = engine["base"].clone()
    adapters = {"a": torch.randn(2, 3), "b": torch.randn(3, 2)}
    receiver = WeightReceiver(InPlace(engine, is_partial=True), "g[0]")
    with ConnectedEnds([WeightSender(LocalSource(lambda: adapters))], [receiver]) as ends:
        for version in range(1, 6):
            adapters["a"].add_(1.0)
            ends.refit(version)
            assert torch.equal(engine["a"], adapters["a"]) and torch.equal(engine["b"], adapters["b"])
            assert torch.equal(engine["base"], before)
