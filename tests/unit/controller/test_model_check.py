"""A model that does not suit the configuration is refused by its files."""

import json
from pathlib import Path

import pytest

from rl.controller.load import load_config
from rl.controller.model_check import check_model_folder
from rl.core.config_paths import find_config
from rl.core.errors import ConfigError


def test_sequences_longer_than_the_models_context_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    config, _ = load_config(find_config("grpo_smollm2_cpu"), ["policy.max_total_sequence_length=65"])
    with pytest.raises(ConfigError, match=r"max_total_sequence_length=65 exceeds the model's context of 64 tokens"):
        check_model_folder(config, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 65}))
    check_model_folder(config, tmp_path)
