"""What an engine says that is to load another model's weights; no engine runs here."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from rl.core.errors import WeightSyncError
from rl.generation.vllm.loading import load_tensors, refuse_another_model
from rl.weights.transport import TensorSpec


class Served(torch.nn.Module):
    """A model with vLLM's method, whose loader asserts without a word, as vLLM's do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(width)
        self.fused = torch.nn.Linear(width, 3 * width, bias=False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            if parameters[name].shape != tensor.shape:
                raise AssertionError
            parameters[name].data.copy_(tensor)


def test_tensors_reach_the_loader_in_order() -> None:
    model = Served(2)
    load_tensors(model, [("norm.weight", torch.full((2,), 5.0)), ("fused.weight", torch.full((6, 2), 7.0))])
    assert model.norm.weight.tolist() == [5.0, 5.0]
    assert bool((model.fused.weight == 7.0).all())


def test_a_loader_that_fails_is_placed_and_the_user_asked_for_the_model() -> None:
    tensors = [("norm.weight", torch.zeros(2)), ("fused.weight", torch.zeros(12, 4)), ("norm.weight", torch.zeros(2))]
    with pytest.raises(
        WeightSyncError,
        match=r"fails at 'fused.weight' of shape \[12, 4\]: AssertionError; is the model that it serves",
    ):
        load_tensors(Served(2), tensors)
    with pytest.raises(WeightSyncError, match=r"fails at 'q.weight' of shape \[1\]: KeyError: 'q.weight'; is"):
        load_tensors(Served(2), [("q.weight", torch.zeros(1))])


def test_a_model_of_another_width_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(WeightSyncError, match=r"engine's 'norm.weight' has shape \[4\], the trainer's \[2\]; is the"):
        refuse_another_model(Served(4), [TensorSpec("norm.weight", "float32", (2,))])


def test_layers_that_an_engine_may_fuse_or_pad_are_left_to_its_loader() -> None:
    manifest = [
        TensorSpec("norm.weight", "float32", (2,)),
        TensorSpec("fused.weight", "float32", (2, 2)),
        TensorSpec("elsewhere.norm.weight", "float32", (9,)),
    ]
    refuse_another_model(Served(2), manifest)
