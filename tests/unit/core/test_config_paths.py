"""Configurations are found by path or by name."""

from pathlib import Path

import pytest

from rl.core.config_paths import config_name, find_config, shipped_folder
from rl.core.errors import ConfigError


def test_a_shipped_configuration_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("grpo_math", "grpo_math.yaml"):
        path = find_config(name)
        assert path == shipped_folder() / "grpo_math.yaml"
        assert config_name(path) == "grpo_math"


def test_a_file_of_the_user_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grpo_math.yaml").write_text("")
    assert find_config("grpo_math") == Path("grpo_math.yaml")


def test_what_is_not_found_is_an_error_with_a_suggestion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="did you mean grpo_math?"):
        find_config("grpo_maths")
    with pytest.raises(ConfigError, match="neither a file nor"):
        find_config("folder/x.yaml")


def test_a_deleted_current_folder_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigError, match="the current folder does not exist any more"):
        find_config("grpo_smollm2_cpu")
