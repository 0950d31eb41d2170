"""`tandem eval` with the default model over real Ray and the real vLLM engine, with weights that no trainer sends."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.leftovers import assert_nothing_left, children_of, tag_of
from tests.support.tandem_command import ROOT
from tests.support.tiny_run import finish, read_until


def test_the_default_model_is_evaluated_on_its_held_out_prompts_and_nothing_is_left(tmp_path: Path) -> None:
    settings = ["eval.num_generations=2", "eval.k=[1,2]", "eval.temperature=0.8", "eval.top_p=0.9", "eval.top_k=20"]
    paths = [str(ROOT), *(str(Path(path).absolute()) for path in sys.path if path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "rl", "eval", "--output", "out", *settings],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"},
    )
    read_until(process, "evaluated")
    tag, children = tag_of(process.pid), children_of(process.pid)
    code, output = finish(process)
    assert code == 0, output
    assert_nothing_left(tag, children)
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    result = found["tasks"]["math"]
    assert (result["counts"]["prompts"], result["counts"]["asked"], result["counts"]["scored"]) == (19, 38, 38)
    assert 0.0 < result["metrics"]["pass@1"] <= result["metrics"]["pass@2"] <= 1.0
    assert abs(result["metrics"]["avg@2"] - result["metrics"]["pass@1"]) < 1e-12
    assert (found["sampling"]["top_p"], found["sampling"]["top_k"]) == (0.9, 20)
