"""Weights & Biases in offline mode and MLflow with a store of files: the real packages, no network."""

from rl.telemetry.config import LoggerConfig, WandbConfig
from rl.telemetry.logger import RunLogger
from tests.support.clock import FakeClock


def warnings(caplog):
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("rl.") and record.levelname == "WARNING"
    ]


def test_wandb_offline_writes_a_run_into_the_run_folder(tmp_path, caplog):
    config = LoggerConfig(tensorboard_enabled=False, wandb_enabled=True, wandb=WandbConfig(mode="offline"))
    logger = RunLogger(config, tmp_path, {"grpo": {"seed": 1}}, FakeClock())
    logger.log_step(1, {"train/reward": 0.5})
    logger.close()
    assert warnings(caplog) == []
    assert list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len((tmp_path / "wandb_run_id").read_text()) == 12


def test_mlflow_records_metrics_and_settings_and_a_resumed_run_goes_on_in_the_same_one(tmp_path, caplog, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    from mlflow.tracking import MlflowClient

    folder = tmp_path / "exp_001"
    folder.mkdir()
    config = LoggerConfig(tensorboard_enabled=False, mlflow_enabled=True)
    for steps, resumed_after in (((1, 2), None), ((3,), 2)):
        logger = RunLogger(config, folder, {"grpo": {"seed": 1}}, FakeClock(), resumed_after)
        for step in steps:
            logger.log_step(step, {"train/reward": step / 10})
        logger.close()
    assert warnings(caplog) == []
    client = MlflowClient(tracking_uri=f"file:{tmp_path}/mlruns")
    run = client.get_run((folder / "mlflow_run_id").read_text())
    assert run.data.params["grpo.seed"] == "1" and run.info.run_name == "exp_001"
    history = client.get_metric_history(run.info.run_id, "train/reward")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.1), (2, 0.2), (3, 0.3)]
