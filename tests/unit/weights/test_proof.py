"""What proves a refit, and what is said when the proof fails."""

import struct

import pytest

from rl.core.errors import WeightSyncError
from rl.weights.proof import Sent, deviating_tensor, layer_of
from rl.weights.transport import TensorSpec

MANIFEST = (
    TensorSpec("model.embed_tokens.weight", "float32", (8, 2)),
    TensorSpec("model.layers.0.q.weight", "float32", (2, 2)),
    TensorSpec("model.layers.11.q.weight", "float32", (2, 2)),
)


def sent(version: int, *digests: int) -> Sent:
    return Sent.of(version, MANIFEST, struct.pack("<3Q", *digests))


def test_tensors_that_changed_are_counted() -> None:
    first = sent(0, 1, 2, 3)
    assert first.num_changed(None) == 3
    assert sent(1, 1, 2, 3).num_changed(first) == 0
    assert sent(1, 1, 9, 3).num_changed(first) == 1
    other = Sent.of(0, MANIFEST[:2], struct.pack("<2Q", 1, 2))
    assert first.num_changed(other) == 3, "another manifest has nothing to compare with"


def test_a_table_of_another_length_is_refused() -> None:
    with pytest.raises(WeightSyncError, match="the trainer gave 16 bytes of digests for 3 tensors"):
        Sent.of(0, MANIFEST, struct.pack("<2Q", 1, 2))


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.11.q.weight", "layer 11"),
        ("transformer.h.0.attn.weight", "layer 0"),
        ("model.norm.weight", "no numbered layer"),
        ("model.layers.3.experts.7.w1.weight", "layer 3"),
    ],
)
def test_the_layer_of_a_tensor(name: str, layer: str) -> None:
    assert layer_of(name) == layer


def test_the_first_tensor_that_computes_otherwise_is_named_in_the_trainers_order() -> None:
    right = {spec.name: (1.0, 2.0, 3.0) for spec in MANIFEST}
    assert deviating_tensor(right, dict(reversed(right.items())), "float32") is None
    wrong = {**right, MANIFEST[1].name: (1.0, 2.1, 3.0), MANIFEST[2].name: (0.0, 2.0, 3.0)}
    text = deviating_tensor(right, wrong, "float32")
    assert text is not None and "'model.layers.0.q.weight'" in text and text.endswith("(layer 0)")
    rounded = {**right, MANIFEST[1].name: (1.0, 2.0 + 1e-3, 3.0)}
    assert deviating_tensor(right, rounded, "bfloat16") is None
    assert deviating_tensor(right, rounded, "float32") is not None


def test_nothing_in_common_is_no_agreement() -> None:
    with pytest.raises(WeightSyncError, match="no tensor in common"):
        deviating_tensor({"a": (1.0, 1.0)}, {"b": (1.0, 1.0)}, "float32")
