"""Two passes leave the output layer's gradient where the trainer adds up its gradients, and scoring leaves none."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from rl.trainer.forward_backward import accumulate_gradients, compute_logprobs
from rl.trainer.loss_path import ForwardSettings
from rl.trainer.model import CausalModel
from tests.support.losses import objective
from tests.support.micro_batches import cut
from tests.support.policies import make_batch

NATIVE, TORCH = ForwardSettings(0.8, "native"), ForwardSettings(0.8, "torch")
BY_SEQUENCE = objective(single_update=True, sequence_level_importance_ratios=True, token_level_loss=False)


@pytest.fixture
def model(untied_model: Path) -> CausalModel:
    """A model whose output layer is its own."""
    return CausalModel(untied_model, precision=torch.float32, device="cpu", trust_remote_code=False, seed=0)


def test_the_heads_gradient_is_added_in_place_and_never_handed_to_autograd(model: CausalModel) -> None:
    batch, weight = make_batch(3), model.head_weight
    works = cut(batch, train_micro_batch_size=3)
    assert len(works) > 1
    accumulate_gradients(model, works, BY_SEQUENCE, TORCH)
    assert weight.grad is not None
    expected, handed = weight.grad, list[Tensor | None]()
    model.module.zero_grad()
    weight.register_hook(handed.append)
    weight.grad = buffer = torch.full_like(weight, 0.5)
    accumulate_gradients(model, works, BY_SEQUENCE, NATIVE)
    assert handed == [None] * len(works)
    assert weight.grad is buffer
    torch.testing.assert_close(buffer - 0.5, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)


def test_scoring_makes_no_gradient(model: CausalModel) -> None:
    batch = make_batch(3)
    compute_logprobs(model, cut(batch, batch.loss_mask), NATIVE)
    assert model.head_weight.grad is None
