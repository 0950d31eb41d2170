"""Find a configuration file by path or, among those that are shipped, by name.

Shipped files stand in `configs/` beside the package (a checkout, Bazel's runfiles) or in `rl/_configs` (an installed
wheel).
"""

from difflib import get_close_matches
from pathlib import Path

import rl
from rl.core.errors import ConfigError

_SUFFIX = ".yaml"


def shipped_folder() -> Path:
    """Return the folder of the shipped configurations.

    Raises:
        ConfigError: the installation lacks it.
    """
    for folder in _shipped_folders():
        if (folder / "base.yaml").is_file():
            return folder
    raise ConfigError(
        f"the shipped configurations are missing beside {Path(rl.__file__).parent}; reinstall Tandem, or give the path "
        "of a file"
    )


def is_shipped(path: Path) -> bool:
    """Return whether a file is one of the shipped configurations."""
    return path.parent in _shipped_folders()


def current_folder() -> Path:
    """Return where the user stands.

    Raises:
        ConfigError: that folder has been deleted.
    """
    try:
        return Path.cwd()
    except FileNotFoundError as error:
        raise ConfigError("the current folder does not exist any more; change to another one") from error


def find_config(name: str) -> Path:
    """Return the file that `name` means: a path from the current folder, or the name of a shipped configuration.

    Raises:
        ConfigError: there is no such file, or the current folder has been deleted.
    """
    current_folder()
    for candidate in (Path(name), Path(name + _SUFFIX)):
        if candidate.is_file():
            return candidate
    shipped = shipped_config(name)
    if shipped is not None:
        return shipped
    names = sorted(path.stem for path in shipped_folder().glob(f"*{_SUFFIX}"))
    close = get_close_matches(Path(name).stem, names, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ConfigError(f"configuration '{name}' is neither a file nor one of the shipped {', '.join(names)}{hint}")


def shipped_config(name: str) -> Path | None:
    """Return the shipped configuration of that name, with or without its suffix, or None."""
    if Path(name).parent != Path():
        return None
    shipped = shipped_folder() / f"{name.removesuffix(_SUFFIX)}{_SUFFIX}"
    return shipped if shipped.is_file() else None


def _shipped_folders() -> tuple[Path, Path]:
    package = Path(rl.__file__).parent
    return package / "_configs", package.parent / "configs"


def config_name(path: Path) -> str:
    """Return a configuration's name, from which the default `logger.log_dir` is made: results/<name>."""
    return path.stem
