"""Both ends of a refit against each other, in one process: bytes in, equal tensors out."""

import secrets
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl.core.errors import WeightSyncError
from rl.core.reaper import SHARED_MEMORY
from rl.weights.plan import plan_buckets
from rl.weights.receiver import WeightReceiver, checksum_of
from rl.weights.sender import WeightSender
from rl.weights.transport import TransferInfo

Tensors = dict[str, torch.Tensor]


class Ends:
    """A connected sender and receiver and what the receiver loaded."""

    def __init__(
        self, tensors: Tensors, bucket_bytes: int, keeps_tensors: bool, dtype: torch.dtype | None = None
    ) -> None:
        self.tensors = tensors
        self.loaded: Tensors = {}
        self.sender = WeightSender(lambda: self.tensors, dtype)
        keep = (lambda t: t) if keeps_tensors else torch.clone
        self.receiver = WeightReceiver(lambda new: self.loaded.update({n: keep(t) for n, t in new}), keeps_tensors)
        manifest = self.sender.manifest()
        self.plan = plan_buckets(manifest, bucket_bytes)
        channel = f"tdm-test-{secrets.token_hex(6)}"
        self.info = TransferInfo(channel, manifest, bucket_bytes, 2, self.plan.digest)
        self.sender.open(self.info)
        self.receiver.init(self.info)

    def transfer(self) -> str:
        """One refit; both checksums must agree."""
        self.sender.start(1)
        self.receiver.start()
        for bucket in range(len(self.plan.buckets)):
            self.sender.pack(bucket)
            self.receiver.update(bucket)
        checksum = self.sender.finish()
        received = self.receiver.finish()
        assert received.checksum == checksum
        assert received.num_tensors == len(self.tensors)
        return checksum

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()
        assert not (SHARED_MEMORY / self.info.channel).exists()


def odd_tensors() -> Tensors:
    """Sizes 0, exact fit, larger than a bucket; 0-dim; not contiguous; mixed dtypes."""
    torch.manual_seed(0)
    return {
        "scalar": torch.tensor(3.5),
        "exact": torch.randn(64),
        "empty": torch.zeros(0, 4),
        "large": torch.randn(13, 61),
        "half": torch.randn(7).to(torch.bfloat16),
        "turned": torch.randn(5, 9).t(),
        "strided": torch.randn(20)[::3],
        "flags": torch.tensor([True, False, True]),
        "last": torch.arange(5),
    }


@pytest.mark.parametrize("keeps_tensors", [True, False])
@pytest.mark.parametrize("bucket_bytes", [64, 256, 1 << 14])
def test_tensors_arrive_bit_for_bit(bucket_bytes: int, keeps_tensors: bool) -> None:
    ends = Ends(odd_tensors(), bucket_bytes, keeps_tensors)
    checksum = ends.transfer()
    assert list(ends.loaded) == list(ends.tensors)
    for name, tensor in ends.tensors.items():
        assert ends.loaded[name].dtype == tensor.dtype
        assert torch.equal(ends.loaded[name], tensor)
    assert checksum == checksum_of(list(ends.loaded.values()))
    ends.close()


def test_floating_point_tensors_travel_in_the_wire_dtype_and_others_in_their_own() -> None:
    ends = Ends(odd_tensors(), 256, keeps_tensors=True, dtype=torch.bfloat16)
    ends.transfer()
    for name, tensor in ends.tensors.items():
        wanted = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        assert ends.loaded[name].dtype == wanted.dtype
        assert torch.equal(ends.loaded[name], wanted)
    ends.close()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 300), min_size=1, max_size=8), st.integers(1, 8))
def test_any_sizes_arrive_in_any_bucket(sizes: list[int], slots: int) -> None:
    tensors = {f"t{i}": torch.arange(size, dtype=torch.float32) + i for i, size in enumerate(sizes)}
    ends = Ends(tensors, slots * 64, keeps_tensors=True)
    ends.transfer()
    assert all(torch.equal(ends.loaded[name], tensor) for name, tensor in tensors.items())
    ends.close()


def test_a_refit_given_up_half_way_leaves_no_trace_in_the_next() -> None:
    ends = Ends(odd_tensors(), 256, keeps_tensors=True)
    ends.sender.start(1)
    ends.receiver.start()
    ends.sender.pack(0)
    ends.receiver.update(0)
    ends.sender.pack(1)
    ends.tensors = {name: t + 1 if t.dtype.is_floating_point else t for name, t in ends.tensors.items()}
    ends.transfer()
    assert all(torch.equal(ends.loaded[name], tensor) for name, tensor in ends.tensors.items())
    ends.close()


def test_a_flipped_bit_changes_the_checksum() -> None:
    ends = Ends(odd_tensors(), 1 << 14, keeps_tensors=True)
    ends.sender.start(1)
    ends.receiver.start()
    ends.sender.pack(0)
    ring = ends.receiver._ring
    assert ring is not None
    ring.slot(0)[64] ^= 1
    ends.receiver.update(0)
    assert ends.receiver.finish().checksum != ends.sender.finish()
    ends.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    pair = Ends(odd_tensors(), 256, keeps_tensors=False)
    yield pair
    pair.close()


def test_buckets_out_of_order_are_refused(ends: Ends) -> None:
    ends.sender.start(1)
    ends.receiver.start()
    with pytest.raises(WeightSyncError, match="bucket 0 is due"):
        ends.sender.pack(1)
    ends.sender.pack(0)
    with pytest.raises(WeightSyncError, match="bucket 0 is due"):
        ends.receiver.update(1)


def test_finishing_early_is_an_error_on_both_ends(ends: Ends) -> None:
    ends.sender.start(1)
    ends.receiver.start()
    ends.sender.pack(0)
    ends.receiver.update(0)
    with pytest.raises(WeightSyncError, match="after 1 of"):
        ends.sender.finish()
    with pytest.raises(WeightSyncError, match="after 1 of"):
        ends.receiver.finish()


def test_tensors_that_changed_shape_since_connect_are_named(ends: Ends) -> None:
    ends.tensors = {**ends.tensors, "large": torch.zeros(2)}
    with pytest.raises(WeightSyncError, match=r"'large' float32\[13, 61\], got 'large' float32\[2\]"):
        ends.sender.start(2)


def test_phases_before_open_are_refused() -> None:
    sender = WeightSender(odd_tensors)
    with pytest.raises(WeightSyncError, match="not open"):
        sender.start(1)
    with pytest.raises(WeightSyncError, match="due"):
        sender.pack(0)
    receiver = WeightReceiver(lambda _: None, keeps_tensors=False)
    with pytest.raises(WeightSyncError, match="initialised"):
        receiver.start()
    with pytest.raises(WeightSyncError, match="initialised"):
        receiver.finish()
