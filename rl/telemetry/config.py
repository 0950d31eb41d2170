"""Settings of the `logger` section."""

from typing import Literal

from rl.core.config import ConfigModel, operational


class WandbConfig(ConfigModel):
    """Weights & Biases."""

    project: str = operational("tandem", description="Project.")
    name: str | None = operational(None, description="Run name; null = the run folder's name.")
    mode: Literal["online", "offline"] = operational("online", description="offline writes files only.")


class MlflowConfig(ConfigModel):
    """MLflow."""

    experiment_name: str = operational("tandem", description="Experiment.")
    run_name: str | None = operational(None, description="Run name; null = the run folder's name.")
    tracking_uri: str | None = operational(
        None, description="Tracking server; null = MLFLOW_TRACKING_URI, or else files in <log_dir>/mlruns."
    )


class LoggerConfig(ConfigModel):
    """Where metrics and files go."""

    log_dir: str | None = operational(None, description="Parent of exp_NNN; null = results/<config name>.")
    tensorboard_enabled: bool = operational(True, description="Write tensorboard/ in the run folder.")
    wandb_enabled: bool = operational(False, description="Log to Weights & Biases.")
    mlflow_enabled: bool = operational(False, description="Log to MLflow.")
    wandb: WandbConfig = WandbConfig()
    mlflow: MlflowConfig = MlflowConfig()
    console: Literal["auto", "rich", "plain"] = operational(
        "auto", description="auto = rich on a terminal, else one line per step."
    )
    log_rollouts: bool = operational(True, description="Write rollouts/step_N.jsonl.")
