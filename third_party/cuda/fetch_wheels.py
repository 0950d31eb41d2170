"""Unpack pinned wheels into a folder of the user's cache, so that every checkout shares one download.

    python3.11 fetch_wheels.py --name binutils --lock cuda-binutils.txt     # prints the folder

For what CUDA toolkits often lack. Nothing is resolved here: versions and hashes stand in the lock.
"""

import argparse
import hashlib
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

import make_env  # a script beside the locks, not a package


def fetch(name: str, requirements: str) -> Path:
    """Return the folder `name`-HASH with the files of these wheels, downloading them when it is not in the cache.

    Raises:
        InstallError: the installation failed.
    """
    folder = f"{name}-{hashlib.sha256(requirements.encode()).hexdigest()[:12]}"
    root = make_env.cache_root()
    home = root / folder
    if (home / ".complete").exists():
        return home
    uv = make_env.find_uv()
    with make_env.exclusive(root / f"{folder}.lock"):
        if (home / ".complete").exists():
            return home
        make_env.say(f"fetching {name} into {home} (once)")
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        wanted = home / "requirements.txt"
        wanted.write_text(requirements)
        command = [str(uv), "pip", "install", "--system-certs", "--python", sys.executable, "--target", str(home)]
        make_env.run(
            f"installing {name}",
            [*command, "--no-deps", "--require-hashes", "-r", str(wanted)],
            root / f"{folder}.log",
        )
        (home / ".complete").touch()
    return home


def pinned_requirement(lock: Path, wheel: str) -> str:
    """Return the lock's requirement of one wheel, with its hashes.

    Raises:
        InstallError: the lock does not pin it.
    """
    lines = lock.read_text().splitlines()
    start = next((index for index, line in enumerate(lines) if line.startswith(f"{wheel}==")), None)
    if start is None:
        raise make_env.InstallError(f"{lock} does not pin {wheel}")
    end = start
    while lines[end].endswith("\\"):
        end += 1
    return "\n".join([*lines[start : end + 1], ""])


def main() -> int:
    """Parse the command line, fetch, print the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", required=True)
    parser.add_argument("--lock", required=True, type=Path)
    options = parser.parse_args()
    try:
        home = fetch(options.name, options.lock.read_text())
    except (make_env.InstallError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{home}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
