"""Find what compiles the native code on a machine without Bazel: nvcc, its toolkit, cuBLAS, torch's headers."""

import os
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Cublas:
    """Headers and library of cuBLASLt."""

    include: Path
    library: Path


@dataclass(frozen=True)
class Toolchain:
    """Where everything is.

    Attributes:
        nvcc: The compiler.
        toolkit: Its toolkit, with include/.
        cublas: cuBLASLt, or None where nobody has its headers: then nothing links.
        torch: The folder of the torch package, with include/ and lib/.
        arch: The architecture to compile for, such as 90.
    """

    nvcc: Path
    toolkit: Path
    cublas: Cublas | None
    torch: Path
    arch: str


def find_toolchain(arch: str | None, cublas: Path | None = None) -> Toolchain:
    """Return the machine's tools.

    Args:
        arch: None is that of the first GPU, or 90 without one.
        cublas: a folder to look for cuBLAS in first.

    Raises:
        FileNotFoundError: there is no nvcc.
    """
    nvcc = find_nvcc()
    toolkit = toolkit_of(nvcc)
    site_packages = Path(sysconfig.get_path("purelib"))
    chosen = [] if cublas is None else [cublas]
    return Toolchain(
        nvcc=nvcc,
        toolkit=toolkit,
        cublas=find_cublas([*chosen, toolkit, *toolkit.glob("targets/*"), *_nvidia_wheels(site_packages)]),
        torch=Path(torch.__file__).parent,
        arch=arch or device_arch(),
    )


def find_nvcc() -> Path:
    """Return nvcc: in CUDA_HOME, on PATH or in /usr/local/cuda."""
    home = os.environ.get("CUDA_HOME")
    on_path = shutil.which("nvcc")
    places = [Path(home) / "bin" / "nvcc" if home else None, Path(on_path) if on_path else None]
    for place in (*places, Path("/usr/local/cuda/bin/nvcc")):
        if place is not None and place.is_file():
            return place
    raise FileNotFoundError("nvcc is neither in CUDA_HOME, nor on PATH, nor in /usr/local/cuda; install CUDA >= 12.8")


def toolkit_of(nvcc: Path) -> Path:
    """Return the toolkit's folder, as nvcc names it: the file may be a link or a script elsewhere."""
    shown = subprocess.run(
        [str(nvcc), "--dryrun", "-c", "-x", "cu", os.devnull, "-o", os.devnull],
        capture_output=True,
        text=True,
        check=False,
    )
    top = re.search(r"^#\$ TOP=(.*)$", shown.stderr, re.MULTILINE)
    return Path(top.group(1)).resolve() if top else nvcc.resolve().parents[1]


def find_cublas(roots: list[Path]) -> Cublas | None:
    """Return the first of these folders' cuBLASLt that has header and library."""
    for root in roots:
        libraries = [*root.glob("lib*/libcublasLt.so"), *sorted(root.glob("lib*/libcublasLt.so.*"))]
        if (root / "include" / "cublasLt.h").is_file() and libraries:
            return Cublas(root / "include", libraries[0])
    return None


def _nvidia_wheels(site_packages: Path) -> list[Path]:
    """Return the folders in which wheels of cuBLAS lay their files: one for CUDA 13, one for 12."""
    return [site_packages / "nvidia" / "cu13", site_packages / "nvidia" / "cublas"]


def device_arch() -> str:
    """Return the architecture of the first GPU, or 90."""
    if not torch.cuda.is_available():
        return "90"
    major, minor = torch.cuda.get_device_capability()
    return f"{major}{minor}"
