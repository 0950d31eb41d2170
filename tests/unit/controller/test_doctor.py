"""What doctor says about a machine."""

import ctypes
import re
from pathlib import Path

import pytest

from rl.controller import doctor
from rl.controller.checklist import has_failed
from rl.controller.doctor import (
    check_bubblewrap,
    check_cuda_kernels,
    check_native,
    check_numa,
    check_package,
    check_refit,
    check_shared_memory,
    check_temporary,
    existing,
    run_doctor,
    total_bytes,
)
from rl.environments.sandbox import find_sandbox
from rl.weights.refit_library import refit_library


def test_a_container_with_64_mb_of_shared_memory_gets_the_docker_flag():
    check = check_shared_memory(64 << 20)
    assert not check.ok
    assert not check.required
    assert "--shm-size" in check.advice
    assert check.detail == "/dev/shm has 0.06 GiB"


def test_a_machine_without_shared_memory_fails():
    assert has_failed([check_shared_memory(None)])
    assert total_bytes(Path("/nowhere")) is None
    assert check_shared_memory(8 << 30).ok


def test_a_missing_package_fails_with_advice():
    check = check_package("no_such_package_anywhere", ("no-such",))
    assert has_failed([check])
    assert "README" in check.advice


def test_a_temporary_folder_too_long_for_sockets_fails(tmp_path):
    assert not check_temporary(tmp_path / ("x" * 80)).ok
    assert existing(tmp_path / "a" / "b") == tmp_path


def test_every_check_is_named_once_and_says_what_it_found(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    checks = run_doctor()
    names = [check.name for check in checks]
    assert len(set(names)) == len(names)
    assert all(check.detail for check in checks)
    assert all(check.ok or check.advice for check in checks)
    assert {
        "python",
        "torch",
        "native operators",
        "native refit",
        "cuda kernels",
        "vllm",
        "ray",
        "shared memory",
        "gpus",
    } <= set(names)


def test_the_native_operators_say_which_build_of_them_runs() -> None:
    check = check_native()
    assert check.ok
    assert re.fullmatch("loaded; the (avx512|avx2|base) build runs on this processor", check.detail)


def test_a_missing_transfer_of_weights_fails_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_refit().ok
    monkeypatch.setenv("RL_NATIVE_DIR", str(tmp_path))
    refit_library.cache_clear()
    try:
        check = check_refit()
    finally:
        refit_library.cache_clear()
    assert has_failed([check])
    assert f"{tmp_path}/libtandem_refit.so" in check.detail
    assert "//csrc/bindings:refit" in check.detail


@pytest.mark.parametrize(("gpus", "ok"), [(0, True), (8, False)])
def test_missing_cuda_kernels_are_advised_about_where_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch, gpus: int, ok: bool
) -> None:
    monkeypatch.setattr(doctor, "callable_at", lambda target: lambda: f"{target}: in none of the places")
    monkeypatch.setattr(doctor, "count_gpus", lambda: gpus)
    check = check_cuda_kernels()
    assert check.ok is ok
    assert not has_failed([check]), "every run can do without"
    assert ok or ("in none of the places" in check.detail and "logprob_impl=torch" in check.advice)


def test_cuda_kernels_that_load_are_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "callable_at", lambda target: lambda: None)
    assert check_cuda_kernels().detail == "load"


def test_a_missing_system_library_of_the_engine_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    check = check_numa()
    assert not check.ok
    assert "apt-get install libnuma1" in check.advice


def test_a_missing_sandbox_is_named_with_its_package_and_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    find_sandbox.cache_clear()
    check = check_bubblewrap()
    find_sandbox.cache_clear()
    assert not check.ok and not has_failed([check])
    assert "apt-get install bubblewrap" in check.advice
