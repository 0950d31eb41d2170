"""The model itself says whether rows of several sequences are computed correctly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, Lfm2Config, MistralConfig, Qwen2Config

from rl.algorithms.config import LossConfig
from rl.algorithms.objective import parse_objective
from rl.algorithms.policy_gradient import PolicyGradientLoss
from rl.core.errors import ConfigError
from rl.trainer.mask_probe import find_mask_fault
from rl.trainer.model import CausalModel
from tests.support.policies import make_batch, make_policy, make_request, make_settings

SMALL = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA_LIKE = SMALL | {"intermediate_size": 32, "num_key_value_heads": 1, "max_position_embeddings": 64}


def load(path: Path, precision: torch.dtype = torch.float32) -> CausalModel:
    return CausalModel(path, precision=precision, device="cpu", trust_remote_code=False, seed=0)


def make_model(folder: Path, config: Any) -> CausalModel:
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return load(folder)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_the_tiny_model_honours_the_mask(tiny_model: Path, precision: torch.dtype) -> None:
    assert find_mask_fault(load(tiny_model, precision), 512) is None


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(**LLAMA_LIKE, use_sliding_window=False, sliding_window=8),
        MistralConfig(**LLAMA_LIKE, sliding_window=64),
        GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=64),
    ],
    ids=lambda config: config.model_type,
)
def test_other_families_that_honour_the_mask_pass(tmp_path: Path, config: Any) -> None:
    assert find_mask_fault(make_model(tmp_path, config), 64) is None


def test_a_window_shorter_than_the_sequences_is_a_fault(tmp_path: Path) -> None:
    fault = find_mask_fault(make_model(tmp_path, MistralConfig(**LLAMA_LIKE, sliding_window=8)), 64)
    assert fault is not None
    assert "8 tokens back, less than policy.max_total_sequence_length=64" in fault


class _Deaf:
    """A model that drops what it is given beside the tokens."""

    def __init__(self, model: CausalModel, dropped: set[str]) -> None:
        self._model, self._dropped = model, dropped
        self._forward = model.module.forward

    def __call__(self, **arguments: Any) -> Any:
        return self._forward(**{name: value for name, value in arguments.items() if name not in self._dropped})


@pytest.mark.parametrize("dropped", [{"attention_mask"}, {"position_ids"}, {"attention_mask", "position_ids"}])
def test_a_model_that_ignores_mask_or_positions_is_found_out(tiny_model: Path, dropped: set[str]) -> None:
    model = load(tiny_model)
    model.module.forward = _Deaf(model, dropped)
    fault = find_mask_fault(model, 64)
    assert fault is not None
    assert "does not honour a 4-D attention mask" in fault


def test_layers_that_carry_a_state_along_the_row_are_found_out(tmp_path: Path) -> None:
    layers = ["conv", "full_attention"]
    config = Lfm2Config(**LLAMA_LIKE, layer_types=layers, block_auto_adjust_ff_dim=False, initializer_range=0.2)
    assert find_mask_fault(make_model(tmp_path, config), 64) is not None


def _plain() -> PolicyGradientLoss:
    return parse_objective(LossConfig(reference_policy_kl_penalty=0.0), single_update=True)


def _refuse(**arguments: Any) -> Tensor:
    if "attention_mask" in arguments:
        raise ValueError("attention_mask must be 2-D")
    raise AssertionError("only the masked pass was expected")


async def test_where_the_model_cannot_share_auto_says_so_and_trains_without(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl.trainer.worker.find_mask_fault", lambda *_: "it is deaf")
    notes: list[str] = []
    policy = await make_policy(make_settings(tiny_model), make_request(tiny_model), notes.append)
    assert len(notes) == 1 and "it is deaf" in notes[0]
    shared = await policy.train(make_batch(), _plain())
    monkeypatch.undo()
    able = await make_policy(make_settings(tiny_model, share_prefixes="on"), make_request(tiny_model), notes.append)
    assert len(notes) == 1
    result = await able.train(make_batch(), _plain())
    assert result.metrics["num_computed_positions"] < shared.metrics["num_computed_positions"]
    assert result.metrics["loss"] == pytest.approx(shared.metrics["loss"], abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"share_prefixes": "on"}, "policy.share_prefixes=on"),
        ({"sequence_packing": {"enabled": True}}, "policy.sequence_packing.enabled=true"),
        ({"sequence_packing": {"enabled": True}, "share_prefixes": "off"}, "policy.sequence_packing.enabled=true"),
    ],
)
async def test_where_the_model_cannot_share_what_relies_on_it_is_refused(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], key: str
) -> None:
    monkeypatch.setattr("rl.trainer.worker.find_mask_fault", lambda *_: "it is deaf")
    with pytest.raises(ConfigError, match=f"{key} does not work with the model .*: it is deaf"):
        await make_policy(make_settings(tiny_model, **changes), make_request(tiny_model))


async def test_nobody_asks_the_model_when_nothing_depends_on_it(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions: list[object] = []
    monkeypatch.setattr("rl.trainer.worker.find_mask_fault", lambda *_: questions.append(_))
    await make_policy(make_settings(tiny_model, share_prefixes="off"), make_request(tiny_model))
    assert questions == []
    await make_policy(make_settings(tiny_model, share_prefixes="on"), make_request(tiny_model))
    assert len(questions) == 1


def test_an_error_of_the_model_becomes_the_reason(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(tiny_model)
    monkeypatch.setattr(model.module, "forward", _refuse)
    fault = find_mask_fault(model, 64)
    assert fault is not None
    assert "does not take a 4-D attention mask" in fault
