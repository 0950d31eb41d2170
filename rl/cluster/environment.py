"""What worker processes inherit of the driver's environment: an allow-list, never secrets.

It reads no setting of its own and knows no Ray.
"""

import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ALLOWED_NAMES = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TERM", "VIRTUAL_ENV"}
    | {"LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONSAFEPATH", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE"}
    | {"PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "TOKENIZERS_PARALLELISM", "SSL_CERT_FILE", "SSL_CERT_DIR"}
    | {"REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "DO_NOT_TRACK", "JAVA_RUNFILES"}
    | {"RUNFILES_DIR", "RUNFILES_MANIFEST_FILE", "TEST_TMPDIR", "TEST_SRCDIR", "SPT_NOENV", "RL_NATIVE_DIR"}
)
ALLOWED_PREFIXES = (
    *("LC_", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "GOMP_", "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "UCX_"),
    *("TORCH", "PYTORCH_", "VLLM_", "HF_", "TRANSFORMERS_", "TANDEM_", "RAY_"),
)
SECRET = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|COOKIE)(_|$)")
# Ray's own processes must know the token of their cluster.
NEEDED_SECRETS = frozenset({"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"})


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of `environment` that worker processes inherit; entries of PYTHONPATH become absolute."""
    kept = {name: value for name, value in environment.items() if is_inherited(name)}
    if kept.get("PYTHONPATH"):
        entries = kept["PYTHONPATH"].split(os.pathsep)
        kept["PYTHONPATH"] = os.pathsep.join(str(Path(entry).absolute()) for entry in entries if entry)
    return kept


def is_inherited(name: str) -> bool:
    """Whether worker processes may see a variable of the driver."""
    if name in NEEDED_SECRETS:
        return True
    return (name in ALLOWED_NAMES or name.startswith(ALLOWED_PREFIXES)) and SECRET.search(name) is None


def import_variables() -> dict[str, str]:
    """Let workers import what the driver can: its own import path, without what the interpreter adds by itself.

    Ray passes on a part of the path only; a Bazel runfiles tree or a path that the driver changed would be missing.
    """
    own = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    archive = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    entries = dict.fromkeys(Path(entry).absolute() for entry in sys.path if not entry.endswith(archive))
    foreign = [str(entry) for entry in entries if not any(entry.resolve().is_relative_to(folder) for folder in own)]
    return {"PYTHONPATH": os.pathsep.join(foreign)} if foreign else {}


def thread_variables(num_threads: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that give a worker process its threads; without them Ray sets one thread per CPU slot.

    Idle threads sleep unless the user's `environment` says otherwise: trainer and generators alternate on the same
    cores, and the threads of the one that waits by spinning would take them from the other.
    """
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    waiting = {"OMP_WAIT_POLICY": environment.get("OMP_WAIT_POLICY", "PASSIVE")}
    return dict.fromkeys(names, str(num_threads)) | waiting


def quiet_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Usage statistics and hub telemetry stay off unless the user's environment asks for them."""
    defaults = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    return {name: value for name, value in defaults.items() if name not in environment}


@contextmanager
def exchanged_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Make `variables` the whole environment of this process while child processes are started."""
    before = dict(os.environ)
    hidden = set(before) - set(variables)
    added = set(variables) - set(before)
    for name in hidden:
        del os.environ[name]
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
        os.environ.update(before)
