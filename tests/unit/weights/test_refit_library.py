"""The library of the transfer is opened once, or its absence, damage or age is explained; its errors carry all."""

import ctypes
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rl.core.errors import FatalError
from rl.core.native import LIBRARY_DIR_VARIABLE, REFIT_LIBRARY
from rl.weights import refit_library as module
from rl.weights.faults import NO_BUCKET, NO_RANK, TransferError
from rl.weights.refit_library import ErrorRecord, LinkRecord, TimesRecord, call, refit_library


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder, the only place where the library is looked for."""
    monkeypatch.setenv(LIBRARY_DIR_VARIABLE, str(tmp_path))
    refit_library.cache_clear()
    yield tmp_path
    refit_library.cache_clear()


def test_it_is_opened_once() -> None:
    assert refit_library() is refit_library()


def test_a_missing_library_is_explained_with_its_places_and_the_remedy(folder: Path) -> None:
    with pytest.raises(FatalError, match=f"in none of: {folder}/{REFIT_LIBRARY}.*bazel build //csrc/bindings:refit"):
        refit_library()


def test_a_broken_library_is_explained(folder: Path) -> None:
    (folder / REFIT_LIBRARY).write_bytes(b"no library")
    with pytest.raises(FatalError, match="does not load.*build or install it again"):
        refit_library()


def test_a_library_of_something_else_is_explained(folder: Path) -> None:
    shutil.copy(psutil._psplatform.cext.__file__, folder / REFIT_LIBRARY)
    with pytest.raises(FatalError, match="does not load.*tandem_"):
        refit_library()


def test_a_library_of_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refit_library.cache_clear()
    monkeypatch.setattr(module, "ABI_VERSION", module.ABI_VERSION + 1)
    with pytest.raises(FatalError, match="interface version 1, this release needs 2"):
        refit_library()
    refit_library.cache_clear()


def test_records_have_the_size_that_the_interface_says() -> None:
    """Of a 64-bit machine: what refit_abi.h lays out, with its padding."""
    assert ctypes.sizeof(ErrorRecord) == 4 + 4 + 8 + 488
    assert ctypes.sizeof(TimesRecord) == 4 * 8
    assert ctypes.sizeof(LinkRecord) == 6 * 4 + 8 + 8 + 8 + 3 * 8 + 2 * 4


def test_a_failed_call_is_an_error_of_its_kind() -> None:
    handle = ctypes.c_void_p()
    with pytest.raises(TransferError) as caught:
        call("tandem_plan_parse", b"nonsense", 8, ctypes.byref(handle))
    assert (caught.value.kind, caught.value.rank, caught.value.bucket) == ("mismatch", NO_RANK, NO_BUCKET)
    assert handle.value is None


def test_a_reason_of_any_length_is_cut_at_a_character() -> None:
    record = ErrorRecord.of("ö" * 400, "data loss", 3, 5)
    assert record.message.decode() == "ö" * 243
    assert (record.code, record.rank, record.bucket) == (7, 3, 5)
