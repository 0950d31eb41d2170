"""Tests of rl.controller.checkpoint, on a real disk."""

import asyncio
import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from rl.controller.checkpoint import (
    Checkpointer,
    JsonPart,
    check_free_space,
    checkpoint_metrics,
    complete_checkpoints,
    find_checkpoint,
    incomplete_checkpoints,
    resume_obstacle,
)
from rl.controller.checkpoint_config import CheckpointingConfig
from rl.core.errors import ConfigError, FatalError
from tests.support.fakes import SavedText


def make_checkpointer(folder: Path, top_k: int | None = None, period: int = 10) -> Checkpointer:
    config = CheckpointingConfig(keep_top_k=top_k, save_period=period)
    return Checkpointer(folder, config, "grpo: {}\n")


class FullDisk(SavedText):
    """A part whose disk is full."""

    async def save(self, folder: Path) -> None:
        await super().save(folder)
        with Path("/dev/full").open("w") as file:
            file.write("x" * 100_000)


async def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    checkpointer = make_checkpointer(tmp_path)
    state = {"position": 7}
    restored: dict[str, int] = {}
    parts = {"policy": SavedText("weights"), "prompts": JsonPart(lambda: state, restored.update)}
    await checkpointer.save(10, parts, {"total_tokens": 5}, {"val:accuracy": 0.5})
    checkpoint = make_checkpointer(tmp_path).latest()
    assert checkpoint is not None
    assert checkpoint.step == 10
    info = await checkpointer.restore(checkpoint, parts)
    assert info == {"total_tokens": 5, "step": 10, "metrics": {"val:accuracy": 0.5}, "exact_resume": True}
    assert restored == state
    assert (checkpoint.path / "config.yaml").read_text() == "grpo: {}\n"


async def test_the_newest_complete_checkpoint_is_chosen_and_leftovers_are_removed(tmp_path: Path) -> None:
    checkpointer = make_checkpointer(tmp_path)
    for step in (10, 20):
        await checkpointer.save(step, {"policy": SavedText("w")}, {}, {})
    shutil.copytree(tmp_path / "step_20", tmp_path / "step_30")
    (tmp_path / "step_30" / "policy" / "text.txt").unlink()
    shutil.copytree(tmp_path / "step_20", tmp_path / "step_40")
    (tmp_path / "step_40" / "policy" / "text.txt").write_text("longer than the manifest says")
    (tmp_path / "step_50").mkdir()
    (tmp_path / "step_60.tmp-0123abcd").mkdir()
    (tmp_path / "notes").mkdir()
    latest = make_checkpointer(tmp_path).latest()
    assert latest is not None
    assert latest.step == 20
    assert not (tmp_path / "step_60.tmp-0123abcd").exists()
    assert (tmp_path / "notes").exists()


async def test_a_process_killed_at_any_write_of_a_save_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    checkpointer = make_checkpointer(tmp_path)
    await checkpointer.save(10, {"policy": SavedText("old")}, {}, {})
    await checkpointer.save(20, {"policy": SavedText("new")}, {}, {})
    files = sorted(path for path in (tmp_path / "step_20").rglob("*") if path.is_file())
    for count in range(len(files) + 1):
        folder = tmp_path / f"killed_{count}"
        shutil.copytree(tmp_path / "step_10", folder / "step_10")
        for path in files[:count]:
            target = folder / "step_20.tmp-00ff" / path.relative_to(tmp_path / "step_20")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
        latest = make_checkpointer(folder).latest()
        assert latest is not None
        assert latest.step == 10


async def test_a_full_disk_leaves_the_older_checkpoint_and_says_so(tmp_path: Path) -> None:
    checkpointer = make_checkpointer(tmp_path)
    await checkpointer.save(10, {"policy": SavedText("old")}, {}, {})
    with pytest.raises(FatalError, match=r"step 20 failed: OSError.*No space left.*step 10 is intact.*MiB are free"):
        await checkpointer.save(20, {"policy": FullDisk("new")}, {}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_10"]
    latest = make_checkpointer(tmp_path).latest()
    assert latest is not None
    assert (latest.path / "policy" / "text.txt").read_text() == "old"


async def test_a_cancelled_save_leaves_nothing(tmp_path: Path) -> None:
    class Slow(SavedText):
        async def save(self, folder: Path) -> None:
            await asyncio.Event().wait()

    checkpointer = make_checkpointer(tmp_path)
    task = asyncio.ensure_future(checkpointer.save(10, {"policy": Slow("x")}, {}, {}))
    await asyncio.sleep(0)
    assert len(list(tmp_path.iterdir())) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert list(tmp_path.iterdir()) == []


async def test_a_save_that_is_cancelled_while_it_is_sealed_ends_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealing, free, rename = threading.Event(), threading.Event(), os.rename

    def slow_rename(source: Path, target: Path) -> None:
        sealing.set()
        assert free.wait(60)
        rename(source, target)

    monkeypatch.setattr(os, "rename", slow_rename)
    checkpointer = make_checkpointer(tmp_path)
    task = asyncio.ensure_future(checkpointer.save(10, {"policy": SavedText("x")}, {}, {}))
    await asyncio.to_thread(sealing.wait, 60)
    task.cancel()
    await asyncio.sleep(0)
    free.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [checkpoint.step for checkpoint in complete_checkpoints(tmp_path)] == [10]
    assert os.listdir(tmp_path) == ["step_10"]


async def test_an_incomplete_folder_of_a_step_is_replaced_by_its_next_save(tmp_path: Path) -> None:
    checkpointer = make_checkpointer(tmp_path)
    (tmp_path / "step_10" / "policy").mkdir(parents=True)
    await checkpointer.save(10, {"policy": SavedText("x")}, {}, {})
    assert [checkpoint.step for checkpoint in complete_checkpoints(tmp_path)] == [10]
    assert os.listdir(tmp_path) == ["step_10"]
    with pytest.raises(FatalError, match="exists already"):
        await checkpointer.save(10, {"policy": SavedText("x")}, {}, {})


async def test_a_checkpoint_without_optimizer_is_an_obstacle(tmp_path: Path) -> None:
    assert resume_obstacle(tmp_path / "nothing") is None
    await make_checkpointer(tmp_path).save(10, {"policy": SavedText("x")}, {}, {})
    assert resume_obstacle(tmp_path) is None
    bare = Checkpointer(tmp_path, CheckpointingConfig(save_optimizer=False), "")
    await bare.save(20, {"policy": SavedText("x")}, {}, {})
    assert "step_20 has no optimizer state" in str(resume_obstacle(tmp_path))


async def test_old_checkpoints_go_by_the_rule(tmp_path: Path) -> None:
    checkpointer = make_checkpointer(tmp_path, top_k=1)
    for step, accuracy in ((10, 0.9), (20, 0.5), (30, 0.6)):
        await checkpointer.save(step, {"policy": SavedText("w")}, {}, {"val:accuracy": accuracy})
    assert [checkpoint.step for checkpoint in complete_checkpoints(tmp_path)] == [10, 30]
    assert sorted(os.listdir(tmp_path)) == ["step_10", "step_30"]


async def test_a_missing_part_is_named(tmp_path: Path) -> None:
    checkpointer = make_checkpointer(tmp_path)
    saved = await checkpointer.save(10, {"policy": SavedText("w")}, {}, {})
    with pytest.raises(FatalError, match="no part 'buffer'"):
        await checkpointer.restore(saved, {"buffer": SavedText("b")})


async def test_an_older_checkpoint_is_refused_while_newer_ones_exist(tmp_path: Path) -> None:
    checkpointer = make_checkpointer(tmp_path)
    for step in (10, 20):
        await checkpointer.save(step, {"policy": SavedText("w")}, {}, {})
    newest = checkpointer.find(tmp_path / "step_20")
    assert newest is not None
    assert newest.step == 20
    with pytest.raises(ConfigError, match="step_20 is newer"):
        checkpointer.find(tmp_path / "step_10")
    with pytest.raises(ConfigError, match="not a complete checkpoint"):
        checkpointer.find(tmp_path / "step_99")


def test_an_empty_folder_means_a_fresh_start(tmp_path: Path) -> None:
    assert make_checkpointer(tmp_path / "checkpoints").latest() is None


def test_each_period_and_the_last_step_are_saved(tmp_path: Path) -> None:
    checkpointer = make_checkpointer(tmp_path, period=4)
    assert [step for step in range(1, 11) if checkpointer.is_due(step, last_step=10)] == [4, 8, 10]


def test_the_checkpoints_metric_is_picked_by_its_prefix() -> None:
    assert checkpoint_metrics("val:accuracy", {}, {"accuracy": 0.5}) == {"val:accuracy": 0.5}
    assert checkpoint_metrics("train:reward", {"reward": 0.1}, {}) == {"train:reward": 0.1}
    assert checkpoint_metrics("val:accuracy", {"reward": 0.1}, {}) == {}
    assert checkpoint_metrics(None, {}, {}) == {}
    with pytest.raises(ConfigError, match="must be val:<name> or train:<name>"):
        checkpoint_metrics("accuracy", {}, {})
    with pytest.raises(ConfigError, match="not among the metrics: reward"):
        checkpoint_metrics("train:rewards", {"reward": 0.1}, {})


def test_too_little_space_is_refused_with_both_figures(tmp_path: Path) -> None:
    check_free_space(tmp_path, 1)
    with pytest.raises(FatalError, match=r"MiB free, but checkpoints and export need about 1125899906843 MiB"):
        check_free_space(tmp_path, 1125899906843 * 2**20)


async def test_the_manifest_lists_every_file_with_its_size(tmp_path: Path) -> None:
    saved = await make_checkpointer(tmp_path).save(10, {"policy": SavedText("abc")}, {}, {})
    manifest = json.loads((saved.path / "manifest.json").read_text())
    assert manifest["files"]["policy/text.txt"] == 3
    assert set(manifest["files"]) == {"policy/text.txt", "config.yaml", "training_info.json"}


def rewrite_manifest(folder: Path, **changes: object) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, **changes}))


async def test_a_checkpoint_of_another_version_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    checkpointer = make_checkpointer(tmp_path)
    parts = {"policy": SavedText("w")}
    saved = await checkpointer.save(10, parts, {}, {})
    rewrite_manifest(saved.path, schema=1)
    with pytest.raises(ConfigError, match=r"step_10 has schema 1, .* start a new run with --resume never"):
        find_checkpoint(tmp_path, None)
    with pytest.raises(ConfigError, match="has schema 1"):
        await checkpointer.restore(saved, parts)


async def test_a_part_that_cannot_be_read_names_the_checkpoint_and_the_way_out(tmp_path: Path) -> None:
    checkpointer = make_checkpointer(tmp_path)
    parts = {"counters": JsonPart(lambda: {"step": 1}, lambda state: state["no such key"])}
    saved = [await checkpointer.save(step, parts, {}, {}) for step in (10, 20)]
    with pytest.raises(FatalError, match=r"step_20 cannot be restored, part 'counters': KeyError.* from step 10"):
        await checkpointer.restore(saved[1], parts)
    (saved[0].path / "counters" / "state.json").write_bytes(b"\0garbage")
    with pytest.raises(FatalError, match=r"step_10 cannot be restored, .*--resume never"):
        await checkpointer.restore(saved[0], parts)


@pytest.mark.parametrize("text", ["[]", "null", '{"files": []}', "{", ""])
async def test_a_damaged_manifest_is_no_checkpoint_and_is_told(tmp_path: Path, text: str) -> None:
    checkpointer = make_checkpointer(tmp_path)
    for step in (10, 20):
        await checkpointer.save(step, {"policy": SavedText("w")}, {}, {})
    (tmp_path / "step_20" / "manifest.json").write_text(text)
    latest = checkpointer.latest()
    assert latest is not None
    assert latest.step == 10
    assert [each.step for each in incomplete_checkpoints(tmp_path)] == [20]


async def test_a_damaged_info_costs_a_checkpoint_its_metric_only(tmp_path: Path) -> None:
    checkpointer = make_checkpointer(tmp_path, top_k=1)
    saved = await checkpointer.save(10, {"policy": SavedText("w")}, {}, {"val:accuracy": 0.5})
    size = (saved.path / "training_info.json").stat().st_size
    (saved.path / "training_info.json").write_text("{}".ljust(size))
    await checkpointer.save(20, {"policy": SavedText("w")}, {}, {"val:accuracy": 0.1})
    assert complete_checkpoints(tmp_path)[-1].step == 20


def test_a_mean_over_nothing_is_no_misspelt_metric() -> None:
    assert checkpoint_metrics("train:reward", {"loss": 0.0, "num_valid_rollouts": 4.0}, {}) == {}
    assert checkpoint_metrics("train:loss", {"num_valid_rollouts": 0.0}, {}) == {}
    assert checkpoint_metrics("val:env/solved", {}, {"accuracy": 0.0}) == {}
    with pytest.raises(ConfigError, match="did you mean val:accuracy?"):
        checkpoint_metrics("val:accuracy_", {}, {"accuracy": 0.0})
