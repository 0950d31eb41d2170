"""tools/gpu_check without a GPU: which commands it would run, its budget, its report."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.bench.machine import ROOT
from tools.gpu import check, part
from tools.gpu.build import (
    KERNELS,
    OPERATORS,
    REFIT,
    BuildError,
    BuildPlan,
    Step,
    cuda_sources,
    host_sources,
    plan_build,
    run_build,
    stable_abi_version,
)
from tools.gpu.check import Budget
from tools.gpu.parity import CHECKS, Result
from tools.gpu.toolchain import Cublas, Toolchain, find_cublas

CUBLAS = Cublas(Path("/cublas/include"), Path("/cublas/lib/libcublasLt.so.13"))


def toolchain(cublas: Cublas | None = CUBLAS) -> Toolchain:
    return Toolchain(Path("/cuda/bin/nvcc"), Path("/cuda"), cublas, Path("/torch"), "90")


def test_a_plan_compiles_every_source_and_no_test() -> None:
    plan = plan_build(toolchain(), Path("/build"))
    compiled = {word for step in plan.compiles for word in step.command if word.endswith((".cc", ".cu"))}
    sources = {path for kind in ("cc", "cu") for path in (ROOT / "csrc").glob(f"*/*.{kind}")}
    wanted = {str(path) for path in sources if path.parent.name not in ("testing", "common")}
    left_out = ("_test.cc", "_roles.cc", "/backend_cpu.cc", "/backend_emulated.cc")
    wanted -= {path for path in wanted if path.endswith(left_out)}
    assert compiled == wanted
    assert len({step.output for step in plan.compiles}) == len(plan.compiles)


def test_kernels_are_compiled_by_nvcc_for_the_device_and_operators_against_the_stable_abi() -> None:
    plan = plan_build(toolchain(), Path("/build"))
    by_source = {word: step for step in plan.compiles for word in step.command if word.endswith((".cc", ".cu"))}
    for source in cuda_sources(ROOT):
        command = by_source[str(source)].command
        assert command[0] == "/cuda/bin/nvcc" and "-arch=sm_90" in command
    for source in host_sources(ROOT):
        command = by_source[str(source)].command
        is_binding = source.parent.name == "bindings"
        assert command[0] == "g++"
        assert (f"-DTORCH_TARGET_VERSION={stable_abi_version(ROOT)}" in command) is is_binding


def test_each_library_is_linked_of_its_own_objects() -> None:
    plan = plan_build(toolchain(), Path("/build"))
    assert [step.output for step in plan.links] == [Path("/build") / name for name in (OPERATORS, REFIT, KERNELS)]
    operators, refit, kernels = ({word for word in step.command if word.endswith(".o")} for step in plan.links)
    assert not (operators | refit) & kernels
    assert {Path(name).name for name in operators & refit} == {"csrc_refit_digest.cc.o", "csrc_refit_pack_cpu.cc.o"}
    assert operators | refit | kernels == {str(step.output) for step in plan.compiles}
    assert str(CUBLAS.library) in plan.links[-1].command and plan.missing == ""


def test_without_cublas_the_operators_alone_are_linked_and_the_reason_is_named() -> None:
    plan = plan_build(toolchain(None), Path("/build"))
    assert [step.output.name for step in plan.links] == [OPERATORS, REFIT]
    assert "cublasLt.h" in plan.missing
    assert check.why_not_run(plan.missing) == plan.missing
    assert check.describe_build(plan).startswith("done, as --compile-only asks: all ")
    assert check.describe_build(plan).endswith("--cublas")
    assert "all libraries link" in check.describe_build(plan_build(toolchain(), Path("/build")))


def test_the_options_are_told_without_torch() -> None:
    # -S: no site-packages, -I: nor a PYTHONPATH.
    command = [sys.executable, "-I", "-S", str(ROOT / "tools" / "gpu_check")]
    shown = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True)
    assert "--compile-only" in shown.stdout and "about six minutes" in shown.stdout
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 1 and "has no torch" in refused.stderr


def test_cublas_is_found_where_header_and_library_lie_together(tmp_path: Path) -> None:
    for name in ("header_only/include/cublasLt.h", "both/include/cublasLt.h", "both/lib/libcublasLt.so.13"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert find_cublas([tmp_path / "header_only"]) is None
    both = tmp_path / "both"
    assert find_cublas([tmp_path / "header_only", both]) == Cublas(both / "include", both / "lib" / "libcublasLt.so.13")


def test_a_build_runs_its_links_last_and_names_the_command_that_fails(tmp_path: Path) -> None:
    first, second = tmp_path / "objects" / "a.o", tmp_path / "library"
    plan = BuildPlan(
        (Step(first, ("touch", str(first))),), (Step(second, ("cp", str(first), str(second))),), missing=""
    )
    assert set(run_build(plan, jobs=2)) == {"a.o", "library"}
    assert second.is_file()
    failing = BuildPlan((Step(first, ("ls", "/no/such/file")),), (), missing="")
    with pytest.raises(BuildError, match="ls /no/such/file"):
        run_build(failing, jobs=1)


def test_a_part_that_does_not_fit_is_named() -> None:
    budget = Budget(30.0)
    assert budget.fits("small", 10.0) and not budget.fits("large", 100.0)
    assert budget.skipped == ["large"]


def test_a_part_reports_its_rows_and_how_it_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "python"
    row = json.dumps({"name": "a", "ok": True, "text": "a table"})
    left_out = json.dumps({"name": "b", "skipped": True})
    script.write_text(f"#!/bin/sh\necho '{row}'\necho '{left_out}'\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setattr(check.sys, "executable", str(script))
    budget = Budget(100.0)
    rows = check.run_part("parity", 50.0, budget)
    assert rows == [{"name": "a", "ok": True}, {"name": "parity: the process ended with status 3", "ok": False}]
    assert check.run_part("benches", 5.0, budget) == []
    assert budget.skipped == ["b", "benches"]


def test_checks_become_rows_whether_they_pass_fail_or_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Result:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setitem(CHECKS, "good", lambda: Result(1e-7, 1e-5))
    monkeypatch.setitem(CHECKS, "bad", lambda: Result(float("nan"), 1e-5))
    monkeypatch.setitem(CHECKS, "broken", broken)
    good, bad, raised = part.parity_rows(60.0, ["good", "bad", "broken"])
    assert good["ok"] and good["worst"] == 1e-7
    assert not bad["ok"] and bad["worst"] == "nan"
    assert not raised["ok"] and "illegal memory access" in raised["error"]
    assert [row["skipped"] for row in part.parity_rows(-1.0, ["good", "bad"])] == [True, True]
    json.dumps([good, bad, raised])


def test_the_summary_fails_when_a_check_failed_or_none_ran(capsys: pytest.CaptureFixture[str]) -> None:
    passed, failed = {"name": "a", "ok": True}, {"name": "b", "ok": False}
    rest = {"transfer": [], "benches": [], "sanitizer": "no time", "skipped": ["compute-sanitizer"]}
    assert check.summarise({"parity": [passed], **rest}, Path("x.json")) == 0
    assert check.summarise({"parity": [passed, failed], **rest}, Path("x.json")) == 1
    assert check.summarise({"parity": [], **rest}, Path("x.json")) == 1
    assert check.summarise({"parity": [passed], **rest, "transfer": [failed]}, Path("x.json")) == 1
    assert "failed: b" in capsys.readouterr().out


def test_parity_covers_every_dtype_vocabulary_and_operator() -> None:
    names = " ".join(CHECKS)
    for word in (
        "float32",
        "bfloat16",
        "float16",
        "151936",
        "stride",
        "shards",
        "graph",
        "2^31",
        "in place",
        "repeats",
    ):
        assert word in names
    for word in ("policy loss", "linear layer", "bucket copy", "float8", "thresholds", "sequence reduction"):
        assert word in names
