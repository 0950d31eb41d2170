"""The size of a model is read from its files' headers."""

import json
import struct
from pathlib import Path

from rl.controller.model_size import checkpoint_bytes, parameter_count


def test_safetensors_headers_are_added_up(tmp_path: Path) -> None:
    for index, shape in enumerate(([3, 5], [7])):
        header = {"__metadata__": {}, "w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}
        text = json.dumps(header).encode()
        (tmp_path / f"model-{index}.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    assert parameter_count(tmp_path) == 22


def test_a_gguf_file_is_estimated_from_its_name(tmp_path: Path) -> None:
    file = tmp_path / "m.Q8_0.gguf"
    file.write_bytes(b"\0" * 850)
    assert parameter_count(file) == 800


def test_nothing_to_go_by_is_none(tmp_path: Path) -> None:
    assert parameter_count(tmp_path) is None
    assert parameter_count(tmp_path / "missing") is None


def test_a_checkpoint_holds_weights_and_moments() -> None:
    assert checkpoint_bytes(100, save_optimizer=True) == 1200
    assert checkpoint_bytes(100, save_optimizer=False) == 400


def test_a_damaged_file_tells_no_size(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 900) + b"not json")
    assert parameter_count(tmp_path) is None
