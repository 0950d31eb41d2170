"""Logits at chosen positions equal those of a plain forward, whatever the padding."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rl.core.errors import ConfigError
from rl.trainer.model import CausalModel


def load(path: Path, precision: torch.dtype = torch.float32) -> CausalModel:
    return CausalModel(path, precision=precision, device="cpu", trust_remote_code=False, seed=0)


def test_logits_at_marked_positions_equal_a_plain_forward(tiny_model: Path) -> None:
    tokens = torch.tensor([[1, 2, 3, 4, 5], [9, 8, 7, 0, 0]])
    plain = AutoModelForCausalLM.from_pretrained(tiny_model)
    got = load(tiny_model).logits_at(tokens, torch.tensor([2, 3, 5, 6]))
    assert got.shape == (4, 260)
    assert torch.allclose(got[:2], plain(tokens[:1]).logits[0, 2:4], atol=1e-6)
    assert torch.allclose(got[2:], plain(tokens[1:, :3]).logits[0, :2], atol=1e-6)


def test_tied_weights_appear_once_and_untied_ones_twice(tiny_model: Path, untied_model: Path) -> None:
    assert "lm_head.weight" not in load(tiny_model).named_tensors()
    assert "lm_head.weight" in load(untied_model).named_tensors()


def test_in_bfloat16_the_weights_are_float32_and_the_logits_are_not(tiny_model: Path) -> None:
    model = load(tiny_model, torch.bfloat16)
    assert {tensor.dtype for tensor in model.named_tensors().values()} == {torch.float32}
    tokens = torch.tensor([[1, 2, 3]])
    logits = model.logits_at(tokens, torch.arange(3))
    assert logits.dtype == torch.bfloat16
    exact = load(tiny_model).logits_at(tokens, torch.arange(3)).detach()
    assert torch.allclose(logits.float(), exact, atol=0.02 * float(exact.abs().max()))


def test_an_export_holds_the_weights_once_in_the_precision_and_a_checkpoint_in_float32(
    tiny_model: Path, tmp_path: Path
) -> None:
    model = load(tiny_model, torch.bfloat16)
    model.save(tmp_path / "checkpoint")
    model.export(tmp_path / "export")
    for name, dtype in (("checkpoint", torch.float32), ("export", torch.bfloat16)):
        tensors = load_file(tmp_path / name / "model.safetensors")
        assert {tensor.dtype for tensor in tensors.values()} == {dtype}
        assert set(tensors) == set(model.named_tensors())
        assert AutoModelForCausalLM.from_pretrained(tmp_path / name).dtype == dtype


def test_a_folder_that_is_no_model_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot load a causal language model"):
        load(tmp_path)


def test_weights_that_break_off_and_unknown_architectures_name_the_folder(tiny_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken)
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ConfigError, match=f"cannot load a causal language model from {broken}"):
        load(broken)
    config = json.loads((broken / "config.json").read_text()) | {"model_type": "nonesuch"}
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"cannot load a causal language model from {broken}"):
        load(broken)
