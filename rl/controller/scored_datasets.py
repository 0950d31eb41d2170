"""Which environment scores which dataset: of training, of validation, and of every task of the evaluation."""

from collections.abc import Iterator
from dataclasses import dataclass

from rl.controller.config import MasterConfig
from rl.data.config import DatasetConfig
from rl.environments.config import EnvironmentConfig


@dataclass(frozen=True)
class ScoredDataset:
    """A dataset and the environment that scores it.

    Attributes:
        key: Where the dataset stands in the configuration.
        dataset: Its section.
        env_key: Where the environment stands.
        env: Its section.
    """

    key: str
    dataset: DatasetConfig
    env_key: str
    env: EnvironmentConfig


def scored_datasets(config: MasterConfig) -> Iterator[ScoredDataset]:
    """Yield every dataset whose environment exists; that it exists is another check's business."""
    own = config.data.env_name
    found = [("data.train", config.data.train, own), ("data.validation", config.data.validation, own)]
    for name, task in config.eval.tasks.items():
        found.append((f"eval.tasks.{name}.dataset", task.dataset, task.env_name or own))
    for key, dataset, env_name in found:
        env = config.env.get(env_name)
        if env is not None and dataset is not None:
            yield ScoredDataset(key, dataset, f"env.{env_name}", env)
