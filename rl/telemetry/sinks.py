"""Where metrics go beside metrics.jsonl: TensorBoard, Weights & Biases, MLflow.

A sink may raise or hang; `rl.telemetry.background.BackgroundSink` keeps that away from training. Packages are imported
when a sink is opened, which happens in its own thread.
"""

import importlib
import importlib.util
import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rl.core.errors import ConfigError
from rl.telemetry.config import LoggerConfig, MlflowConfig, WandbConfig


class Sink(Protocol):
    """One destination of metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record finite values of a step."""
        ...

    def close(self) -> None:
        """Flush and end."""
        ...


@dataclass(frozen=True)
class RunInfo:
    """What a sink tells about the run.

    Attributes:
        folder: The run folder.
        settings: The resolved configuration, nested.
        resumed_after: The step that a resumed run goes on after; None for a fresh run.
    """

    folder: Path
    settings: Mapping[str, Any]
    resumed_after: int | None = None


SinkOpener = Callable[[RunInfo], Sink]


def configured_sinks(config: LoggerConfig) -> dict[str, SinkOpener]:
    """Return the enabled sinks by name, not yet opened.

    Raises:
        ConfigError: the package of an enabled sink is not installed.
    """
    sinks: dict[str, SinkOpener] = {}
    if config.tensorboard_enabled:
        _require("tensorboard", "logger.tensorboard_enabled", "tensorboard")
        sinks["tensorboard"] = TensorboardSink
    if config.wandb_enabled:
        _require("wandb", "logger.wandb_enabled", "wandb")
        sinks["wandb"] = lambda run: WandbSink(config.wandb, run)
    if config.mlflow_enabled:
        _require("mlflow", "logger.mlflow_enabled", "mlflow-skinny")
        sinks["mlflow"] = lambda run: MlflowSink(config.mlflow, run)
    return sinks


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one level of dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


class TensorboardSink:
    """Event files in <run>/tensorboard, by TensorBoard's own writer, which needs no torch."""

    def __init__(self, run: RunInfo) -> None:
        """Open an event file; on a resumed run, TensorBoard is told to forget the steps that are done again."""
        self._events = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._writer = writer.EventFileWriter(str(run.folder / "tensorboard"))
        if run.resumed_after is not None:
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._add(run.resumed_after + 1, session_log=start)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one scalar per metric."""
        values = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(step, summary=self._summaries.Summary(value=values))
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, **content))


class WandbSink:
    """A Weights & Biases run."""

    def __init__(self, config: WandbConfig, run: RunInfo) -> None:
        """Start the run, or go on in that of the same run folder."""
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=config.project,
            name=config.name or run.folder.name,
            id=_remembered(run, "wandb_run_id", lambda: uuid.uuid4().hex[:12]),
            resume="allow",
            dir=str(run.folder),
            mode=config.mode,
            config=dict(run.settings),
            settings=wandb.Settings(silent=True),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log all values as one step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MlflowSink:
    """An MLflow run."""

    def __init__(self, config: MlflowConfig, run: RunInfo) -> None:
        """Start the run and log the settings as parameters."""
        uri = (
            config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"file:{run.folder.resolve().parent}/mlruns"
        )
        if uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow asks for consent to a store of files
        tracking = importlib.import_module("mlflow.tracking")
        self._entities = importlib.import_module("mlflow.entities")
        self._client = tracking.MlflowClient(tracking_uri=uri)
        experiment = self._client.get_experiment_by_name(config.experiment_name)
        experiment_id = (
            self._client.create_experiment(config.experiment_name) if experiment is None else experiment.experiment_id
        )
        name = config.run_name or run.folder.name
        self._run_id = _remembered(
            run, "mlflow_run_id", lambda: str(self._client.create_run(experiment_id, run_name=name).info.run_id)
        )
        parameters = [
            self._entities.Param(key, str(value)[:500])
            for key, value in flatten(run.settings).items()
            if value is not None
        ]
        for start in range(0, len(parameters), 100):  # a request takes at most 100
            self._client.log_batch(self._run_id, params=parameters[start : start + 100])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log all values as one batch."""
        now_ms = int(time.time() * 1000)
        values = [self._entities.Metric(name, value, now_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=values)

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run_id)


def _remembered(run: RunInfo, name: str, create: Callable[[], str]) -> str:
    """Return the id of the run at a service, kept in a file of the run folder, so that a resumed run goes on in it."""
    file = run.folder / name
    if not file.exists():
        file.write_text(create())
    return file.read_text()


def _require(module: str, key: str, package: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"{key} is true, but '{module}' is not installed; run: pip install {package}")
