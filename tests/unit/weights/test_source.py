"""The local source: tensors as they lie, tied ones once, and none that changed behind a refit's back."""

import pytest
import torch

from rl.core.errors import WeightSyncError
from rl.weights.source import LocalSource, without_ties


def test_tensors_are_handed_out_as_they_lie_and_copied_only_where_they_are_not_dense() -> None:
    dense, turned = torch.randn(3, 2), torch.randn(2, 5).t()
    source = LocalSource(lambda: {"dense": dense, "turned": turned})
    source.manifest()
    source.begin(1.0)
    found = source.tensors([1, 0])
    assert found[1].data_ptr() == dense.data_ptr()
    assert found[0].is_contiguous() and torch.equal(found[0], turned)
    assert not source.holds_tensors and not source.is_sharded
    source.end()
    assert source.holds_tensors  # of nothing


def test_the_manifest_has_the_dtype_of_the_wire_and_tied_weights_once() -> None:
    table = torch.nn.Parameter(torch.randn(4, 2))
    tensors = {"embed": table, "steps": torch.tensor(3), "head": table, "scale": torch.ones(2).to(torch.float8_e5m2)}
    manifest = LocalSource(lambda: tensors, torch.bfloat16).manifest()
    assert [(spec.name, spec.dtype, spec.shape) for spec in manifest] == [
        ("embed", "bfloat16", (4, 2)),
        ("steps", "int64", ()),
        ("scale", "float8_e5m2", (2,)),
    ]


def test_views_of_one_memory_with_other_shapes_are_no_ties_and_empty_tensors_are_never_tied() -> None:
    memory = torch.randn(4, 4)
    tensors = {"all": memory, "turned": memory.t(), "flat": memory.view(-1), "a": torch.empty(0), "b": torch.empty(0)}
    assert list(without_ties(tensors)) == ["all", "turned", "flat", "a", "b"]


def test_a_refit_needs_a_manifest_and_the_tensors_that_it_names() -> None:
    tensors = {"w": torch.ones(2)}
    source = LocalSource(lambda: tensors)
    with pytest.raises(WeightSyncError, match="before the manifest"):
        source.begin(1.0)
    source.manifest()
    tensors["w"] = torch.ones(3)
    with pytest.raises(WeightSyncError, match=r"tensor 0: expected 'w' float32\[2\], got 'w' float32\[3\]"):
        source.begin(1.0)


def test_a_source_of_one_rank_agrees_with_itself() -> None:
    source = LocalSource(dict)
    assert source.agree(True) and not source.agree(False)
