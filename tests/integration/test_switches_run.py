"""Some of the configurations that cover pairs of switches, in whole runs with the tiny model."""

import json
import math
from pathlib import Path

import pytest

from rl.controller.options import RunOptions
from rl.controller.run import run_training
from tests.support.knob_workshop import make_workshop
from tests.support.switches import BASES, covering


@pytest.mark.parametrize("base", BASES)
def test_configurations_with_many_switches_run(base: str, tmp_path: Path) -> None:
    settings = ("checkpointing.enabled=false", "grpo.max_num_steps=2", "grpo.num_generations_per_prompt=4")
    case = make_workshop(tmp_path).load((*BASES[base], *settings))
    accepted, _ = covering(case.config)
    for config in accepted[:3]:
        report = run_training(config, case.tree, RunOptions(resume="never", config_name="switches"))
        lines = (report.run_folder / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in lines]
        assert [line["step"] for line in steps] == [1, 2]
        assert all(math.isfinite(value) for line in steps for value in line.values())
