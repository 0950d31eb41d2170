"""The benchmark of the refit at tiny sizes: its manifests, the form of its report, and that bytes arrive."""

import json
import math
from pathlib import Path

import pytest

from rl.weights.transport import TensorSpec
from tools.bench import bench_refit
from tools.bench.refit_ends import Run
from tools.bench.refit_manifests import experts_1b, smollm2_135m
from tools.bench.rounds import OURS


def parameters(manifest: tuple[TensorSpec, ...]) -> int:
    return sum(math.prod(spec.shape) for spec in manifest)


def test_the_small_manifest_is_that_of_smollm2_135m() -> None:
    manifest = smollm2_135m()
    assert len(manifest) == 272
    assert parameters(manifest) == 134_515_008
    assert {spec.name: spec.shape for spec in manifest}["model.layers.29.mlp.down_proj.weight"] == (576, 1536)


def test_the_large_manifest_has_many_small_tensors_and_few_large_ones() -> None:
    manifest = experts_1b()
    small = [spec for spec in manifest if bench_refit.bytes_of(spec) <= 1 << 16]
    large = [spec for spec in manifest if bench_refit.bytes_of(spec) > 1 << 28]
    assert 1.0e9 < parameters(manifest) < 1.1e9
    assert len(small) > 18_000 and len(large) == 2
    assert len({spec.name for spec in manifest}) == len(manifest)


def test_parts_are_medians_of_the_sender_and_of_the_slowest_reader() -> None:
    def run(copy: float) -> Run:
        return Run({"copy": copy, "digest": 1.0, "wire": 2.0, "total": 9.0}, b"")

    parts = bench_refit.parts_of([[run(1.0), run(5.0), run(4.0)], [run(3.0), run(6.0), run(7.0)]])
    assert (parts["pack"], parts["load"], parts["wait_sender"]) == (2.0, 6.0, 2.0)
    assert bench_refit.parts_of([[Run({}, b""), Run({}, b"")]]) == {}


@pytest.mark.parametrize("readers", [1, 2])
def test_it_reports_what_arrives_over_every_link(readers: int, tmp_path: Path) -> None:
    out = tmp_path / "refit.json"
    sizes = ["--manifests", "experts_1b", "--divide", "64", "--readers", str(readers)]
    slots = [] if readers == 1 else ["--no-slots"]
    bench_refit.main([*sizes, *slots, "--rounds", "2", "--seconds", "60", "--out", str(out)])
    report = json.loads(out.read_text())
    assert report["benchmark"] == "refit"
    assert {"machine", "commit", "date", "torch", "load_before", "load_after"} <= set(report)
    assert len(report["tables"]) == (2 if readers == 1 else 1)
    table = report["tables"][-1]
    assert table["title"] == f"experts_1b, 1 -> {readers}"
    rows = {row["name"]: row for row in table["rows"]}
    assert {OURS, "tcp", bench_refit.GLOO, bench_refit.MEMCPY} <= set(rows)
    assert rows[bench_refit.MEMCPY]["of_memcpy"] == pytest.approx(1.0)
    for name, row in rows.items():
        assert row["gb_per_s"] == pytest.approx(table["bytes"] / row["median_s"] / 1e9)
        if row["is_limit"]:
            continue
        assert row["difference"] == 0.0, f"{name}: what arrived is not what was sent"
        assert len(row["extra_mb_by_process"]) == 1 + readers
        has_digests = "no digests" not in name and name != bench_refit.GLOO
        assert (row["parts_s"].get("digest_reader", 0.0) > 0) == has_digests
