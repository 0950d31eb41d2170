"""Models become local folders: converted once and whole, or found, or refused in words."""

import threading
import time
from pathlib import Path

import pytest

from rl.core.errors import ConfigError
from rl.data import pretrained
from rl.data.model_source import default_cache_dir
from rl.data.pretrained import resolve_model
from tests.support.tiny_model import make_tiny_model

NAME = "package:weights_pkg/m.gguf"


@pytest.fixture
def gguf_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "site" / "weights_pkg"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "m.gguf").write_bytes(b"GGUF" + bytes(100))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return package / "m.gguf"


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    assert resolve_model(str(folder)) == folder.resolve()


def test_runs_at_the_same_time_convert_once(
    gguf_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted: list[Path] = []
    waiting = threading.Event()

    def convert(file: Path, target: Path) -> None:
        converted.append(file)
        (target / "config.json").write_text("{}")
        assert waiting.wait(30)

    def progress(line: str) -> None:
        if "waiting for another" in line:
            waiting.set()

    monkeypatch.setattr(pretrained, "_convert", convert)
    results: list[Path] = []
    threads = [
        threading.Thread(target=lambda: results.append(resolve_model(NAME, tmp_path / "cache", progress)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert converted == [gguf_package]
    assert len(results) == 3 and len(set(results)) == 1
    assert (results[0] / "config.json").is_file()


def test_a_conversion_that_dies_leaves_no_half_model_and_the_next_one_cleans_up(
    gguf_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(_: Path, target: Path) -> None:
        (target / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    def convert(_: Path, target: Path) -> None:
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(pretrained, "_convert", die)
    with pytest.raises(KeyboardInterrupt):
        resolve_model(NAME, tmp_path / "cache")
    monkeypatch.setattr(pretrained, "_convert", convert)
    folder = resolve_model(NAME, tmp_path / "cache")
    assert [file.name for file in folder.iterdir()] == ["config.json"]
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == [folder]


def test_another_file_of_the_same_name_is_another_model(
    gguf_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrained, "_convert", lambda _, target: (target / "config.json").write_text("{}"))
    first = resolve_model(NAME, tmp_path / "cache")
    gguf_package.write_bytes(b"GGUF" + bytes(99) + b"x")
    assert resolve_model(NAME, tmp_path / "cache") != first


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    assert default_cache_dir() == tmp_path / "models"


def test_an_unreachable_hub_is_noticed_within_the_probe_and_the_model_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    start = time.monotonic()
    with pytest.raises(ConfigError, match="not in the local cache.*not reachable"):
        resolve_model("nobody/no-such-model")
    assert time.monotonic() - start < 10
