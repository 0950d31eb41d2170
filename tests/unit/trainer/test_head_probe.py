"""The model itself says whether its logits are a product of hidden states and a matrix, and if not, why."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GPT2Config, PhiConfig, Qwen2Config

from rl.trainer.head_probe import find_head_fault
from rl.trainer.model import CausalModel

SMALL = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
LLAMA_LIKE = SMALL | {"intermediate_size": 32, "num_key_value_heads": 1, "max_position_embeddings": 64}


def load(path: Path, precision: torch.dtype = torch.float32) -> CausalModel:
    return CausalModel(path, precision=precision, device="cpu", trust_remote_code=False, seed=0)


def make_model(folder: Path, config: Any) -> CausalModel:
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return load(folder)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_plain_head_tied_or_not_passes(tiny_model: Path, untied_model: Path, precision: torch.dtype) -> None:
    assert find_head_fault(load(tiny_model, precision)) is None
    assert find_head_fault(load(untied_model, precision)) is None


@pytest.mark.parametrize(
    "config",
    [Qwen2Config(**LLAMA_LIKE), GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=64)],
    ids=lambda config: config.model_type,
)
def test_other_families_with_a_plain_head_pass(tmp_path: Path, config: Any) -> None:
    assert find_head_fault(make_model(tmp_path, config)) is None


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (PhiConfig(**LLAMA_LIKE), "has a bias"),
        (Gemma2Config(**LLAMA_LIKE, head_dim=8, final_logit_softcapping=30.0), "logits differ"),
        (CohereConfig(**LLAMA_LIKE, logit_scale=0.0625), "logits differ"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.model_type,
)
def test_bias_soft_cap_and_scale_are_found_out(tmp_path: Path, config: Any, reason: str) -> None:
    fault = find_head_fault(make_model(tmp_path, config))
    assert fault is not None and reason in fault


def test_a_hook_that_masks_a_token_is_found_out(tiny_model: Path) -> None:
    model = load(tiny_model)

    def forbid(_: nn.Module, __: tuple[Tensor, ...], logits: Tensor) -> Tensor:
        return logits.index_fill(-1, torch.tensor([7]), float("-inf"))

    model.head.register_forward_hook(forbid)
    fault = find_head_fault(model)
    assert fault is not None and "logits differ from the output layer's product by inf" in fault


def test_an_output_layer_of_another_class_is_named(tiny_model: Path) -> None:
    class Adapter(nn.Linear):
        pass

    model = load(tiny_model)
    model.head.__class__ = Adapter
    assert find_head_fault(model) == "its output layer is no plain matrix but Adapter"


def test_an_output_layer_that_is_not_called_is_a_fault(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(tiny_model)
    monkeypatch.setattr(model, "_head", nn.Linear(32, 260, bias=False))
    fault = find_head_fault(model)
    assert fault is not None and "calls its output layer 0 times" in fault


def test_the_probe_leaves_no_gradient_and_the_precision_alone(tiny_model: Path) -> None:
    model = load(tiny_model, torch.bfloat16)
    assert find_head_fault(model) is None
    assert model.precision == torch.bfloat16
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("exact", [False, True])
def test_hidden_states_times_the_matrix_are_the_logits(tiny_model: Path, exact: bool) -> None:
    model = load(tiny_model, torch.bfloat16)
    tokens, places = torch.tensor([[1, 2, 3, 4], [9, 8, 7, 0]]), torch.tensor([1, 1, 6])
    hidden = model.hidden_at(tokens, places, exact=exact)
    assert hidden.dtype == (torch.float32 if exact else torch.bfloat16) and hidden.requires_grad
    weight = model.head_weight if exact else model.head_weight.to(torch.bfloat16)
    assert torch.equal(hidden @ weight.T, model.logits_at(tokens, places, exact=exact))
