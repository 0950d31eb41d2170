"""The refit's part of tools/gpu_check, as far as a machine without a GPU shows it."""

import math

import pytest
import torch

from rl.weights.faults import TransferError
from rl.weights.native import digests_of
from tools.bench.rounds import OURS, Effort, measure
from tools.gpu.check import describe_row
from tools.gpu.transfer import digest_case, hidden_share, is_refusal, transfer_rows, unpack_case

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
