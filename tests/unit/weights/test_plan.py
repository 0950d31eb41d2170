"""The bucket plan: every byte once, in order, within its bucket, at aligned starts."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.core.errors import WeightSyncError
from rl.weights.manifest import num_bytes
from rl.weights.plan import ALIGNMENT, BucketPlan, check_plan, plan_buckets
from rl.weights.transport import TensorSpec, TransferInfo

shapes = st.one_of(st.just(()), st.tuples(st.integers(0, 200)), st.tuples(st.integers(0, 20), st.integers(1, 40)))
dtypes = st.sampled_from(["float32", "bfloat16", "int8", "float64"])
manifests = st.lists(st.tuples(dtypes, shapes), min_size=1, max_size=12).map(
    lambda entries: [TensorSpec(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(entries)]
)
bucket_sizes = st.integers(1, 20).map(lambda n: n * ALIGNMENT)


def assert_sound(plan: BucketPlan, manifest: list[TensorSpec]) -> None:
    position = [0] * len(manifest)
    last = -1
    for bucket in plan.buckets:
        assert bucket
        end = 0
        for piece in bucket:
            assert piece.tensor in (last, last + 1)
            last = piece.tensor
            assert piece.slot_offset % ALIGNMENT == 0
            assert piece.slot_offset >= end
            end = piece.slot_offset + piece.size
            assert end <= plan.bucket_bytes
            assert piece.tensor_offset == position[piece.tensor]
            position[piece.tensor] += piece.size
    assert position == [num_bytes(spec) for spec in manifest]
    assert last == len(manifest) - 1
    assert plan.total_bytes == sum(position)


@given(manifests, bucket_sizes)
def test_every_byte_travels_once_in_manifest_order(manifest: list[TensorSpec], bucket_bytes: int) -> None:
    assert_sound(plan_buckets(manifest, bucket_bytes), manifest)


@given(manifests, bucket_sizes)
def test_only_tensors_larger_than_a_bucket_are_split(manifest: list[TensorSpec], bucket_bytes: int) -> None:
    plan = plan_buckets(manifest, bucket_bytes)
    for index, spec in enumerate(manifest):
        pieces = [piece for bucket in plan.buckets for piece in bucket if piece.tensor == index]
        expected = 1 if num_bytes(spec) <= bucket_bytes else -(-num_bytes(spec) // bucket_bytes)
        assert len(pieces) == expected


def test_an_exact_fit_fills_one_bucket_and_one_byte_more_opens_another() -> None:
    fits = plan_buckets([TensorSpec("a", "int8", (64,)), TensorSpec("b", "int8", (64,))], 128)
    assert len(fits.buckets) == 1
    over = plan_buckets([TensorSpec("a", "int8", (65,)), TensorSpec("b", "int8", (64,))], 128)
    assert [len(bucket) for bucket in over.buckets] == [1, 1]


def test_three_buckets_full_are_three_pieces() -> None:
    plan = plan_buckets([TensorSpec("a", "float32", (96,))], 128)
    assert [[piece.tensor_offset for piece in bucket] for bucket in plan.buckets] == [[0], [128], [256]]


def test_an_empty_tensor_has_a_place_of_its_own() -> None:
    plan = plan_buckets([TensorSpec("a", "float32", (32,)), TensorSpec("e", "float32", (0,))], 128)
    assert [piece.size for bucket in plan.buckets for piece in bucket] == [128, 0]


@given(manifests, bucket_sizes)
def test_both_ends_compute_the_same_digest(manifest: list[TensorSpec], bucket_bytes: int) -> None:
    assert plan_buckets(manifest, bucket_bytes).digest == plan_buckets(tuple(manifest), bucket_bytes).digest


def test_a_changed_manifest_or_bucket_is_noticed() -> None:
    manifest = (TensorSpec("a", "float32", (32,)), TensorSpec("b", "float32", (32,)))
    info = TransferInfo("x", manifest, 128, 2, plan_buckets(manifest, 128).digest)
    check_plan(info)
    for changed in (
        dataclasses.replace(info, bucket_bytes=192),
        dataclasses.replace(info, tensors=tuple(reversed(manifest))),
        dataclasses.replace(info, tensors=(manifest[0], TensorSpec("b", "int32", (32,)))),
    ):
        with pytest.raises(WeightSyncError, match="bucket plan"):
            check_plan(changed)


@pytest.mark.parametrize(
    ("manifest", "bucket_bytes", "message"),
    [
        ([], 64, "no tensor"),
        ([TensorSpec("a", "int8", (1,)), TensorSpec("a", "int8", (1,))], 64, "'a' stands twice"),
        ([TensorSpec("a", "int8", (1,))], 100, "multiple of 64"),
        ([TensorSpec("a", "int8", (1,))], 0, "multiple of 64"),
    ],
)
def test_impossible_plans_are_refused(manifest: list[TensorSpec], bucket_bytes: int, message: str) -> None:
    with pytest.raises(WeightSyncError, match=message):
        plan_buckets(manifest, bucket_bytes)
