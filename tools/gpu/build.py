"""Compile the native libraries with nvcc and g++ alone: which commands, and running them side by side.

    plan = plan_build(find_toolchain(None), Path("/tmp/native"))
    seconds = run_build(plan, jobs=16)      # libtandem_{loss,refit}.so and, where cuBLAS is found, libtandem_cuda.so

Bazel's targets say the same in more words; the options are those of csrc/copts.bzl and third_party/cuda/cuda.bzl.
"""

import concurrent.futures
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from tools.bench.machine import ROOT
from tools.gpu.toolchain import Toolchain

OPERATORS = "libtandem_loss.so"
KERNELS = "libtandem_cuda.so"
REFIT = "libtandem_refit.so"
_CPU_FLAGS = ["-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fvisibility=hidden"]
_HOST_FLAGS = ["-std=c++20", "-fPIC", *_CPU_FLAGS]
_STABLE_ABI = re.compile(r'_TARGET_VERSION = "(\w+)"')
# Tests, what their processes do, and which backend they take.
_TEST_SOURCE = re.compile(r"_(test|roles)\.cc$|^backend_(cpu|emulated)\.cc$")
# Of csrc/refit, what the operators call too.
_SHARED_SOURCES = ("digest.cc", "pack_cpu.cc")

# A file takes some seconds; one that takes this long hangs.
_STEP_S = 300.0


class BuildError(Exception):
    """A command failed; the message has its output."""


@dataclass(frozen=True)
class Step:
    """A command and the file that it makes."""

    output: Path
    command: tuple[str, ...]


@dataclass(frozen=True)
class BuildPlan:
    """All commands of a build.

    Attributes:
        compiles: In any order, side by side.
        links: After all of them.
        missing: Why a library is left out, or "".
    """

    compiles: tuple[Step, ...]
    links: tuple[Step, ...]
    missing: str


def plan_build(tools: Toolchain, folder: Path, root: Path = ROOT) -> BuildPlan:
    """Return the commands that build the libraries into a folder."""
    kernels = [_nvcc_step(tools, source, folder, root) for source in cuda_sources(root)]
    refit = [_host_step(tools, source, folder, root) for source in refit_sources(root)]
    operators = [_host_step(tools, source, folder, root) for source in host_sources(root)]
    host = list({step.output: step for step in [*operators, *refit]}.values())
    links = [_link_operators(tools, operators, folder), _link_refit(refit, folder)]
    missing = ""
    if tools.cublas is None:
        missing = (
            f"{KERNELS} is not linked: cublasLt.h with its library is neither in {tools.toolkit} nor in the wheel "
            "nvidia-cublas of this Python; name its folder with --cublas"
        )
    else:
        library = [_cuda_host_step(tools, source, folder, root) for source in cuda_host_sources(root)]
        links.append(_link_kernels(tools, [*kernels, *library], folder))
        kernels += library
    return BuildPlan(tuple([*kernels, *host]), tuple(links), missing)


def cuda_sources(root: Path) -> list[Path]:
    """Return the kernel files."""
    return sorted(source for part in ("loss", "refit") for source in (root / "csrc" / part).glob("*.cu"))


def host_sources(root: Path) -> list[Path]:
    """Return what makes up the operators: kernels of the CPU, the linear layer, bindings."""
    parts = (source for part in ("loss", "bindings") for source in (root / "csrc" / part).glob("*.cc"))
    shared = (root / "csrc" / "refit" / name for name in _SHARED_SOURCES)
    return sorted(source for source in (*parts, *shared) if not _is_test(source))


def refit_sources(root: Path) -> list[Path]:
    """Return what makes up the refit's transport."""
    return sorted(source for source in (root / "csrc" / "refit").glob("*.cc") if not _is_test(source))


def cuda_host_sources(root: Path) -> list[Path]:
    """Return the C++ files of the CUDA library."""
    return sorted(source for source in (root / "csrc" / "cuda").glob("*.cc") if not _is_test(source))


def _is_test(source: Path) -> bool:
    """bindings/backend.cc is none: only a name with the backend behind it is."""
    return _TEST_SOURCE.search(source.name) is not None


def _object(source: Path, folder: Path, root: Path) -> Path:
    return folder / "objects" / ("_".join(source.relative_to(root).parts) + ".o")


def _nvcc_step(tools: Toolchain, source: Path, folder: Path, root: Path) -> Step:
    output = _object(source, folder, root)
    flags = ["-std=c++20", "-O3", f"-arch=sm_{tools.arch}", "-Xcompiler=-fPIC,-fvisibility=hidden", f"-I{root}"]
    return Step(output, (str(tools.nvcc), *flags, "-c", str(source), "-o", str(output)))


def _host_step(tools: Toolchain, source: Path, folder: Path, root: Path) -> Step:
    output = _object(source, folder, root)
    flags = [*_HOST_FLAGS, f"-I{root}"]
    if source.parent.name == "bindings":
        flags += [f"-isystem{tools.torch / 'include'}", f"-DTORCH_TARGET_VERSION={stable_abi_version(root)}"]
    return Step(output, ("g++", *flags, "-c", str(source), "-o", str(output)))


def stable_abi_version(root: Path) -> str:
    """Return the oldest torch that the operators support, as third_party/torch says it."""
    found = _STABLE_ABI.search((root / "third_party" / "torch" / "torch.bzl").read_text())
    if found is None:
        raise BuildError("third_party/torch/torch.bzl names no _TARGET_VERSION")
    return found.group(1)


def _cuda_host_step(tools: Toolchain, source: Path, folder: Path, root: Path) -> Step:
    assert tools.cublas is not None
    output = _object(source, folder, root)
    includes = [f"-I{root}", f"-isystem{tools.toolkit / 'include'}", f"-isystem{tools.cublas.include}"]
    return Step(output, ("g++", *_HOST_FLAGS, *includes, "-c", str(source), "-o", str(output)))


def _link_operators(tools: Toolchain, objects: list[Step], folder: Path) -> Step:
    library = tools.torch / "lib"
    flags = [
        f"-L{library}",
        f"-Wl,-rpath,{library}",
        "-Wl,--exclude-libs,ALL",
        "-ltorch",
        "-ltorch_cpu",
        "-lc10",
        "-ldl",
    ]
    return _link(("g++", "-shared"), objects, flags, folder / OPERATORS)


def _link_refit(objects: list[Step], folder: Path) -> Step:
    flags = ["-Wl,--exclude-libs,ALL", "-Wl,--no-undefined", "-lpthread", "-ldl"]
    return _link(("g++", "-shared"), objects, flags, folder / REFIT)


def _link_kernels(tools: Toolchain, objects: list[Step], folder: Path) -> Step:
    """nvcc links its own runtime, as a static library; it takes no file named *.so.13 but hands it to the linker."""
    assert tools.cublas is not None
    library = tools.cublas.library
    flags = ["-Xlinker", "--exclude-libs,ALL", "-Xlinker", f"-rpath,{library.parent}", "-Xlinker", str(library)]
    return _link((str(tools.nvcc), "-shared", f"-arch=sm_{tools.arch}"), objects, flags, folder / KERNELS)


def _link(command: tuple[str, ...], objects: list[Step], flags: list[str], output: Path) -> Step:
    return Step(output, (*command, *(str(step.output) for step in objects), *flags, "-o", str(output)))


def run_build(plan: BuildPlan, jobs: int) -> dict[str, float]:
    """Run the commands, `jobs` at a time; return seconds by file made.

    Raises:
        BuildError: a command failed.
    """
    seconds: dict[str, float] = {}
    for step in (*plan.compiles, *plan.links):
        step.output.parent.mkdir(parents=True, exist_ok=True)
    for steps in (plan.compiles, plan.links):
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            for step, took in zip(steps, pool.map(_run, steps), strict=True):
                seconds[step.output.name] = took
    return seconds


def _run(step: Step) -> float:
    start = time.monotonic()
    try:
        done = subprocess.run(step.command, capture_output=True, text=True, check=False, timeout=_STEP_S)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{' '.join(step.command)}\nnot done after {_STEP_S:.0f} s") from error
    if done.returncode != 0:
        raise BuildError(f"{' '.join(step.command)}\n{done.stdout}{done.stderr}")
    return time.monotonic() - start
