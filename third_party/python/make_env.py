"""Make (or find) the Python environment of one lock file and print where it is.

An environment lives in a cache folder of the user, not in Bazel's: its name is a hash of the interpreter, the lock and
this script, so every checkout with the same lock shares it and a changed lock makes a new one. One process builds and
others wait on a file lock; an environment without its `.complete` marker is thrown away and built again.

Standard library only: it runs before anything is installed. It does not resolve versions; tools/lock does.

    python3.11 make_env.py --flavor cpu --report env.json
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
UV_PINS = HERE / "uv.txt"
HEARTBEAT_S = 15
PROBE = """
import json, sys, sysconfig
import torch
print(json.dumps({
    "home": sys.prefix,
    "python": sys.executable,
    "version": "%d.%d" % sys.version_info[:2],
    "site_packages": sysconfig.get_path("purelib"),
    "python_include": sysconfig.get_path("include"),
    "torch_version": torch.__version__,
    "torch_cxx11_abi": int(torch._C._GLIBCXX_USE_CXX11_ABI),
}))
"""


class InstallError(Exception):
    """A command of the installation failed; the message ends with the command's last lines."""


def say(text: str) -> None:
    """Write one progress line where the user sees it while Bazel waits for us."""
    sys.stderr.write(f"python environment: {text}\n")
    sys.stderr.flush()


def cache_root() -> Path:
    """Return the folder that holds all environments of this user."""
    return Path(os.environ.get("RL_ENV_CACHE") or "~/.cache/tandem/envs").expanduser()


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the file lock at `path`; say so when another process has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process is building it; waiting for {path}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def run(what: str, command: list[str], log: Path) -> None:
    """Run a command, stream its lines, keep them in `log`, and report every few seconds that it still works.

    Raises:
        InstallError: the command failed.
    """
    started = time.monotonic()
    finished = threading.Event()

    def beat() -> None:
        while not finished.wait(HEARTBEAT_S):
            say(f"{what}: {time.monotonic() - started:.0f} s so far")

    threading.Thread(target=beat, daemon=True).start()
    lines: list[str] = []
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    try:
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line.rstrip())
                if not line.startswith((" + ", " ~ ")):
                    say(line.rstrip())
    finally:
        finished.set()
    with log.open("a") as handle:
        handle.write("\n".join([f"$ {' '.join(command)}", *lines, ""]))
    if process.returncode:
        tail = "\n".join(lines[-25:])
        raise InstallError(f"{what} failed with exit code {process.returncode}; the whole log is {log}\n{tail}")
    say(f"{what}: done in {time.monotonic() - started:.0f} s")


def find_uv() -> Path:
    """Return the pinned uv; fetch it with pip into its own folder when it is not there yet."""
    digest = hashlib.sha256(UV_PINS.read_bytes() + sys.version.encode()).hexdigest()[:12]
    home = cache_root() / f"uv-{digest}"
    uv = home / "bin" / "uv"
    with exclusive(cache_root() / f"uv-{digest}.lock"):
        if not (home / ".complete").exists():
            shutil.rmtree(home, ignore_errors=True)
            log = cache_root() / f"uv-{digest}.log"
            run("making room for the installer", [sys.executable, "-m", "venv", str(home)], log)
            pip = [str(home / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
            run("fetching the installer (uv)", [*pip, "--no-deps", "--require-hashes", "-r", str(UV_PINS)], log)
            (home / ".complete").touch()
    return uv


def wheel_sources(flavor: dict[str, str]) -> list[str]:
    """Return uv's options that say where torch's wheel of this flavour is to be found besides PyPI."""
    if not flavor["torch_index"]:
        return []  # PyPI's own build: a folder that holds the CPU build must not get in its way
    find_links = os.environ.get("PIP_FIND_LINKS", "").split()
    if find_links:
        return [option for place in find_links for option in ("--find-links", place)]
    return ["--extra-index-url", flavor["torch_index"], "--index-strategy", "unsafe-best-match"]


def build(flavor: dict[str, str]) -> Path:
    """Return the environment of this flavour's lock, building it when it is not in the cache.

    Raises:
        InstallError: the installation failed.
    """
    lock = HERE / flavor["lock"]
    interpreter = f"{sys.version} {os.path.realpath(sys.executable)}".encode()
    identity = b"\0".join([interpreter, lock.read_bytes(), Path(__file__).read_bytes()])
    name = hashlib.sha256(identity).hexdigest()[:16]
    home = cache_root() / name
    if (home / ".complete").exists():
        return home
    uv = find_uv()
    with exclusive(cache_root() / f"{name}.lock"):
        if (home / ".complete").exists():
            return home
        say(f"building {home} from {lock.name} (once; about 4 GB and some minutes)")
        shutil.rmtree(home, ignore_errors=True)
        log = cache_root() / f"{name}.log"
        run("creating", [str(uv), "venv", "--quiet", "--python", sys.executable, str(home)], log)
        # The machine's own certificates, so that a company's or a CI's proxy is trusted as it is by pip.
        install = [
            str(uv),
            "pip",
            "install",
            "--system-certs",
            "--python",
            str(home / "bin" / "python"),
            "--no-deps",
            "--require-hashes",
        ]
        # Tests run in a sandbox that cannot write here: without bytecode each of them would compile torch again.
        install += ["--compile-bytecode", *wheel_sources(flavor), "-r", str(lock)]
        run(f"installing {lock.name}", install, log)
        (home / ".complete").touch()
    return home


def probe(python: Path) -> dict[str, object]:
    """Ask an environment for its paths and its torch.

    Raises:
        InstallError: it is no Python 3.11 with torch in it.
    """
    if not python.exists():
        raise InstallError(f"{python} does not exist; RL_PYTHON_VENV must name the folder of a virtual environment")
    command = [str(python), "-I", "-c", PROBE]
    answer = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if answer.returncode:
        tail = "\n".join(answer.stderr.splitlines()[-25:])
        raise InstallError(f"{python} cannot import torch:\n{tail}")
    report: dict[str, object] = json.loads(answer.stdout.splitlines()[-1])
    if report["version"] != "3.11":
        raise InstallError(f"{python} is Python {report['version']}; Tandem needs 3.11")
    return report


def main() -> int:
    """Parse the command line, make the environment, write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flavor", default=os.environ.get("RL_FLAVOR") or "cpu", help="cpu or cuda")
    parser.add_argument("--report", type=Path, help="write the paths of the environment here, as JSON")
    parser.add_argument("--uv", action="store_true", help="only make uv available and print its path")
    options = parser.parse_args()
    flavors = tomllib.loads((HERE / "flavors.toml").read_text())
    try:
        if options.uv:
            sys.stdout.write(f"{find_uv()}\n")
            return 0
        if options.flavor not in flavors:
            raise InstallError(f"RL_FLAVOR={options.flavor} is unknown; choose one of {', '.join(flavors)}")
        own = os.environ.get("RL_PYTHON_VENV")
        home = Path(own).expanduser() if own else build(flavors[options.flavor])
        report = probe(home / "bin" / "python")
    except (InstallError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if options.report:
        options.report.write_text(json.dumps(report, indent=1))
    sys.stdout.write(f"{home}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
