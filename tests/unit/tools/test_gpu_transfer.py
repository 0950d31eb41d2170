"""The refit's part of tools/gpu_check, as far as a machine without a GPU shows it."""

import math

import pytest
import torch

from rl.weights.faults import TransferError
from rl.weights.native import digests_of
from tests.support.nccl import strict_nccl
from tools.bench.rounds import OURS, Effort, measure
from tools.gpu.check import describe_row
from tools.gpu.transfer import digest_case, hidden_share, is_refusal, nccl_transfer, transfer_rows, unpack_case

CPU = torch.device("cpu")
SHAPES = ((40, 30), (7,), (3, 5))


def test_the_hidden_share_is_one_when_the_shorter_work_costs_nothing() -> None:
    assert hidden_share(2.0, 5.0, 5.0) == 1.0
    assert hidden_share(2.0, 5.0, 7.0) == 0.0
    assert hidden_share(2.0, 5.0, 6.0) == 0.5


def test_unpacking_agrees_with_a_loop_of_copies() -> None:
    table = measure(unpack_case(CPU, SHAPES), Effort(rounds=2, seconds=math.inf), CPU)
    rows = {row["name"]: row for row in table["rows"]}
    assert rows[OURS]["difference"] == 0.0 and rows[OURS]["efficiency"]["memory"] > 0


def test_the_digests_that_are_timed_are_those_of_a_refit() -> None:
    torch.manual_seed(3)
    case = digest_case(CPU, SHAPES)
    torch.manual_seed(3)
    tensors = [torch.randn(shape).to(torch.bfloat16) for shape in SHAPES]
    (numbers,) = next(contender for contender in case.contenders if contender.name == OURS).run()
    assert numbers.numpy().tobytes() == digests_of(tensors)


def test_a_part_that_fails_is_a_row_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("with a GPU the parts succeed")
    monkeypatch.delenv("RL_NATIVE_DIR", raising=False)
    rows = list(transfer_rows())
    assert len(rows) == 3 and not any(row["ok"] for row in rows)
    assert all(row["error"] and describe_row(row).startswith(f"FAIL  {row['name']}  ") for row in rows)


def test_a_row_tells_its_figures_and_notes() -> None:
    row = {"name": "NCCL", "ok": True, "gb_per_s": 312.4, "note": "two ranks"}
    assert describe_row(row) == "ok    NCCL  312 GB/s  two ranks"


def test_a_library_that_takes_no_gpu_twice_refuses_and_does_not_fail() -> None:
    duplicate = TransferError("ncclCommInitRankConfig: invalid usage (run with NCCL_DEBUG=WARN)", kind="mismatch")
    lost = TransferError("rank 1 is gone", kind="peer lost")
    assert is_refusal(duplicate) and is_refusal(TransferError("no libnccl", kind="unavailable"))
    assert not is_refusal(lost)


@pytest.fixture
def library() -> str:
    """The strict NCCL on host memory."""
    return strict_nccl()


def test_two_processes_refit_over_nccl_where_the_library_allows_it(library: str) -> None:
    row = nccl_transfer(library, library, "cpu", ((64, 32), (7,)))
    assert row["ok"] and "note" not in row
    assert row["gb_per_s"] > 0


def test_a_refusal_is_told_in_the_librarys_words(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_TEST_NCCL_ONE_RANK_PER_DEVICE", "1")
    row = nccl_transfer(library, library, "cpu", ((8,),))
    assert row["ok"]
    assert "not possible with this library" in row["note"] and "Duplicate GPU detected" in row["note"]


def test_a_library_that_is_missing_is_an_error(library: str) -> None:
    with pytest.raises(TransferError, match="/no/such/libnccl.so.2"):
        nccl_transfer("/no/such/libnccl.so.2", library, "cpu", ((8,),))
