"""Logits at chosen positions equal those of a plain forward, whatever the padding."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl.core.errors import ConfigError
from rl.trainer.model import CausalModel


def load(path: Path, dtype: torch.dtype = torch.float32) -> CausalModel:
    return CausalModel(path, dtype=dtype, device="cpu", trust_remote_code=False, seed=0)


def test_logits_at_marked_positions_equal_a_plain_forward(tiny_model: Path) -> None:
    tokens = torch.tensor([[1, 2, 3, 4, 5], [9, 8, 7, 0, 0]])
    positions = torch.tensor([[0, 0, 1, 1, 0], [1, 1, 0, 0, 0]]).bool()
    plain = AutoModelForCausalLM.from_pretrained(tiny_model)
    got = load(tiny_model).logits_at(tokens, positions)
    assert got.shape == (4, 260)
    assert torch.allclose(got[:2], plain(tokens[:1]).logits[0, 2:4], atol=1e-6)
    assert torch.allclose(got[2:], plain(tokens[1:, :3]).logits[0, :2], atol=1e-6)


def test_tied_weights_appear_once_and_untied_ones_twice(tiny_model: Path, untied_model: Path) -> None:
    assert "lm_head.weight" not in load(tiny_model).named_tensors()
    assert "lm_head.weight" in load(untied_model).named_tensors()


def test_weights_come_in_the_asked_dtype(tiny_model: Path) -> None:
    assert {tensor.dtype for tensor in load(tiny_model, torch.bfloat16).named_tensors().values()} == {torch.bfloat16}


def test_a_folder_that_is_no_model_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot load a causal language model"):
        load(tmp_path)
