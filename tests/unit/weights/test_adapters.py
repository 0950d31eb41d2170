"""Merged weights equal W + scale * B A, computed in float32 and cast once; nothing is skipped silently."""

import pytest
import torch
from torch import Tensor

from rl.core.errors import WeightSyncError
from rl.weights.adapters import Adapter, MergedSource, split_adapters
from rl.weights.shards import MakeGroup, Part, ShardedSource
from rl.weights.source import LocalSource
from tests.support.gloo_ranks import in_threads

SCALE = 0.75


def wrapped_model(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The parameters of a model whose layers q and v have adapters, under a wrapper's names."""
    torch.manual_seed(5)
    tensors = {"base_model.model.embed.weight": torch.randn(6, 4, dtype=dtype)}
    for layer in ("q", "v"):
        tensors |= {
            f"base_model.model.{layer}.base_layer.weight": torch.randn(5, 4, dtype=dtype),
            f"base_model.model.{layer}.base_layer.bias": torch.randn(5, dtype=dtype),
            f"base_model.model.{layer}.lora_A.default.weight": torch.randn(2, 4),
            f"base_model.model.{layer}.lora_B.default.weight": torch.randn(5, 2),
        }
    return tensors


def merged_source(named: dict[str, Tensor], dtype: torch.dtype | None) -> MergedSource:
    base, adapters, pairs = split_adapters(named, SCALE)
    return MergedSource(LocalSource(lambda: base), LocalSource(lambda: adapters), pairs, dtype)


def test_a_wrapped_model_splits_into_checkpoint_names_adapters_and_pairs() -> None:
    base, adapters, pairs = split_adapters(wrapped_model(), SCALE)
    assert list(base) == ["embed.weight", "q.weight", "q.bias", "v.weight", "v.bias"]
    assert list(adapters) == ["q.lora_A.weight", "q.lora_B.weight", "v.lora_A.weight", "v.lora_B.weight"]
    assert pairs["q.weight"] == Adapter("q.lora_A.weight", "q.lora_B.weight", SCALE)


@pytest.mark.parametrize("base_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wire_dtype", [None, torch.float32, torch.bfloat16])
def test_merged_weights_are_computed_in_float32_and_cast_once(
    base_dtype: torch.dtype, wire_dtype: torch.dtype | None
) -> None:
    named = wrapped_model(base_dtype)
    source = merged_source(named, wire_dtype)
    specs = source.manifest()
    source.begin(1.0)
    found = dict(zip([spec.name for spec in specs], source.tensors(range(len(specs))), strict=True))
    for layer in ("q", "v"):
        w = named[f"base_model.model.{layer}.base_layer.weight"].float()
        a = named[f"base_model.model.{layer}.lora_A.default.weight"]
        b = named[f"base_model.model.{layer}.lora_B.default.weight"]
        expected = (w + SCALE * (b @ a)).to(wire_dtype or base_dtype)
        assert found[f"{layer}.weight"].dtype == expected.dtype
        # One rounding of the sum and one of the cast: at most a unit in the last place apart.
        rtol = 2e-6 if expected.dtype == torch.float32 else 2**-7
        torch.testing.assert_close(found[f"{layer}.weight"], expected, rtol=rtol, atol=rtol)
    assert torch.equal(found["embed.weight"], named["base_model.model.embed.weight"])
    assert all(spec.dtype == str(wire_dtype or base_dtype).removeprefix("torch.") for spec in specs)


def test_a_sum_is_not_rounded_before_it_is_complete() -> None:
    # 256 + 0.75 is 256 in bfloat16; W rounded first and the sum afterwards would lose the adapter.
    named = {
        "q.base_layer.weight": torch.full((1, 1), 257.0),
        "q.lora_A.weight": torch.full((1, 1), 1.0),
        "q.lora_B.weight": torch.full((1, 1), 1.0),
    }
    source = merged_source(named, torch.bfloat16)
    source.manifest()
    source.begin(1.0)
    assert source.tensors([0])[0].item() == 258.0  # 257.75 to the nearest even of 256, 258


def test_merged_shards_equal_the_merged_whole() -> None:
    named = wrapped_model()
    base, adapters, pairs = split_adapters(named, SCALE)

    def merged(rank: int, make_group: MakeGroup) -> list[Tensor]:
        def parts(tensors: dict[str, Tensor]) -> dict[str, Tensor | Part]:
            sizes = {name: (tensor.shape[0] + 1) // 2 for name, tensor in tensors.items()}
            return {
                name: Part(tensor.split([size, tensor.shape[0] - size])[rank], 0, (size, tensor.shape[0] - size))
                for (name, tensor), size in zip(tensors.items(), sizes.values(), strict=True)
            }

        source = MergedSource(
            ShardedSource(lambda: parts(base), rank, 2, make_group),
            ShardedSource(lambda: parts(adapters), rank, 2, make_group),
            pairs,
            torch.bfloat16,
        )
        source.manifest()
        source.connect("links-1", 30.0)
        source.begin(30.0)
        assert source.is_sharded and source.agree(True)
        return source.tensors([1, 0, 3], root=1)

    found = in_threads(2, merged)
    whole = merged_source(named, torch.bfloat16)
    whole.manifest()
    whole.begin(1.0)
    assert found[0] == []
    for left, right in zip(found[1], whole.tensors([1, 0, 3]), strict=True):
        assert torch.equal(left.bfloat16(), right.bfloat16())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda named: named.pop("q.lora_A.weight"), "the adapter of 'q' has only one of lora_A and lora_B"),
        (lambda named: named.update({"q.lora_A.other.weight": torch.ones(1, 1)}), "is a second adapter of q"),
    ],
)
def test_half_an_adapter_and_two_adapters_are_refused(change: object, message: str) -> None:
    named = {"q.base_layer.weight": torch.ones(1, 1), "q.lora_A.weight": torch.ones(1, 1)}
    named["q.lora_B.weight"] = torch.ones(1, 1)
    change(named)  # type: ignore[operator]
    with pytest.raises(WeightSyncError, match=message):
        split_adapters(named, SCALE)


def test_adapters_that_fit_nothing_or_are_left_over_are_named() -> None:
    base, adapters, pairs = split_adapters(wrapped_model(), SCALE)

    def manifest(changed: dict[str, Adapter]) -> None:
        MergedSource(LocalSource(lambda: base), LocalSource(lambda: adapters), changed).manifest()

    manifest(pairs)
    with pytest.raises(WeightSyncError, match=r"'q.lora_A.weight' belongs to no pair; it would be skipped"):
        manifest({"v.weight": pairs["v.weight"]})
    with pytest.raises(WeightSyncError, match=r"the adapter of 'k.weight' lacks 'k.weight'"):
        manifest(pairs | {"k.weight": pairs["q.weight"]})
    with pytest.raises(WeightSyncError, match=r"'embed.weight' \[6, 4\] has B \[5, 2\] and A \[2, 4\]"):
        manifest(pairs | {"embed.weight": pairs["q.weight"]})
