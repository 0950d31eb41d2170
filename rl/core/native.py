"""Find csrc's libraries, and load the one of operators.

This module is the only one that looks for native libraries. It knows no operator: the modules of rl/ops that wrap one
have its formulas (autograd, fake kernels) registered through `on_load`. Whether the native operator or the plain torch
one is used is the caller's choice. The library of the refit is opened by its own wrapper in rl/weights.

    on_load(register_formulas)   # at import, beside the wrapper
    require_native()             # before the first use
"""

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from rl.core.errors import FatalError

LIBRARY_DIR_VARIABLE = "RL_NATIVE_DIR"
_LOSS_LIBRARY = "libtandem_loss.so"
REFIT_LIBRARY = "libtandem_refit.so"
# How each is built, and what works without it.
_TARGETS = {_LOSS_LIBRARY: "//csrc/bindings:loss_ops", REFIT_LIBRARY: "//csrc/bindings:refit"}
_WAYS_OUT = {_LOSS_LIBRARY: ", or choose policy.logprob_impl=torch", REFIT_LIBRARY: ""}
# What is to run once the library is there. Filled by imports, emptied by loading.
_waiting: list[Callable[[], None]] = []
_loading = threading.Lock()  # the workers of a LocalCluster are threads


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # a compiled call loads while it is traced
def require_native() -> None:
    """Load the native operators, and register what `on_load` was given.

    Raises:
        FatalError: no library was found, or it does not load; the message lists the places and the remedy.
    """
    with _loading:
        failure = _load_failure()
    if failure is not None:
        raise FatalError(failure)
    if _waiting:
        _run_waiting()


def on_load(register: Callable[[], None]) -> None:
    """Have `register` run once, right after the library is loaded: by `require_native`, the next time it is called."""
    _waiting.append(register)


def library_candidates(library: str = _LOSS_LIBRARY) -> list[Path]:
    """Return the places where a library may be, in the order in which they are tried."""
    here = Path(__file__).absolute()
    candidates = [
        here.parents[1] / "_native" / library,  # an installed wheel
        here.parents[2] / "csrc" / "bindings" / library,  # a Bazel runfiles tree
        here.resolve().parents[2] / "bazel-bin" / "csrc" / "bindings" / library,  # a checkout after a build
    ]
    chosen = os.environ.get(LIBRARY_DIR_VARIABLE)
    return [Path(chosen) / library] if chosen else candidates


def native_library(library: str) -> Path:
    """Return where a native library is.

    Raises:
        FatalError: it is in none of its places; the message lists them and the remedy.
    """
    candidates = library_candidates(library)
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        places = ", ".join(str(path) for path in candidates)
        raise FatalError(
            f"the native library {library} is in none of: {places}. Build it with "
            f"`bazel build {_TARGETS[library]}`, install the wheel, or set {LIBRARY_DIR_VARIABLE} to its folder"
            f"{_WAYS_OUT[library]}"
        )
    return found


def cpu_instruction_set() -> str:
    """Return which build of the CPU kernels this machine runs: avx512 | avx2 | base.

    Raises:
        FatalError: the library is missing, or of another version.
    """
    require_native()
    with _outdated_is_fatal():
        name = str(torch.ops.tandem.cpu_isa())
    return name


def cuda_library_failure() -> str | None:
    """Open the CUDA kernels; return None, or why they cannot be used (which only runs on GPUs need to care about).

    Raises:
        FatalError: the library of operators is missing, or of another version.
    """
    require_native()
    with _outdated_is_fatal():
        failure = str(torch.ops.tandem.cuda_library_failure())
    return failure or None


def _run_waiting() -> None:
    with _loading:
        while _waiting:
            with _outdated_is_fatal():
                _waiting[0]()
            del _waiting[0]


@contextmanager
def _outdated_is_fatal() -> Iterator[None]:
    """Say it when an operator that is asked for is not in the library that was loaded."""
    try:
        yield
    except (RuntimeError, AttributeError) as error:  # torch's two words for an operator that it does not know
        raise FatalError(
            f"the native library {_LOSS_LIBRARY} is not of this version ({error}); build or install it again"
        ) from error


@functools.cache
def _load_failure() -> str | None:
    """Load once; return None, or why the operators cannot be used."""
    try:
        library = native_library(_LOSS_LIBRARY)
    except FatalError as error:
        return str(error)
    try:
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]  # torch leaves it untyped
    except OSError as error:
        return f"the native library {library} does not load with torch {torch.__version__}: {error}; build it again"
    return None
