"""The kernel benchmarks at tiny sizes: the form of their reports, and that contenders compute the same."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tools.bench import bench_linear_loss, bench_logprob, bench_pack, bench_policy_loss
from tools.bench.report import format_table
from tools.bench.rounds import OURS, Case, Contender, Effort, extra_memory_mb, measure

Main = Callable[[Sequence[str] | None], None]
# Largest relative difference between contenders: bfloat16 gradients are rounded at different places.
BENCHES: dict[str, tuple[Main, list[str], int, float]] = {
    "logprob": (bench_logprob.main, ["--rows", "6", "--vocab", "517"], 4, 2e-2),
    "policy_loss": (bench_policy_loss.main, ["--tokens", "1500"], 1, 1e-4),
    "linear_loss": (bench_linear_loss.main, ["--rows", "70", "--vocab", "517", "--hidden", "32"], 2, 5e-2),
    "pack": (bench_pack.main, ["--tensors", "4", "--tiny", "5", "--hidden", "130"], 4, 0.0),
}


@pytest.mark.parametrize("name", BENCHES)
def test_a_benchmark_reports_contenders_that_agree(name: str, tmp_path: Path) -> None:
    main, sizes, num_tables, tolerance = BENCHES[name]
    out = tmp_path / "report.json"
    main([*sizes, "--rounds", "2", "--no-compile", "--threads", "1", "--out", str(out)])
    report = json.loads(out.read_text())
    assert report["benchmark"] == name
    assert {"machine", "commit", "date", "torch", "device", "threads", "load_before", "load_after"} <= set(report)
    assert len(report["tables"]) == num_tables
    for table in report["tables"]:
        assert table["rounds"] == 2 and table["limits_s"]
        assert OURS in {row["name"] for row in table["rows"]}
        for row in table["rows"]:
            assert row["note"] == "" and len(row["times_s"]) == 2
            assert row["spread_s"][0] <= row["median_s"] <= row["spread_s"][1]
            assert row["extra_mb"] >= 0 and row["times_ours"] > 0
            if not row["is_limit"]:
                assert row["difference"] <= tolerance, f"{table['title']}: {row['name']}"
                assert row["efficiency"] == {
                    limit: pytest.approx(seconds / row["median_s"]) for limit, seconds in table["limits_s"].items()
                }


def tensors(value: float) -> Callable[[], Sequence[Tensor]]:
    return lambda: (torch.full((3,), value),)


def effort() -> Effort:
    return Effort(rounds=4, seconds=math.inf)


def test_rounds_begin_with_another_contender_each() -> None:
    order: list[str] = []

    def note(name: str) -> Callable[[], Sequence[Tensor]]:
        def run() -> Sequence[Tensor]:
            order.append(name)
            return ()

        return run

    contenders = [Contender(name, note(name)) for name in (OURS, "b", "c")]
    measure(Case("t", contenders, OURS), effort(), torch.device("cpu"))
    calls = order[6:]  # the first calls: one to warm up, one for memory
    assert [calls[i : i + 3] for i in range(0, 12, 3)] == [
        [OURS, "b", "c"],
        ["b", "c", OURS],
        ["c", OURS, "b"],
        [OURS, "b", "c"],
    ]


def test_differences_are_relative_to_the_reference() -> None:
    case = Case("t", [Contender(OURS, tensors(4.0)), Contender("reference", tensors(5.0))], "reference")
    own, reference = measure(case, effort(), torch.device("cpu"))["rows"]
    assert own["difference"] == pytest.approx(0.2) and reference["difference"] == 0.0


def test_an_optional_contender_that_fails_is_left_out_with_a_note() -> None:
    def fail() -> Sequence[Tensor]:
        raise RuntimeError("no compiler\nand more")

    contenders = [Contender(OURS, tensors(1.0)), Contender("other", fail, is_optional=True)]
    table = measure(Case("t", contenders, OURS), effort(), torch.device("cpu"))
    assert table["rows"][1]["note"] == "left out: no compiler"
    assert "left out: no compiler" in format_table(table)
    contenders[1] = Contender("other", fail)
    with pytest.raises(RuntimeError, match="no compiler"):
        measure(Case("t", contenders, OURS), effort(), torch.device("cpu"))


def test_no_round_begins_after_the_time_once_there_are_enough() -> None:
    table = measure(Case("t", [Contender(OURS, tensors(1.0))], OURS), Effort(9, 0.0, least=3), torch.device("cpu"))
    assert table["rounds"] == 3


def test_extra_memory_counts_what_a_call_holds_at_most() -> None:
    megabytes = 64

    def allocate() -> Tensor:
        return torch.ones(megabytes * 250_000)

    allocate()
    assert extra_memory_mb(allocate, torch.device("cpu")) == pytest.approx(megabytes, rel=0.1)
    kept: dict[str, Any] = {"tensor": allocate()}
    assert extra_memory_mb(lambda: kept["tensor"].mul_(2.0), torch.device("cpu")) < megabytes / 10
