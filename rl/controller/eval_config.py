"""Settings of the `eval` section."""

from rl.core.config import ConfigModel, operational
from rl.data.config import DatasetConfig


class EvalTaskConfig(ConfigModel):
    """One named dataset of `eval.tasks`."""

    dataset: DatasetConfig
    env_name: str | None = operational(None, description="Environment that scores it; null = data.env_name.")


class EvalConfig(ConfigModel):
    """What `tandem eval` samples and how it counts; training does not read it."""

    num_generations: int = operational(1, ge=1, le=10_000, description="Samples of each prompt, n.")
    k: list[int] = operational([1], min_length=1, description="The k of pass@k and cons@k, each at most n.")
    temperature: float = operational(0.0, ge=0, description="Sampling temperature; 0 = greedy.")
    top_p: float = operational(1.0, gt=0, le=1, description="Nucleus mass.")
    top_k: int | None = operational(None, ge=1, description="Keep the k most likely tokens; null = all.")
    max_new_tokens: int | None = operational(None, ge=1, description="Bound of a completion; null = as in training.")
    max_samples: int | None = operational(None, ge=1, description="First prompts of each dataset; null = all.")
    seed: int = operational(42, ge=0, le=2**32 - 1, description="Seed of the samples.")
    correct_reward: float = operational(1.0, description="A sample is right when its raw reward is at least this.")
    task_key: str = operational("task", description="Column by which the results of a dataset are told apart.")
    tasks: dict[str, EvalTaskConfig] = operational({}, description="Datasets by name; none = data.validation.")
