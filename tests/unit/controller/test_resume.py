"""Whether a run can go on as asked is known from its files alone."""

from pathlib import Path

import pytest

from rl.controller.checkpoint import Checkpoint, Checkpointer
from rl.controller.checkpoint_config import CheckpointingConfig
from rl.controller.config import MasterConfig
from rl.controller.load import load_config
from rl.controller.resume import check_resume, has_nothing_left
from rl.controller.run_folder import RunState, open_run_folder
from rl.core.config_paths import find_config
from rl.core.errors import ConfigError
from rl.core.fingerprint import semantic_fingerprint
from tests.support.fakes import SavedText


def load(steps: int) -> MasterConfig:
    return load_config(find_config("grpo_smollm2_cpu"), [f"grpo.max_num_steps={steps}"])[0]


async def make_run(place: Path, state: RunState, steps: int) -> Path:
    fingerprint = semantic_fingerprint(load(8))
    folder = open_run_folder(place, "never", fingerprint, lambda _: None, lambda _: None)
    if steps:
        await Checkpointer(folder.checkpoints, CheckpointingConfig(), "").save(steps, {"p": SavedText("w")}, {}, {})
    folder.write_status(state, fingerprint)
    folder.release()
    return folder.path


def files_of(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


async def test_more_steps_than_asked_for_are_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    run = await make_run(tmp_path, RunState.FINISHED, 8)
    before = files_of(tmp_path)
    with pytest.raises(ConfigError, match="this run already has 8 steps, 3 were asked for"):
        check_resume(load(3), run)
    assert files_of(tmp_path) == before


async def test_a_finished_run_has_nothing_left_unless_more_is_asked_for(tmp_path: Path) -> None:
    run = await make_run(tmp_path, RunState.FINISHED, 8)
    checkpoint = Checkpoint(8, run / "checkpoints" / "step_8")
    assert has_nothing_left(load(8), run, checkpoint)
    assert not has_nothing_left(load(9), run, checkpoint)
    assert check_resume(load(9), run) == f"{run}, after step 8"


async def test_an_unfinished_run_with_all_its_steps_still_has_its_export_to_do(tmp_path: Path) -> None:
    run = await make_run(tmp_path, RunState.UNFINISHED, 8)
    assert not has_nothing_left(load(8), run, Checkpoint(8, run / "checkpoints" / "step_8"))


async def test_a_finished_run_without_a_checkpoint_is_not_started_over(tmp_path: Path) -> None:
    run = await make_run(tmp_path, RunState.FINISHED, 0)
    with pytest.raises(ConfigError, match="is finished and has no checkpoint to go on from"):
        check_resume(load(8), run)


async def test_a_checkpoint_without_optimizer_state_is_refused_as_a_target(tmp_path: Path) -> None:
    run = await make_run(tmp_path, RunState.UNFINISHED, 0)
    bare = Checkpointer(run / "checkpoints", CheckpointingConfig(save_optimizer=False), "")
    await bare.save(4, {"p": SavedText("w")}, {}, {})
    with pytest.raises(ConfigError, match="step_4 has no optimizer state .*start a new run with --resume never"):
        check_resume(load(8), run)
