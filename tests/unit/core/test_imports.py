"""Objects by import path, and whose fault it is when they are missing."""

from pathlib import Path

import pytest

from rl.core.errors import ConfigError
from rl.core.imports import import_object


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_missing_module_and_a_missing_package_above_it_are_errors_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match="cannot import module 'no_such_package.rewards'"):
        import_object("no_such_package.rewards:score")
    with pytest.raises(ConfigError, match="cannot import module 'json.no_such_module'"):
        import_object("json.no_such_module:score")


def test_what_a_module_itself_lacks_is_not_an_error_of_the_configuration(folder: Path) -> None:
    (folder / "imports_a_prefix.py").write_text("import imports_a\n")
    with pytest.raises(ModuleNotFoundError, match="imports_a"):
        import_object("imports_a_prefix:score")
    (folder / "names_nothing.py").write_text("raise ModuleNotFoundError('interrupted')\n")
    with pytest.raises(ModuleNotFoundError, match="interrupted"):
        import_object("names_nothing:score")
