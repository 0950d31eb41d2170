"""Which files a sandbox must show so that this Python starts: the program, its standard library, shared libraries.

Installed packages are not among them, nor is anything of the caller's.
"""

import os
import re
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from rl.core.errors import ConfigError

_LDD_DEADLINE_S = 60.0
_LOADED = re.compile(r"(/\S+) \(0x[0-9a-f]+\)")
# Windows on a screen: a dozen more libraries for what a sandbox cannot have.
_SCREEN_MODULE = "_tkinter"


@dataclass(frozen=True)
class InterpreterFiles:
    """Paths, the same inside and outside.

    Attributes:
        executable: The interpreter itself, behind all links of virtual environments.
        shown: Files and folders to show read-only.
        hidden: Folders below them to show empty: installed packages.
    """

    executable: str
    shown: tuple[str, ...]
    hidden: tuple[str, ...]


def find_interpreter_files() -> InterpreterFiles:
    """Look at the running interpreter.

    Raises:
        ConfigError: its shared libraries cannot be listed.
    """
    executable = os.path.realpath(sys.executable)
    library = Path(os.path.realpath(sysconfig.get_path("stdlib")))
    extensions = [path for path in sorted(library.glob("lib-dynload/*.so")) if not path.name.startswith(_SCREEN_MODULE)]
    hidden = [library / name for name in ("site-packages", "dist-packages")]
    return InterpreterFiles(
        executable=executable,
        shown=(executable, str(library), *_shared_libraries([executable, *map(str, extensions)])),
        hidden=tuple(str(folder) for folder in hidden if folder.is_dir()),
    )


def _shared_libraries(files: list[str]) -> list[str]:
    """Return the libraries that the loader would load for these files, the loader included."""
    try:
        listed = subprocess.run(
            ["ldd", *files],
            capture_output=True,
            text=True,
            timeout=_LDD_DEADLINE_S,
            env={"PATH": os.environ.get("PATH", os.defpath)},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"cannot list the shared libraries of {files[0]}: {error}; ldd belongs to libc-bin"
        ) from error
    return sorted(set(_LOADED.findall(listed.stdout)))
