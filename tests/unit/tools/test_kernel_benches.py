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
            assert row["note"] == ""
            assert len(row["times_s"]) == (1 if row["name"] == bench_linear_loss.CHUNKED else 2)
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


def test_a_slow_contender_takes_part_in_some_rounds_and_is_compared_with_those_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr("tools.bench.rounds.time.perf_counter", lambda: clock[0])

    def take(seconds: Sequence[float]) -> Callable[[], Sequence[Tensor]]:
        left = iter([0.0, 0.0, *seconds])  # the first calls: one to warm up, one for memory

        def run() -> Sequence[Tensor]:
            clock[0] += next(left)
            return ()

        return run

    contenders = [
        Contender(OURS, take([1.0, 2.0, 4.0, 8.0, 16.0])),
        Contender("slow", take([10.0, 160.0]), every=4),
    ]
    table = measure(Case("t", contenders, OURS), Effort(5, math.inf), torch.device("cpu"))
    own, slow = table["rows"]
    assert table["rounds"] == 5 and own["times_s"] == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert slow["times_s"] == [10.0, 160.0] and slow["times_ours"] == pytest.approx(10.0)
    assert "in 2 of the rounds" in format_table(table)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_products_in_chunks_are_those_of_one_pass(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_linear_loss, "default_chunk_rows", lambda *_: 5)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, 8, generator=generator).to(dtype) for rows in (12, 70))
    products = bench_linear_loss.ChunkProducts(hidden, weight)
    products.run()
    products.run()
    logits = hidden.double() @ weight.double().t()
    torch.testing.assert_close(products.logits[:2].double(), logits[10:], rtol=1e-5, atol=1e-5)
    # On the CPU the third product's operand is float32, and it is the memory of the logits.
    torch.testing.assert_close(products.grad_weight.double(), 2 * logits.t() @ hidden.double(), rtol=1e-5, atol=1e-3)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for begin in (0, 5, 10):
        rows = hidden[begin : begin + 5].shape[0]
        slab = logits[begin : begin + rows] if dtype == torch.float32 else products.grad_logits[:rows].double()
        got = products.grad_hidden[begin : begin + rows].double()
        torch.testing.assert_close(got, slab @ weight.double(), rtol=tolerance, atol=40 * tolerance)


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
