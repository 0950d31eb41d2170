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
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol

from rl.controller.checkpoint_config import CheckpointingConfig
from rl.controller.retention import SavedStep, keep
from rl.core.concurrency import uninterrupted
from rl.core.errors import ConfigError, FatalError, first_line
from rl.core.files import make_durable

_log = logging.getLogger(__name__)
_STEP_NAME = re.compile(r"^step_(\d+)$")
_TEMPORARY_NAME = re.compile(r"^step_\d+\.tmp-[0-9a-f]+$")
_MANIFEST = "manifest.json"
_INFO = "training_info.json"
_EXACT = "exact_resume"
# Means, which a step without any value (no valid reward, nothing generated) does not have.
_MAY_BE_ABSENT = re.compile(
    r"(filtered_)?reward|baseline_reward/pct_(0|1|mixed)|advantages/(mean|min|max)|staleness_(mean|max)|env/.+|"
    r"avg_length|truncation_rate"
)
# Of the whole layout: raise it when any part writes something that older code, or newer, would misread.
_SCHEMA = 2


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
        """See `find_checkpoint`."""
        return find_checkpoint(self.folder, path)

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
            FatalError: the checkpoint lacks a part or a file, or a part of it cannot be read.
            ConfigError: it does not belong to this configuration, or was written by another version.
        """
        _check_schema(checkpoint)
        info = _read_info(checkpoint)
        for name, part in parts.items():
            if not (checkpoint.path / name).is_dir():
                raise FatalError(f"checkpoint {checkpoint.path} has no part '{name}'; {self._way_out(checkpoint)}")
            try:
                await part.restore(checkpoint.path / name)
            except ConfigError:
                raise
            except Exception as error:  # a boundary: damaged files raise whatever their readers do
                raise FatalError(
                    f"checkpoint {checkpoint.path} cannot be restored, part '{name}': {type(error).__name__}: "
                    f"{first_line(error)}; {self._way_out(checkpoint)}"
                ) from error
        return info

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

    def _way_out(self, checkpoint: Checkpoint) -> str:
        """Say how to go on without a damaged checkpoint."""
        older = [other.step for other in complete_checkpoints(self.folder) if other.step < checkpoint.step]
        if older:
            return f"if it is damaged, move it away to go on from step {max(older)}"
        return "if it is damaged, start a new run with --resume never"

    def _metric_of(self, checkpoint: Checkpoint) -> float | None:
        if self._config.metric_name is None:
            return None
        metrics = _read_info(checkpoint).get("metrics")
        value = metrics.get(self._config.metric_name) if isinstance(metrics, dict) else None
        return float(value) if isinstance(value, int | float) else None

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


def incomplete_checkpoints(folder: Path) -> list[Checkpoint]:
    """Every step_N of `folder` that is not whole, as after a copy that broke off; oldest first."""
    whole = {checkpoint.step for checkpoint in complete_checkpoints(folder)}
    matches = [(_STEP_NAME.match(path.name), path) for path in folder.iterdir()] if folder.is_dir() else []
    found = [Checkpoint(int(match.group(1)), path) for match, path in matches if match]
    return sorted((each for each in found if each.step not in whole), key=lambda checkpoint: checkpoint.step)


def find_checkpoint(folder: Path, path: Path | None) -> Checkpoint | None:
    """The checkpoint at `path`, or the latest complete one of `folder` when no path is given. Changes nothing.

    Raises:
        ConfigError: `path` is no complete checkpoint of this run, a newer one exists, or another version wrote it.
    """
    saved = complete_checkpoints(folder)
    latest = saved[-1] if saved else None
    if path is not None:
        if latest is None or path.resolve() not in {checkpoint.path.resolve() for checkpoint in saved}:
            raise ConfigError(f"--resume {path}: not a complete checkpoint of {folder}")
        if latest.path.resolve() != path.resolve():
            raise ConfigError(
                f"--resume {path}: {latest.path} is newer; move the newer checkpoints away to go on from an older one"
            )
    if latest is not None:
        _check_schema(latest)
    return latest


def _check_schema(checkpoint: Checkpoint) -> None:
    schema = _manifest(checkpoint.path).get("schema")
    if schema != _SCHEMA:
        raise ConfigError(
            f"checkpoint {checkpoint.path} has schema {schema}, and this version of Tandem reads schema {_SCHEMA}; go "
            "on with the version that wrote it, or start a new run with --resume never"
        )


def resume_obstacle(folder: Path) -> str | None:
    """Say why no run can go on exactly from the latest checkpoint of `folder`; None = it can, or starts anew there."""
    saved = complete_checkpoints(folder)
    return None if not saved or has_optimizer_state(saved[-1]) else f"{_no_optimizer(saved[-1])}; starting a new run"


def check_optimizer_state(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint from which training cannot go on exactly.

    Raises:
        ConfigError: it was saved without the optimizer's state.
    """
    if not has_optimizer_state(checkpoint):
        raise ConfigError(
            f"{_no_optimizer(checkpoint)}; start a new run with --resume never, for example from its weights with "
            f"policy.model_name={checkpoint.path / 'policy' / 'model'}"
        )


def has_optimizer_state(checkpoint: Checkpoint) -> bool:
    """Whether training can go on exactly from this checkpoint."""
    return bool(_read_info(checkpoint).get(_EXACT, True))


def _no_optimizer(checkpoint: Checkpoint) -> str:
    return (
        f"{checkpoint.path} has no optimizer state (checkpointing.save_optimizer=false), so training cannot go on "
        "where it was"
    )


def checkpoint_metrics(
    metric_name: str | None, train: Mapping[str, float], validation: Mapping[str, float]
) -> dict[str, float]:
    """Pick the configured metric for the checkpoint's info; a validation that this step did not run gives none.

    A training metric that is a mean over nothing in this step gives none either.

    Raises:
        ConfigError: the name has neither prefix, or names a metric that does not exist.
    """
    if metric_name is None:
        return {}
    kind, _, name = metric_name.partition(":")
    source = {"val": validation, "train": train}.get(kind)
    if source is None or not name:
        raise ConfigError(f"checkpointing.metric_name={metric_name} must be val:<name> or train:<name>")
    if name in source:
        return {metric_name: source[name]}
    if kind == "train" and train.get("num_valid_rollouts") == 0:
        return {}  # such a step trains nothing
    if source and not _MAY_BE_ABSENT.fullmatch(name):
        close = get_close_matches(name, list(source), n=1)
        hint = f"; did you mean {kind}:{close[0]}?" if close else ""
        names = ", ".join(sorted(source))
        raise ConfigError(f"checkpointing.metric_name={metric_name} is not among the metrics: {names}{hint}")
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
    files = _manifest(path).get("files")
    if not isinstance(files, dict):
        return False
    return all((path / name).is_file() and (path / name).stat().st_size == size for name, size in files.items())


def _manifest(path: Path) -> Mapping[str, Any]:
    """Return the content of a checkpoint's manifest; an empty one when it is missing or damaged."""
    try:
        values = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _read_info(checkpoint: Checkpoint) -> dict[str, Any]:
    try:
        info: Any = json.loads((checkpoint.path / _INFO).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FatalError(f"checkpoint {checkpoint.path} has no readable {_INFO}: {error}; move it away") from error
    if not isinstance(info, dict):
        raise FatalError(f"checkpoint {checkpoint.path}: {_INFO} is no JSON object; move it away")
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
