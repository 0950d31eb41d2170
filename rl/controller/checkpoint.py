"""Checkpoints: written whole or not at all, restored, and kept by a rule.

A save writes to `step_N.tmp-<unique>`, fsyncs every file and a manifest with sizes, renames, and fsyncs the parent.
What carries another name than `step_N`, or whose files do not match the manifest, is not a checkpoint. It knows neither
the model nor the buffer: parts save and restore themselves.

    checkpointer = Checkpointer(run / "checkpoints", config, config_text)
    await checkpointer.save(10, {"policy": policy_part}, info={"step": 10}, metrics={"val:accuracy": 0.9})
"""

import asyncio
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rl.controller.checkpoint_config import CheckpointingConfig
from rl.controller.retention import SavedStep, keep
from rl.core.concurrency import uninterrupted
from rl.core.errors import ConfigError, FatalError
from rl.core.files import make_durable

_log = logging.getLogger(__name__)
_STEP_NAME = re.compile(r"^step_(\d+)$")
_TEMPORARY_NAME = re.compile(r"^step_\d+\.tmp-[0-9a-f]+$")
_MANIFEST = "manifest.json"
_INFO = "training_info.json"
_EXACT = "exact_resume"
_SCHEMA = 1


class Saveable(Protocol):
    """One part of a checkpoint; it owns its sub-folder."""

    async def save(self, folder: Path) -> None:
        """Write the state into `folder`, which the part creates."""
        ...

    async def restore(self, folder: Path) -> None:
        """Read the state back."""
        ...


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    step: int
    path: Path


class JsonPart:
    """A part whose state is a JSON object."""

    def __init__(self, collect: Callable[[], Mapping[str, Any]], apply: Callable[[Mapping[str, Any]], None]) -> None:
        self._collect = collect
        self._apply = apply

    async def save(self, folder: Path) -> None:
        """Write state.json."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "state.json").write_text(json.dumps(self._collect()), encoding="utf-8")

    async def restore(self, folder: Path) -> None:
        """Read state.json."""
        self._apply(json.loads((folder / "state.json").read_text(encoding="utf-8")))


class Checkpointer:
    """Saves, finds, restores and prunes the checkpoints of one run.

    Args:
        folder: Parent of the step_N folders; created when missing, and cleared of unfinished saves.
        config: Period, metric and retention.
        config_text: The resolved configuration, stored with each checkpoint.
    """

    def __init__(self, folder: Path, config: CheckpointingConfig, config_text: str) -> None:
        self.folder = folder
        self._config = config
        self._config_text = config_text
        folder.mkdir(parents=True, exist_ok=True)
        _remove_unfinished(folder)

    def is_due(self, step: int, last_step: int) -> bool:
        """Whether `step` is saved: each period, and the last step."""
        return self._config.enabled and (step % self._config.save_period == 0 or step == last_step)

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint."""
        return max(complete_checkpoints(self.folder), key=lambda checkpoint: checkpoint.step, default=None)

    def find(self, path: Path | None) -> Checkpoint | None:
        """The checkpoint at `path`, or the latest one when no path is given.

        Raises:
            ConfigError: `path` is no complete checkpoint of this run, or a newer one exists.
        """
        latest = self.latest()
        if path is None:
            return latest
        if latest is None or path.resolve() not in {c.path.resolve() for c in complete_checkpoints(self.folder)}:
            raise ConfigError(f"--resume {path}: not a complete checkpoint of {self.folder}")
        if latest.path.resolve() != path.resolve():
            raise ConfigError(
                f"--resume {path}: {latest.path} is newer; move the newer checkpoints away to go on from an older one"
            )
        return latest

    async def save(
        self, step: int, parts: Mapping[str, Saveable], info: Mapping[str, Any], metrics: Mapping[str, float]
    ) -> Checkpoint:
        """Save `step` and prune.

        Raises:
            FatalError: the save failed, for instance on a full disk; the older checkpoints are untouched.
        """
        final = self.folder / f"step_{step}"
        temporary = self.folder / f"step_{step}.tmp-{uuid.uuid4().hex}"
        if _is_complete(final):
            raise FatalError(f"checkpoint {final} exists already; a step is saved once")
        try:
            if final.exists():
                await asyncio.to_thread(_remove_broken, final)
            temporary.mkdir()
            (temporary / "config.yaml").write_text(self._config_text, encoding="utf-8")
            (temporary / _INFO).write_text(
                json.dumps({**info, "step": step, "metrics": dict(metrics), _EXACT: self._config.save_optimizer}),
                encoding="utf-8",
            )
            for name, part in parts.items():
                await part.save(temporary / name)
            # Not abandoned half-way: what is removed below must not be what the thread is giving its name.
            await uninterrupted(asyncio.to_thread(_seal, temporary, final))
        except Exception as error:
            await asyncio.to_thread(shutil.rmtree, temporary, True)
            raise FatalError(self._failure_message(step, error)) from error
        except asyncio.CancelledError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        await asyncio.to_thread(self.prune)
        return Checkpoint(step, final)

    async def restore(self, checkpoint: Checkpoint, parts: Mapping[str, Saveable]) -> dict[str, Any]:
        """Restore every part and return the stored info.

        Raises:
            FatalError: the checkpoint lacks a part or a file.
        """
        for name, part in parts.items():
            if not (checkpoint.path / name).is_dir():
                raise FatalError(f"checkpoint {checkpoint.path} has no part '{name}'; was it saved by another version?")
            await part.restore(checkpoint.path / name)
        return _read_info(checkpoint)

    def prune(self) -> None:
        """Delete the checkpoints that the rule does not keep; a failure to delete is a warning."""
        saved = complete_checkpoints(self.folder)
        history = [SavedStep(checkpoint.step, self._metric_of(checkpoint)) for checkpoint in saved]
        kept = keep(history, self._config.save_period, self._config.keep_top_k, self._config.higher_is_better)
        for checkpoint in saved:
            if checkpoint.step in kept:
                continue
            trash = self.folder / f"{checkpoint.path.name}.tmp-{uuid.uuid4().hex}"
            try:
                checkpoint.path.rename(trash)
                shutil.rmtree(trash)
            except OSError as error:
                _log.warning("could not delete the old checkpoint %s: %s", checkpoint.path, error)

    def _metric_of(self, checkpoint: Checkpoint) -> float | None:
        if self._config.metric_name is None:
            return None
        value = _read_info(checkpoint)["metrics"].get(self._config.metric_name)
        return None if value is None else float(value)

    def _failure_message(self, step: int, error: Exception) -> str:
        latest = self.latest()
        survivor = (
            "no earlier checkpoint exists" if latest is None else f"the checkpoint of step {latest.step} is intact"
        )
        free = shutil.disk_usage(self.folder).free / 2**20
        return (
            f"saving the checkpoint of step {step} failed: {type(error).__name__}: {error}; {survivor}; {free:.0f} MiB "
            f"are free in {self.folder}. Make room, then start the same command again: it goes on from there"
        )


def complete_checkpoints(folder: Path) -> list[Checkpoint]:
    """Every step_N of `folder` whose files have the sizes that its manifest names, oldest first."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _STEP_NAME.match(path.name)
        if match and _is_complete(path):
            found.append(Checkpoint(int(match.group(1)), path))
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def resume_obstacle(folder: Path) -> str | None:
    """Say why no run can go on exactly from the latest checkpoint of `folder`; None = it can, or starts anew there."""
    saved = complete_checkpoints(folder)
    if not saved or _read_info(saved[-1]).get(_EXACT, True):
        return None
    return (
        f"{saved[-1].path} has no optimizer state (checkpointing.save_optimizer=false), so training cannot go on where "
        "it was; starting a new run"
    )


def checkpoint_metrics(
    metric_name: str | None, train: Mapping[str, float], validation: Mapping[str, float]
) -> dict[str, float]:
    """Pick the configured metric for the checkpoint's info; a validation that this step did not run gives none.

    Raises:
        ConfigError: the name has neither prefix, or names a training metric that does not exist.
    """
    if metric_name is None:
        return {}
    kind, _, name = metric_name.partition(":")
    source = {"val": validation, "train": train}.get(kind)
    if source is None or not name:
        raise ConfigError(f"checkpointing.metric_name={metric_name} must be val:<name> or train:<name>")
    if name in source:
        return {metric_name: source[name]}
    if kind == "train" or validation:
        raise ConfigError(
            f"checkpointing.metric_name={metric_name} is not among the metrics: {', '.join(sorted(source))}"
        )
    return {}


def check_free_space(folder: Path, needed_bytes: int) -> None:
    """Refuse to start a run whose checkpoints cannot fit.

    Raises:
        FatalError: names what is needed and what is free.
    """
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise FatalError(
            f"{folder} has {free / 2**20:.0f} MiB free, but checkpoints and export need about "
            f"{needed_bytes / 2**20:.0f} MiB at once; make room, set logger.log_dir to another disk, or set "
            "checkpointing.enabled=false and checkpointing.export_hf=false"
        )


def _seal(temporary: Path, final: Path) -> None:
    """Make `temporary` durable and give it its name."""
    files = sorted(path for path in temporary.rglob("*") if path.is_file())
    manifest = {
        "schema": _SCHEMA,
        "files": {path.relative_to(temporary).as_posix(): path.stat().st_size for path in files},
    }
    (temporary / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    folders = [path for path in temporary.rglob("*") if path.is_dir()]
    for path in [*files, temporary / _MANIFEST, *folders, temporary]:
        make_durable(path)
    os.rename(temporary, final)
    make_durable(final.parent)


def _is_complete(path: Path) -> bool:
    manifest = path / _MANIFEST
    if not manifest.is_file():
        return False
    try:
        files: dict[str, int] = json.loads(manifest.read_text(encoding="utf-8"))["files"]
    except (json.JSONDecodeError, KeyError):
        return False
    return all((path / name).is_file() and (path / name).stat().st_size == size for name, size in files.items())


def _read_info(checkpoint: Checkpoint) -> dict[str, Any]:
    try:
        info: dict[str, Any] = json.loads((checkpoint.path / _INFO).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise FatalError(f"checkpoint {checkpoint.path} has no readable {_INFO}: {error}") from error
    return info


def _remove_broken(path: Path) -> None:
    """Make room for a step that stands there incomplete, as after a copy that broke off."""
    _log.warning("%s is not a complete checkpoint; it is replaced", path)
    trash = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex}")
    path.rename(trash)
    shutil.rmtree(trash)


def _remove_unfinished(folder: Path) -> None:
    for path in folder.iterdir():
        if _TEMPORARY_NAME.match(path.name):
            _log.warning("removing the unfinished save %s", path)
            shutil.rmtree(path, ignore_errors=True)
