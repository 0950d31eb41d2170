"""Validate whatever needs no hardware: datasets, model files, reward functions, loggers, the run folder and its disk.

`tandem train` does so before every run: what is wrong is told within a second or two, and no run folder is made.

It imports no torch, ray, vllm or transformers, runs none of the user's code, starts nothing, and leaves nothing behind.
The configuration itself has been validated before (`rl.controller.load`).

    for finding in dry_run(config, "grpo_math"):
        print(finding)
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rl.controller.config import MasterConfig
from rl.controller.disk import check_disk, needed_bytes
from rl.controller.model_check import check_model_folder
from rl.controller.resume import check_resume
from rl.core.errors import ConfigError, DataError, FatalError
from rl.data.config import DatasetConfig
from rl.data.datasets import check_dataset, known_columns
from rl.data.model_source import (
    FolderSource,
    HubSource,
    PackageSource,
    check_model,
    converted_folder,
    default_cache_dir,
    parse_model_name,
)
from rl.environments.registry import check_columns, check_environments
from rl.telemetry.logger import check_logger
from rl.weights.addresses import check_own_host

_GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """The result of one check: `problem` is the error text, None when it passed; `note` says what was looked at."""

    name: str
    note: str
    problem: str | None = None


def dry_run(config: MasterConfig, config_name: str, resume: str = "auto") -> list[Finding]:
    """Run every check, also after one has failed.

    Args:
        config: a validated configuration.
        config_name: name of its file, for the default log_dir.
        resume: as in `RunOptions`.
    """
    checks: list[tuple[str, Callable[[], str]]] = [
        ("model", lambda: check_policy_model(config)),
        ("training data", lambda: _dataset(config, "train")),
        ("validation data", lambda: _dataset(config, "validation")),
        ("reward", lambda: _rewards(config)),
        ("loggers", lambda: _loggers(config)),
        ("run folder", lambda: _run_folder(config, config_name)),
        ("disk", lambda: _disk(config, config_name)),
    ]
    if config.policy.generation.refit_cfg.host is not None:
        checks.append(("refit", lambda: _refit_host(config)))
    if resume not in ("auto", "never"):
        checks.append(("resume", lambda: check_resume(config, Path(resume))))
    return [_finding(name, check) for name, check in checks]


def log_dir(config: MasterConfig, config_name: str) -> Path:
    """Return the parent of the run folders."""
    return Path(config.logger.log_dir or Path("results") / config_name)


def check_policy_model(config: MasterConfig) -> str:
    """Check the model and its tokenizer as far as they are on this machine; return in words what was looked at.

    Raises:
        ConfigError: one of them does not exist, is damaged, or does not suit the configuration.
    """
    names = [config.policy.model_name]
    if config.policy.tokenizer.name is not None:
        names.append(config.policy.tokenizer.name)
    for name in names:
        check_model(name)
    folder = _model_folder(config.policy.model_name)
    if folder is not None:
        check_model_folder(config, folder)
    on_hub = [name for name in names if _local_model(name) is None]
    return " and ".join(names) + (f"; not looked up on the hub: {', '.join(on_hub)}" if on_hub else "")


def _finding(name: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(name, check())
    except FatalError as error:
        return Finding(name, "", str(error))


def _dataset(config: MasterConfig, part: str) -> str:
    dataset = config.data.train if part == "train" else config.data.validation
    if dataset is None:
        return "none"
    check_dataset(dataset)
    return f"{dataset.kind} {dict(dataset).get('path') or dict(dataset).get('task') or ''}".strip()


def _rewards(config: MasterConfig) -> str:
    check_environments(config.env)
    name, env = config.data.env_name, config.env[config.data.env_name]
    for part, dataset in (("data.train", config.data.train), ("data.validation", config.data.validation)):
        columns = _known_columns(dataset)
        if columns is not None:
            check_columns(env, name, columns, part)
    return f"{config.data.env_name}: {config.env[config.data.env_name].kind}"


def _known_columns(dataset: DatasetConfig | None) -> frozenset[str] | None:
    try:
        return None if dataset is None else known_columns(dataset)
    except (ConfigError, DataError):
        return None  # reported by the check of the data


def _loggers(config: MasterConfig) -> str:
    check_logger(config.logger)
    enabled = {
        "tensorboard": config.logger.tensorboard_enabled,
        "wandb": config.logger.wandb_enabled,
        "mlflow": config.logger.mlflow_enabled,
    }
    return ", ".join(["metrics.jsonl", *(name for name, is_on in enabled.items() if is_on)])


def _refit_host(config: MasterConfig) -> str:
    host, cluster = config.policy.generation.refit_cfg.host, config.cluster
    if host is None or cluster.num_nodes > 1 or cluster.address is not None:
        return f"{host}, if the trainer's host has it"  # which may be another one; it says so when it opens its links
    try:
        check_own_host(host)
    except (OSError, UnicodeError) as error:  # the latter of a text that is no name at all
        raise ConfigError(
            f"policy.generation.refit_cfg.host={host}: the trainer cannot listen there: {error}; "
            "give an address of this host, or null"
        ) from error
    return host


def _run_folder(config: MasterConfig, config_name: str) -> str:
    folder = log_dir(config, config_name)
    existing = _existing(folder)
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write to {existing}, for runs in {folder}; set logger.log_dir to another place")
    return str(folder)


def _disk(config: MasterConfig, config_name: str) -> str:
    path = _local_model(config.policy.model_name)
    needed = None if path is None else needed_bytes(config, path)
    if path is None or needed is None:
        return "how large the model is, is known only when it is here"
    check_disk(config, path, _existing(log_dir(config, config_name)))
    kept = config.checkpointing.keep_top_k
    number = "every checkpoint" if kept is None else f"at most {kept + 1} checkpoints"
    return f"about {needed / _GIB:.1f} GiB at once" + (f", {number} kept" if config.checkpointing.enabled else "")


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _model_folder(name: str) -> Path | None:
    """Return the model's Hugging Face folder as far as it is on this machine, that of a converted GGUF file too."""
    local = _local_model(name)
    if local is None or local.is_dir():
        return local
    converted = converted_folder(local, default_cache_dir())
    return converted if converted.is_dir() else None


def _local_model(name: str) -> Path | None:
    """Return the model's folder or GGUF file on this machine; None for one on the hub, or none at all."""
    try:
        source = parse_model_name(name)
    except ConfigError:
        return None  # reported by the check of the model
    match source:
        case FolderSource():
            return source.path
        case PackageSource():
            return source.file
        case HubSource():
            return None
