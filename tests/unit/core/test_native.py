"""Finding and loading the operator library: places, messages, and what waits for it."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

from rl.core import native
from rl.core.errors import FatalError
from rl.core.native import (
    LIBRARY_DIR_VARIABLE,
    REFIT_LIBRARY,
    cpu_instruction_set,
    cuda_library_failure,
    library_candidates,
    native_library,
    on_load,
    require_native,
)

_ASK_FOR_CUDA = "from rl.core.native import cuda_library_failure; print(cuda_library_failure())"


def test_the_library_is_found_and_loads() -> None:
    require_native()
    assert torch.ops.tandem.token_logprobs_fwd.default is not None


def test_what_waits_for_the_library_runs_once_in_order() -> None:
    seen: list[str] = []
    on_load(lambda: seen.append("first"))
    on_load(lambda: seen.append("second"))
    require_native()
    require_native()
    assert seen == ["first", "second"]


def test_threads_that_load_at_once_wait_for_what_one_of_them_registers() -> None:
    together, registered = threading.Barrier(4), []

    def load() -> list[int]:
        together.wait()
        require_native()
        return list(registered)

    on_load(lambda: registered.append(1))
    with ThreadPoolExecutor(4) as pool:
        seen = [pool.submit(load) for _ in range(4)]
        assert [future.result() for future in seen] == [[1]] * 4


def test_a_library_that_lacks_an_operator_is_called_outdated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_waiting", [])
    on_load(lambda: torch.library.register_fake("tandem::no_such_operator", lambda x: x))
    for _ in range(2):  # not only the first time
        with pytest.raises(FatalError, match=r"not of this version .*no_such_operator.*build or install it again"):
            require_native()


@pytest.mark.parametrize("ask", [cpu_instruction_set, cuda_library_failure])
def test_a_library_that_cannot_be_asked_is_called_outdated(
    monkeypatch: pytest.MonkeyPatch, ask: Callable[[], object]
) -> None:
    require_native()
    monkeypatch.setattr(torch.ops, "tandem", torch.ops.tandem_of_another_version)
    with pytest.raises(FatalError, match=r"not of this version .*build or install it again"):
        ask()


def test_the_instruction_set_is_one_of_the_three_builds() -> None:
    assert cpu_instruction_set() in ("avx512", "avx2", "base")


def test_a_missing_library_is_explained_with_the_places_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIBRARY_DIR_VARIABLE, str(tmp_path))
    assert library_candidates() == [tmp_path / "libtandem_loss.so"]
    failure = native._load_failure.__wrapped__()
    assert failure is not None
    assert str(tmp_path) in failure
    assert "policy.logprob_impl=torch" in failure


def test_the_library_of_the_refit_is_found_where_the_operators_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places, others = library_candidates(REFIT_LIBRARY), library_candidates()
    assert [path.parent for path in places] == [path.parent for path in others]
    monkeypatch.setenv(LIBRARY_DIR_VARIABLE, str(tmp_path))
    with pytest.raises(FatalError, match=f"{tmp_path}/libtandem_refit.so.*bazel build //csrc/bindings:refit"):
        native_library(REFIT_LIBRARY)
    (tmp_path / REFIT_LIBRARY).touch()
    assert native_library(REFIT_LIBRARY) == tmp_path / REFIT_LIBRARY


def test_a_broken_library_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libtandem_loss.so").write_bytes(b"not a library")
    monkeypatch.setenv(LIBRARY_DIR_VARIABLE, str(tmp_path))
    failure = native._load_failure.__wrapped__()
    assert failure is not None
    assert "does not load" in failure


def ask_for_cuda(folder: Path) -> str:
    """Why a process whose native libraries lie in `folder` cannot use the CUDA kernels."""
    environment = {**os.environ, LIBRARY_DIR_VARIABLE: str(folder)}
    command = [sys.executable, "-c", _ASK_FOR_CUDA]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the operator library and no CUDA kernels."""
    library = next(path for path in library_candidates() if path.is_file())
    shutil.copy(library, tmp_path)
    return tmp_path


def test_missing_cuda_kernels_are_explained_with_the_places_and_the_remedy(folder: Path) -> None:
    failure = ask_for_cuda(folder)
    assert f"{folder}/libtandem_cuda.so" in failure
    assert "bazel build --config=cuda" in failure
    assert "policy.logprob_impl=torch" in failure


def test_broken_cuda_kernels_are_explained(folder: Path) -> None:
    (folder / "libtandem_cuda.so").write_bytes(b"not a library")
    assert "the CUDA kernels do not load" in ask_for_cuda(folder)


def test_cuda_kernels_of_another_build_are_explained(folder: Path) -> None:
    shutil.copy(psutil._psplatform.cext.__file__, folder / "libtandem_cuda.so")
    assert "of another build than the operators" in ask_for_cuda(folder)
