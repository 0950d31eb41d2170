"""A model name is understood or refused with the way out, without importing anything heavy."""

import subprocess
import sys
from pathlib import Path

import pytest

from rl.core.errors import ConfigError
from rl.data.model_source import FolderSource, HubSource, PackageSource, check_model, parse_model_name


def make_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "weights_pkg").mkdir()
    (folder / "weights_pkg" / "__init__.py").write_text("raise AssertionError('a check must not import the package')")
    (folder / "weights_pkg" / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(folder))


def test_a_folder_with_a_configuration_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert parse_model_name(str(tmp_path)) == FolderSource(tmp_path.resolve())
    check_model(str(tmp_path))


def test_a_package_file_is_found_without_importing_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_package(tmp_path, monkeypatch)
    assert parse_model_name("package:weights_pkg/m.gguf") == PackageSource(tmp_path / "weights_pkg" / "m.gguf")


@pytest.mark.parametrize("name", ["gpt2", "owner/name", "Qwen/Qwen2.5-0.5B-Instruct"])
def test_hub_ids_are_recognised(name: str) -> None:
    assert parse_model_name(name) == HubSource(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/nowhere/at/all", "neither an existing folder nor a Hugging Face id"),
        ("./missing", "neither an existing folder"),
        ("a/b/c", "neither an existing folder"),
        ("package:no_such_package_here/m.gguf", "not installed"),
        ("package:weights_pkg/other.gguf", r"has no other.gguf; its GGUF files: \['m.gguf'\]"),
        ("package:weights_pkg", "must be package:"),
        ("package:weights_pkg/m.bin", "must be package:"),
    ],
)
def test_what_does_not_exist_is_a_config_error(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_package(tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match=message):
        check_model(name)


def test_a_folder_without_configuration_and_a_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"without config\.json"):
        check_model(str(tmp_path))
    (tmp_path / "m.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match="is a file"):
        check_model(str(tmp_path / "m.gguf"))


def test_offline_a_hub_id_must_be_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="not in the local cache"):
        check_model("owner/name")
    (tmp_path / "models--owner--name").mkdir()
    check_model("owner/name")


def test_the_check_imports_nothing_heavy() -> None:
    program = (
        "import sys, rl.data.model_source as m; m.check_model('owner/name');"
        "print([n for n in ('torch', 'transformers', 'huggingface_hub', 'vllm', 'ray') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
