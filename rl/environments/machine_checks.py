"""Whether this machine has what an environment needs beside Python code: a sandbox, a model, a GPU. Loads no model."""

import json
from pathlib import Path

from rl.cluster.devices import count_gpus
from rl.core.errors import ConfigError
from rl.data.model_source import FolderSource, HubSource, check_model, parse_model_name
from rl.environments.config import (
    CodeEnvConfig,
    EnvironmentConfig,
    PythonToolConfig,
    RewardModelEnvConfig,
    ToolsEnvConfig,
)
from rl.environments.sandbox import find_sandbox

# What transformers takes for a classifier whose configuration tells no number of labels.
_DEFAULT_LABELS = 2


def check_machine(config: EnvironmentConfig, key: str) -> None:
    """Look for what the environment `key` needs.

    Raises:
        ConfigError: it is not here; names the key, and what to do.
    """
    match config:
        case CodeEnvConfig():
            _check_sandbox(key)
        case ToolsEnvConfig(tools=tools):
            for name, tool in tools.items():
                if isinstance(tool, PythonToolConfig):
                    _check_sandbox(f"{key}.tools.{name}")
        case RewardModelEnvConfig():
            _check_reward_model(config, key)


def _check_sandbox(key: str) -> None:
    try:
        find_sandbox()
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error


def _check_reward_model(config: RewardModelEnvConfig, key: str) -> None:
    name_key = f"{key}.model_name"
    check_model(config.model_name, name_key)
    match parse_model_name(config.model_name, name_key):
        case FolderSource(path):
            _check_labels(path, f"{name_key}={config.model_name}")
        case HubSource():
            pass
        case _:
            raise ConfigError(f"{name_key}={config.model_name} must be a Hugging Face folder or hub id of a classifier")
    if config.device != "cpu" and not count_gpus():
        raise ConfigError(f"{key}.device={config.device}, but this machine shows no GPU; use cpu")


def _check_labels(folder: Path, subject: str) -> None:
    settings = json.loads((folder / "config.json").read_text())
    architectures, names = settings.get("architectures") or [], settings.get("id2label") or {}
    if not isinstance(architectures, list) or not isinstance(names, dict):
        raise ConfigError(f"{subject}: architectures in its config.json must be a list, and id2label an object")
    if any(str(name).endswith("ForCausalLM") for name in architectures):
        raise ConfigError(f"{subject} is a language model, not a sequence classifier trained to give rewards")
    labels = len(names) or _DEFAULT_LABELS
    if labels != 1:
        raise ConfigError(f"{subject} gives {labels} numbers, and a reward is one; use a classifier with one label")
