"""gpu_check's refit between two ranks on one device, over the strict NCCL on host memory."""

from pathlib import Path

import pytest

from tools.gpu.nccl_pair import Libraries, NcclPair, nccl_pair

_INSIDE = Path("csrc") / "testing" / "nccl" / "libtandem_test_nccl.so"


@pytest.fixture
def library() -> str:
    here = Path(__file__).absolute()
    places = [here.parents[3] / _INSIDE, here.resolve().parents[3] / "bazel-bin" / _INSIDE]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        pytest.skip("build //csrc/testing/nccl:libtandem_test_nccl.so first")
    return str(found)


def test_refits_arrive_where_the_library_allows_two_ranks(library: str) -> None:
    outcome = nccl_pair(Libraries(library, library), "cpu", tensor_bytes=1 << 20)
    assert outcome.ok, outcome.describe()
    assert outcome.gb_per_s > 0
    assert outcome.describe().endswith("GB/s, equal")


def test_a_refusal_is_told_in_the_librarys_words(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_TEST_NCCL_ONE_RANK_PER_DEVICE", "1")
    outcome = nccl_pair(Libraries(library, library), "cpu", tensor_bytes=4096)
    assert not outcome.ok
    assert outcome.describe().startswith("refused by the library: ")
    assert "Duplicate GPU detected" in outcome.refused


def test_a_library_that_is_missing_is_a_failure(library: str) -> None:
    outcome = nccl_pair(Libraries("/no/such/libnccl.so.2", library), "cpu", tensor_bytes=4096)
    assert outcome == NcclPair(error=outcome.error)
    assert "/no/such/libnccl.so.2" in outcome.describe()
