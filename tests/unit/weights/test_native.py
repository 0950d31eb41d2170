"""The native transfer as Python sees it: plans, both ends over real links, errors that say who and where."""

import base64
import math
import pickle
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl.core.errors import WeightSyncError
from rl.weights.faults import TransferError
from rl.weights.native import Finished, LinkOptions, NativeReceiver, NativeSender, Plan, digests_of
from rl.weights.refit_library import WIRE_DTYPES, WIRE_NAMES
from rl.weights.transport import RefitStart, TensorSpec, TransportName

TIMEOUT_S = 30.0
OURS = f"tandem-test-{secrets.token_hex(6)}"
SILENCE_S = 20.0
KIB = 1 << 10
TRANSPORTS: tuple[TransportName, ...] = ("shm", "tcp")
SPECS = (
    TensorSpec("embed", "float32", (300, 40)),
    TensorSpec("norm", "bfloat16", (77,)),
    TensorSpec("empty", "float16", (0, 3)),
    TensorSpec("scale", "float64", ()),
    TensorSpec("codes", "int8", (3, 5)),
    TensorSpec("mask", "bool", (33,)),
    TensorSpec("head", "float8_e4m3fn", (129,)),
)


def random_tensor(spec: TensorSpec, seed: int) -> Tensor:
    """Any bits of the dtype, NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    dtype = WIRE_DTYPES[WIRE_NAMES.index(spec.dtype)]
    if dtype == torch.bool:
        return torch.randint(0, 2, spec.shape, generator=generator).bool()
    bits = torch.randint(0, 256, (math.prod(spec.shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).reshape(spec.shape)


def bits_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def per_bucket(plan: Plan, tensors: Sequence[Tensor], root: int | None = None) -> list[list[Tensor]]:
    return [[tensors[p.tensor] for p in b.pieces] for b in plan.buckets if root in (None, b.root)]


class Group:
    """All ends of a transfer, each in a thread of its own."""

    def __init__(self, plan: Plan, transport: TransportName, num_readers: int = 1, digests: bool = True) -> None:
        self.plan = plan
        host = "127.0.0.1" if transport == "tcp" else ""
        options = LinkOptions(transport, 3, num_readers, SILENCE_S, digests=digests, host=host)
        channel = f"{OURS}-{id(self)}"
        self.senders = [NativeSender(plan, root, f"{channel}-{root}", options) for root in range(plan.num_roots)]
        self.pool = ThreadPoolExecutor(plan.num_roots + num_readers)
        waits = [self.pool.submit(sender.join, TIMEOUT_S) for sender in self.senders]
        addresses = [sender.address for sender in self.senders]
        self.receivers = [NativeReceiver(plan, reader, addresses, options) for reader in range(num_readers)]
        waits += [self.pool.submit(receiver.join, TIMEOUT_S) for receiver in self.receivers]
        for wait in waits:
            wait.result(TIMEOUT_S)

    def send(self, root: int, tensors: Sequence[Tensor], start: RefitStart) -> Finished:
        sender = self.senders[root]
        sender.begin(start)
        own = self.plan.buckets_of(root)
        sender.send(own[0] if own else 0, per_bucket(self.plan, tensors, root))
        return sender.finish()

    def receive(self, reader: int, tensors: Sequence[Tensor], start: RefitStart) -> Finished:
        receiver = self.receivers[reader]
        receiver.begin(start)
        receiver.receive(0, per_bucket(self.plan, tensors))
        return receiver.finish()

    def run(self, source: Sequence[Tensor], targets: Sequence[Sequence[Tensor]], start: RefitStart) -> list[Finished]:
        """Return what every end says, senders first; raises the first error."""
        calls = [self.pool.submit(self.send, root, source, start) for root in range(len(self.senders))]
        calls += [self.pool.submit(self.receive, reader, targets[reader], start) for reader in range(len(targets))]
        return [call.result(TIMEOUT_S) for call in calls]

    def close(self) -> None:
        for end in [*self.receivers, *self.senders]:
            end.close()
        self.pool.shutdown()


@pytest.fixture
def group() -> Iterator[Group]:
    with closing(Group(Plan.build(SPECS, 8 * KIB), "shm")) as made:
        yield made


def start(epoch: int, version: int = 1, timeout_s: float = TIMEOUT_S) -> RefitStart:
    return RefitStart(epoch, version, timeout_s)


def zeros(specs: Sequence[TensorSpec]) -> list[Tensor]:
    return [torch.zeros_like(random_tensor(spec, 0)) for spec in specs]


# ---- Plans ----

specs = st.lists(
    st.tuples(st.sampled_from(WIRE_NAMES), st.lists(st.integers(0, 60), max_size=3)), min_size=1, max_size=8
).map(lambda rows: [TensorSpec(f"t{i}.weight", dtype, tuple(shape)) for i, (dtype, shape) in enumerate(rows)])


@given(specs, st.integers(1, 200), st.integers(1, 3))
@settings(deadline=None, max_examples=100)
def test_a_plan_carries_every_byte_once_and_survives_the_trip(
    manifest: list[TensorSpec], bucket_kib: int, num_roots: int
) -> None:
    plan = Plan.build(manifest, bucket_kib * KIB, num_roots)
    read = Plan.parse(plan.blob, plan.digest)
    assert (read.tensors, read.buckets) == (tuple(manifest), plan.buckets)
    assert (read.bucket_bytes, read.total_bytes, read.num_roots) == (plan.bucket_bytes, plan.total_bytes, num_roots)
    assert plan.total_bytes == sum(random_tensor(spec, 0).nbytes for spec in manifest)
    for index, spec in enumerate(manifest):
        pieces = sorted(piece for bucket in plan.buckets for piece in bucket.pieces if piece.tensor == index)
        ends = [0, *(piece.tensor_offset + piece.size for piece in pieces)]
        assert [piece.tensor_offset for piece in pieces] == ends[:-1]
        assert ends[-1] == random_tensor(spec, 0).nbytes
    for bucket in plan.buckets:
        assert {piece.tensor % num_roots for piece in bucket.pieces} == {bucket.root}
        assert all(piece.bucket_offset + piece.size <= bucket_kib * KIB for piece in bucket.pieces)


def test_a_plan_pickles() -> None:
    plan = Plan.build(SPECS, 4 * KIB)
    assert pickle.loads(pickle.dumps(plan)).buckets == plan.buckets


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        ((), "want at least one tensor"),
        ((SPECS[0], SPECS[0]), "embed"),
        ((TensorSpec("phase", "complex64", (2,)),), "'phase' has dtype complex64"),
        ((TensorSpec("odd", "float32", (-1, 2)),), "odd"),
    ],
)
def test_a_manifest_that_cannot_travel_is_refused_by_name(manifest: Sequence[TensorSpec], words: str) -> None:
    with pytest.raises(WeightSyncError, match=words):
        Plan.build(manifest, 4 * KIB)


def test_bytes_that_are_no_plan_or_another_one_are_refused() -> None:
    plan, other = Plan.build(SPECS, 4 * KIB), Plan.build(SPECS, 8 * KIB)
    with pytest.raises(TransferError) as caught:
        Plan.parse(plan.blob[:-3], plan.digest)
    assert caught.value.kind == "mismatch"
    with pytest.raises(WeightSyncError, match=f"has digest {other.digest}.*announced {plan.digest}"):
        Plan.parse(other.blob, plan.digest)


# ---- Transfers ----


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("num_roots", "num_readers"), [(1, 1), (1, 3), (2, 2)])
def test_tensors_of_every_kind_arrive_bit_for_bit(transport: TransportName, num_roots: int, num_readers: int) -> None:
    plan = Plan.build(SPECS, 8 * KIB, num_roots)
    with closing(Group(plan, transport, num_readers)) as group:
        for epoch in (1, 2):
            source = [random_tensor(spec, 10 * epoch + i) for i, spec in enumerate(SPECS)]
            targets = [zeros(SPECS) for _ in range(num_readers)]
            done = group.run(source, targets, start(epoch))
            assert [finished.digests for finished in done[num_roots:]] == [digests_of(source)] * num_readers
            for target in targets:
                assert [bits_of(tensor) for tensor in target] == [bits_of(tensor) for tensor in source]


@given(specs, st.integers(1, 200), st.sampled_from(TRANSPORTS))
@settings(deadline=None, max_examples=20)
def test_any_manifest_arrives_whatever_the_bucket(
    manifest: list[TensorSpec], bucket_kib: int, transport: TransportName
) -> None:
    source, target = [random_tensor(spec, i) for i, spec in enumerate(manifest)], zeros(manifest)
    with closing(Group(Plan.build(manifest, bucket_kib * KIB), transport)) as group:
        sent, received = group.run(source, [target], start(1))
    assert [bits_of(tensor) for tensor in target] == [bits_of(tensor) for tensor in source]
    assert sent.digests == received.digests == digests_of(source)


def test_floats_are_cast_into_the_wire_and_out_of_it() -> None:
    plan = Plan.build([TensorSpec("w", "bfloat16", (200, 70))], 4 * KIB)
    source = torch.randn(200, 70, generator=torch.Generator().manual_seed(1))
    wide, half = torch.zeros(200, 70), torch.zeros(200, 70, dtype=torch.float16)
    with closing(Group(plan, "shm", 2)) as group:
        sent, *_ = group.run([source], [[wide], [half]], start(1))
    assert torch.equal(wide, source.bfloat16().float())
    assert torch.equal(half, source.bfloat16().half())
    assert sent.digests == digests_of([source.bfloat16()])


def test_without_digests_everything_arrives_and_nothing_is_claimed() -> None:
    source, target = [random_tensor(spec, 1) for spec in SPECS], zeros(SPECS)
    with closing(Group(Plan.build(SPECS, 8 * KIB), "shm", digests=False)) as group:
        sent, received = group.run(source, [target], start(1))
    assert [bits_of(tensor) for tensor in target] == [bits_of(tensor) for tensor in source]
    assert sent.digests == received.digests == bytes(8 * len(SPECS))


def test_seconds_are_told_by_part(group: Group) -> None:
    for finished in group.run(zeros(SPECS), [zeros(SPECS)], start(1)):
        parts = dict(finished.seconds)
        total = parts.pop("total")
        assert set(parts) == {"copy", "digest", "wire"}
        assert 0 < sum(parts.values()) <= total


def test_buckets_may_be_handed_over_one_at_a_time(group: Group) -> None:
    source, target = [random_tensor(spec, 4) for spec in SPECS], zeros(SPECS)

    def send() -> Finished:
        sender = group.senders[0]
        sender.begin(start(1))
        for number, tensors in enumerate(per_bucket(group.plan, source)):
            sender.send(number, [tensors])
        return sender.finish()

    sent = group.pool.submit(send)
    group.receive(0, target, start(1))
    assert sent.result(TIMEOUT_S).digests == digests_of(target)


# ---- What is refused before it reaches the library ----


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda tensor: torch.zeros(40, 300).t(), r"'embed' is not contiguous: strides \(1, 300\)"),
        (lambda tensor: tensor.reshape(40, 300), r"'embed' has shape \[40, 300\], the plan \[300, 40\]"),
        (lambda tensor: tensor.to(torch.complex64), "'embed' has dtype torch.complex64"),
        (lambda tensor: tensor.to("meta"), "'embed' is on meta"),
    ],
)
def test_a_tensor_that_cannot_be_sent_is_named(group: Group, spoil: Callable[[Tensor], Tensor], words: str) -> None:
    tensors = zeros(SPECS)
    tensors[0] = spoil(tensors[0])
    for transfer in (group.senders[0].send, group.receivers[0].receive):
        with pytest.raises(ValueError, match=words):
            transfer(0, per_bucket(group.plan, tensors))


def test_wrong_numbers_of_buckets_and_tensors_are_refused(group: Group) -> None:
    buckets = per_bucket(group.plan, zeros(SPECS))
    with pytest.raises(ValueError, match=f"{len(buckets)} buckets from number 1 on; the plan has {len(buckets) - 1}"):
        group.senders[0].send(1, buckets)
    with pytest.raises(ValueError, match="0 tensors for bucket 0, which has 1 pieces"):
        group.senders[0].send(0, [[]])


def test_digests_need_dense_host_memory() -> None:
    with pytest.raises(ValueError, match="tensor 1 is not contiguous"):
        digests_of([torch.zeros(3), torch.zeros(4, 3).t()])


# ---- Faults ----


def fault_of(call: Callable[[], object]) -> TransferError:
    with pytest.raises(TransferError) as caught:
        call()
    return caught.value


def test_an_abort_ends_the_wait_of_the_other_side_and_says_who_gave_up(group: Group) -> None:
    waiting = group.pool.submit(group.receive, 0, zeros(SPECS), start(1))
    group.senders[0].abort("the trainer was told to stop", bucket=1)
    fault = fault_of(lambda: waiting.result(TIMEOUT_S))
    assert (fault.kind, fault.root, fault.reader, fault.bucket) == ("aborted", 0, None, 1)
    assert "the trainer was told to stop" in str(fault)
    again = fault_of(lambda: group.senders[0].begin(start(2)))
    assert (again.kind, again.rank) == ("aborted", 0)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_refit_that_is_late_ends_at_its_deadline_on_both_sides(transport: TransportName) -> None:
    with closing(Group(Plan.build(SPECS, 8 * KIB), transport)) as group:
        fault = fault_of(lambda: group.receive(0, zeros(SPECS), start(1, timeout_s=0.2)))
        assert (fault.kind, fault.root) == ("deadline", 0)  # whose slot did not come
        told = fault_of(lambda: group.send(0, zeros(SPECS), start(1)))
        assert (told.kind, told.rank) == ("deadline", 0)


def test_a_deadline_names_the_bucket_that_did_not_come(group: Group) -> None:
    buckets = per_bucket(group.plan, zeros(SPECS))
    receiving = group.pool.submit(group.receive, 0, zeros(SPECS), start(1, timeout_s=0.3))
    group.senders[0].begin(start(1))
    group.senders[0].send(0, buckets[:1])
    fault = fault_of(lambda: receiving.result(TIMEOUT_S))
    assert (fault.kind, fault.root, fault.bucket) == ("deadline", 0, 1)
    assert "bucket 1 of root 0 ('embed'" in str(fault)


@pytest.mark.parametrize(
    ("sent", "expected", "words"),
    [((3, 7), (4, 7), "epoch"), ((3, 6), (3, 7), "version 6, this end expects 7")],
)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_old_epoch_or_another_version_is_a_mismatch_on_both_sides(
    transport: TransportName, sent: tuple[int, int], expected: tuple[int, int], words: str
) -> None:
    with closing(Group(Plan.build(SPECS, 8 * KIB), transport)) as group:
        sending = group.pool.submit(group.send, 0, zeros(SPECS), start(*sent))
        fault = fault_of(lambda: group.receive(0, zeros(SPECS), start(*expected)))
        assert fault.kind == "mismatch"
        assert words in str(fault)
        assert fault_of(lambda: sending.result(TIMEOUT_S)).kind == "mismatch"


def test_an_epoch_that_is_not_larger_than_the_last_is_refused(group: Group) -> None:
    group.run(zeros(SPECS), [zeros(SPECS)], start(5))
    fault = fault_of(lambda: group.senders[0].begin(start(5)))
    assert fault.kind == "mismatch"
    assert "larger than the last, 5" in str(fault)


def test_a_second_commit_is_refused(group: Group) -> None:
    group.run(zeros(SPECS), [zeros(SPECS)], start(1))
    for end in (group.senders[0], group.receivers[0]):
        fault = fault_of(end.finish)
        assert fault.kind == "mismatch"
        assert "no refit is under way" in str(fault)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ends_with_different_plans_never_begin(transport: TransportName) -> None:
    options = LinkOptions(transport, 2, 1, SILENCE_S, host="127.0.0.1" if transport == "tcp" else "")
    plans = [Plan.build(SPECS, size * KIB) for size in (4, 8)]
    sender = NativeSender(plans[0], 0, f"{OURS}-plans", options)

    def join() -> None:
        with closing(NativeReceiver(plans[1], 0, [sender.address], options)) as receiver:
            receiver.join(TIMEOUT_S)

    with closing(sender), ThreadPoolExecutor(1) as pool:
        joining = pool.submit(sender.join, 1.0)
        assert fault_of(join).kind == "mismatch"
        fault_of(lambda: joining.result(TIMEOUT_S))


# ---- Life and death of an end ----


def test_a_closed_end_refuses_calls_and_ignores_abort(group: Group) -> None:
    sender = group.senders[0]
    sender.close()
    sender.close()
    sender.abort("too late")
    with pytest.raises(WeightSyncError, match="this sender is closed; it cannot begin"):
        sender.begin(start(1))


def test_closing_ends_a_call_that_waits(group: Group) -> None:
    waiting = group.pool.submit(group.receive, 0, zeros(SPECS), start(1))
    closer = threading.Thread(target=group.receivers[0].close)
    closer.start()
    closer.join(TIMEOUT_S)
    assert not closer.is_alive()
    with pytest.raises(WeightSyncError):
        waiting.result(TIMEOUT_S)


def test_nothing_stays_in_shared_memory() -> None:
    def ours() -> set[str]:
        return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(f"{OURS}-")}

    before = ours()
    with closing(Group(Plan.build(SPECS, 8 * KIB), "shm")):
        pass
    assert ours() == before


def test_a_channel_that_somebody_holds_is_unavailable() -> None:
    plan, options = Plan.build(SPECS, 8 * KIB), LinkOptions("shm", 3, 1, SILENCE_S)
    with closing(NativeSender(plan, 0, f"{OURS}-held", options)) as sender:
        fault = fault_of(lambda: NativeSender(plan, 0, sender.address, options))
    assert fault.kind == "unavailable"
    assert sender.address in str(fault)


def test_options_that_cannot_work_are_refused(group: Group) -> None:
    fault = fault_of(lambda: NativeSender(group.plan, 0, "tandem-test-none", LinkOptions("shm", 1, 1, SILENCE_S)))
    assert (fault.kind, "at least 2, got 1" in str(fault)) == ("invalid", True)
    with pytest.raises(WeightSyncError, match="2 addresses for 1 roots"):
        NativeReceiver(group.plan, 0, ["a", "b"], LinkOptions("shm", 2, 1, SILENCE_S))


@pytest.mark.parametrize(("text", "words"), [("QUJD", "128 bytes, 'QUJD' has 3"), ("no id", "'no id' is no NCCL id")])
def test_an_nccl_id_of_another_length_is_refused_before_the_library_reads_it(text: str, words: str) -> None:
    plan = Plan.build([TensorSpec("t", "float32", (3,))], 4096)
    with pytest.raises(WeightSyncError, match=words):
        NativeReceiver(plan, 0, [text], LinkOptions("nccl", 2, 1, SILENCE_S))


@pytest.mark.parametrize("count", [1, 3])
def test_nccl_ids_for_another_number_of_roots_are_refused_before_the_library_reads_them(count: int) -> None:
    plan = Plan.build(SPECS, 8 * KIB, num_roots=2)
    ids = tuple(base64.b64encode(bytes(128)).decode() for _ in range(count))
    options = LinkOptions("nccl", 2, 1, SILENCE_S, unique_ids=ids)
    with pytest.raises(WeightSyncError, match=f"{count} NCCL ids for 2 roots"):
        NativeSender(plan, 0, "", options)
    with pytest.raises(WeightSyncError, match=f"{count} NCCL ids for 2 roots"):
        NativeReceiver(plan, 0, ["", ""], options)
