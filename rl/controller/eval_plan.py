"""What will be evaluated: the model, the datasets, and where the results go; checked before anything starts.

It imports no torch, ray, vllm or transformers, runs none of the user's code and leaves nothing behind.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rl.controller.checkpoint import complete_checkpoints
from rl.controller.config import MasterConfig
from rl.controller.dry_run import check_policy_model, log_dir
from rl.controller.eval_config import EvalTaskConfig
from rl.controller.run_folder import CHECKPOINTS, read_status
from rl.core.errors import ConfigError
from rl.data.datasets import check_dataset
from rl.environments.registry import check_environments

_MODEL_OF_CHECKPOINT = Path("policy") / "model"
_MODEL_FILE = "config.json"


@dataclass(frozen=True)
class EvalOptions:
    """What the command line tells an evaluation beside its configuration.

    Attributes:
        config_name: Name of the configuration file without its suffix.
        checkpoint: A run folder, a checkpoint or a model folder; None = policy.model_name.
        output: Where the results go; None = eval_NNN beside the run, or beside the runs of the configuration.
        run: Folder of the run that is evaluated, where it is one.
    """

    config_name: str
    checkpoint: Path | None
    output: Path | None
    run: Path | None = None


@dataclass(frozen=True)
class EvalPlan:
    """A checked evaluation.

    Attributes:
        config: With the evaluated model as policy.model_name.
        tasks: Datasets with their environments, by name.
        options: Of the command line.
    """

    config: MasterConfig
    tasks: Mapping[str, EvalTaskConfig]
    options: EvalOptions

    @property
    def parent(self) -> Path:
        """Folder in which the results get a numbered folder of their own."""
        run = self.options.run
        return log_dir(self.config, self.options.config_name) if run is None else run.parent


def plan_evaluation(config: MasterConfig, options: EvalOptions) -> EvalPlan:
    """Find model and datasets, and check them as far as that is possible without hardware.

    Raises:
        ConfigError: one of them does not exist, is damaged, or does not suit the configuration; or the output folder
            exists.
    """
    if options.checkpoint is not None:
        folder = model_folder(options.checkpoint)
        policy = config.policy.model_copy(update={"model_name": str(folder)})
        config = config.model_copy(update={"policy": policy})
    check_policy_model(config)
    tasks = tasks_of(config)
    for task in tasks.values():
        check_dataset(task.dataset)
    check_environments({name: config.env[name] for name in environments_of(config, tasks)})
    if options.output is not None and options.output.exists():
        raise ConfigError(f"--output {options.output} exists; give a new folder, or move that one away")
    return EvalPlan(config, tasks, options)


def tasks_of(config: MasterConfig) -> Mapping[str, EvalTaskConfig]:
    """Return the datasets by name: those of eval.tasks, else the validation dataset under its environment's name.

    Raises:
        ConfigError: there are none.
    """
    if config.eval.tasks:
        return config.eval.tasks
    if config.data.validation is None:
        raise ConfigError("there is nothing to evaluate on: set data.validation, or eval.tasks.<name>.dataset")
    return {config.data.env_name: EvalTaskConfig(dataset=config.data.validation)}


def environments_of(config: MasterConfig, tasks: Mapping[str, EvalTaskConfig]) -> list[str]:
    """Return the names of the environments that score the tasks, each once."""
    return sorted({task.env_name or config.data.env_name for task in tasks.values()})


def model_folder(given: Path) -> Path:
    """Return the Hugging Face folder that is meant: of a run its latest checkpoint, else its export; of a checkpoint
    its policy; else the folder itself.

    Raises:
        ConfigError: there is no model.
    """
    folder = given.expanduser()
    if read_status(folder) is not None:
        return _model_of_run(folder)
    for candidate in (folder / _MODEL_OF_CHECKPOINT, folder):
        if (candidate / _MODEL_FILE).is_file():
            return candidate
    raise ConfigError(
        f"--checkpoint {given} is no run folder, no checkpoint of one and no Hugging Face folder (it has no "
        f"{_MODEL_FILE}); give a folder such as results/my_run/exp_001"
    )


def run_config(given: Path | None) -> Path | None:
    """Return the configuration of the run that `given` belongs to, where there is one."""
    if given is None:
        return None
    for folder in (given.expanduser(), given.expanduser().parent.parent, given.expanduser().parent):
        if read_status(folder) is not None and (folder / "config.yaml").is_file():
            return folder / "config.yaml"
    return None


def _model_of_run(folder: Path) -> Path:
    saved = complete_checkpoints(folder / CHECKPOINTS)
    candidates = [*(checkpoint.path / _MODEL_OF_CHECKPOINT for checkpoint in reversed(saved)), folder / "export"]
    for candidate in candidates:
        if (candidate / _MODEL_FILE).is_file():
            return candidate
    raise ConfigError(
        f"--checkpoint {folder}: this run has neither a complete checkpoint nor an export; it was run with "
        "checkpointing.enabled=false, or did not get that far"
    )
