"""The files of a model folder are looked at without loading them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rl.core.errors import ConfigError
from rl.data.model_files import check_model_files, context_length, weights_digest
from rl.data.model_source import check_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    save_file({"a": torch.zeros(8, 4), "b": torch.zeros(3)}, tmp_path / "model.safetensors")
    return tmp_path


def test_whole_files_pass(folder: Path) -> None:
    check_model_files(folder)
    assert context_length(folder) == 64


@pytest.mark.parametrize("size", [0, 5, 40, -1])
def test_a_truncated_weight_file_is_named(folder: Path, size: int) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:size])
    with pytest.raises(ConfigError, match=r"model.safetensors is damaged: .*fetch the model again"):
        check_model(str(folder))


def test_garbage_instead_of_weights_is_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"<html>not found</html>" * 100)
    with pytest.raises(ConfigError, match=r"model.safetensors is damaged"):
        check_model(str(folder))


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_broken_configuration_is_named(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config.json (cannot be read|must hold a JSON object)"):
        check_model(str(folder))


@pytest.mark.parametrize(
    ("values", "length"),
    [
        ({}, None),
        ({"text_config": {"max_position_embeddings": 32}}, 32),
        ({"max_position_embeddings": 32, "rope_scaling": None}, 32),
        ({"max_position_embeddings": 32, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, None),
        ({"max_position_embeddings": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 32),
    ],
)
def test_the_context_is_told_where_it_is_plain(folder: Path, values: dict[str, object], length: int | None) -> None:
    (folder / "config.json").write_text(json.dumps(values))
    assert context_length(folder) == length


def test_the_digest_of_the_weights_follows_their_content_and_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    first = weights_digest(tmp_path)
    (tmp_path / "README.md").write_text("any")
    assert weights_digest(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(b"abd")
    assert weights_digest(tmp_path) != first
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    (tmp_path / "other.safetensors").write_bytes(b"abc")
    assert weights_digest(tmp_path) != first
