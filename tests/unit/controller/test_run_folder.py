"""Tests of rl.controller.run_folder; locks are tested with real processes."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rl.controller.run_folder import RunFolder, RunState, open_run_folder, read_status
from rl.core.errors import ConfigError

_HOLD = """
import sys, time
from pathlib import Path
from rl.controller.run_folder import open_run_folder
folder = open_run_folder(Path(sys.argv[1]), sys.argv[2], "f", lambda text: None, lambda path: None)
print(folder.path.name, flush=True)
sys.stdin.readline()
"""


def open_quietly(
    log_dir: Path, resume: str = "auto", fingerprint: str = "f", said: list[str] | None = None
) -> RunFolder:
    return open_run_folder(log_dir, resume, fingerprint, (said if said is not None else []).append, lambda _: None)


def hold(log_dir: Path, resume: str = "auto") -> "subprocess.Popen[str]":
    """Start a process that takes a folder and keeps it until its input ends."""
    return subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(log_dir), resume], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def name_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def finish(process: "subprocess.Popen[str]") -> None:
    process.communicate("\n", timeout=60)


def test_folders_are_numbered_from_one(tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        folder = open_quietly(tmp_path / "runs", "never")
        names.append(folder.path.name)
        folder.release()
    assert names == ["exp_001", "exp_002", "exp_003"]


def test_auto_goes_on_in_the_latest_unfinished_folder_of_the_same_configuration(tmp_path: Path) -> None:
    for fingerprint in ("f", "f", "other"):
        open_quietly(tmp_path, "never", fingerprint).release()
    said: list[str] = []
    folder = open_quietly(tmp_path, said=said)
    assert folder.path.name == "exp_002"
    assert said == [f"going on in the unfinished run {folder.path}; to start a new one instead: --resume never"]
    folder.release()


def test_a_finished_run_started_again_starts_a_new_one_and_says_so(tmp_path: Path) -> None:
    first = open_quietly(tmp_path)
    first.write_status(RunState.FINISHED, "f")
    first.release()
    said: list[str] = []
    second = open_quietly(tmp_path, said=said)
    assert second.path.name == "exp_002"
    reason = "has the same semantic configuration and is finished"
    assert said == [f"{tmp_path / 'exp_001'} {reason}; starting a new run"]
    second.release()


def test_an_unfinished_run_older_than_a_finished_one_is_still_found(tmp_path: Path) -> None:
    open_quietly(tmp_path, "never").release()
    second = open_quietly(tmp_path, "never")
    second.write_status(RunState.FINISHED, "f")
    second.release()
    folder = open_quietly(tmp_path)
    assert folder.path.name == "exp_001"
    folder.release()


def test_a_run_from_which_nothing_can_go_on_is_left_alone_with_its_reason(tmp_path: Path) -> None:
    for _ in range(2):
        open_quietly(tmp_path, "never").release()
    said: list[str] = []
    folder = open_run_folder(tmp_path, "auto", "f", said.append, lambda path: f"{path.name} are broken")
    assert folder.path.name == "exp_003"
    assert said == [f"not going on in {tmp_path / 'exp_002'}: checkpoints are broken"]
    folder.release()


def test_never_starts_a_new_one(tmp_path: Path) -> None:
    open_quietly(tmp_path).release()
    folder = open_quietly(tmp_path, "never")
    assert folder.path.name == "exp_002"
    folder.release()


def test_a_path_is_taken_as_it_is_or_refused_with_the_reason(tmp_path: Path) -> None:
    open_quietly(tmp_path).release()
    run = tmp_path / "exp_001"
    folder = open_quietly(tmp_path, str(run))
    assert folder.path == run
    folder.release()
    folder = open_quietly(tmp_path, str(run / "checkpoints" / "step_10"))
    assert (folder.path, folder.checkpoint) == (run, run / "checkpoints" / "step_10")
    folder.release()
    with pytest.raises(ConfigError, match="not a run folder"):
        open_quietly(tmp_path, str(tmp_path))
    with pytest.raises(ConfigError, match="another semantic configuration"):
        open_quietly(tmp_path, str(run), fingerprint="g")


def test_a_folder_in_use_by_a_living_process_is_never_taken(tmp_path: Path) -> None:
    holder = hold(tmp_path)
    assert name_of(holder) == "exp_001"
    said: list[str] = []
    folder = open_quietly(tmp_path, said=said)
    assert folder.path.name == "exp_002"
    reason = "has the same semantic configuration but is in use"
    assert said == [f"{tmp_path / 'exp_001'} {reason} by process {holder.pid}"]
    folder.release()
    with pytest.raises(ConfigError, match=f"in use by process {holder.pid}"):
        open_quietly(tmp_path, str(tmp_path / "exp_001"))
    finish(holder)


def test_a_killed_process_gives_its_folder_back(tmp_path: Path) -> None:
    holder = hold(tmp_path)
    assert name_of(holder) == "exp_001"
    holder.send_signal(signal.SIGKILL)
    holder.communicate(timeout=60)
    folder = open_quietly(tmp_path)
    assert folder.path.name == "exp_001"
    folder.release()


def test_runs_that_start_at_once_get_different_folders(tmp_path: Path) -> None:
    holders = [hold(tmp_path, "auto") for _ in range(6)]
    names = [name_of(holder) for holder in holders]
    for holder in holders:
        finish(holder)
    assert sorted(names) == [f"exp_00{number}" for number in range(1, 7)]


def test_the_status_survives_only_as_a_whole(tmp_path: Path) -> None:
    folder = open_quietly(tmp_path)
    status = read_status(folder.path)
    assert status is not None
    assert (status.state, status.fingerprint) == (RunState.UNFINISHED, "f")
    (folder.path / "status.json").write_text('{"state": "unfin')
    assert read_status(folder.path) is None
    folder.write_status(RunState.FINISHED, "f")
    assert json.loads((folder.path / "status.json").read_text())["state"] == "finished"
    assert [path.name for path in folder.path.iterdir() if "tmp" in path.name] == []
    folder.release()


def test_a_place_that_cannot_be_written_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot use .*file/runs for runs: .*set logger.log_dir to another place"):
        open_quietly(tmp_path / "file" / "runs")


@pytest.mark.parametrize("text", ["[]", "null", "3"])
def test_a_status_that_is_no_object_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "status.json").write_text(text)
    assert read_status(tmp_path) is None
