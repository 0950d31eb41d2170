"""The whole configuration: MasterConfig nests the sections and cross-checks them; it declares no leaf default."""

from typing import Any

from pydantic import Field

from rl.algorithms.config import GRPOConfig, LossConfig, RewardPenaltiesConfig
from rl.cluster.config import ClusterConfig
from rl.controller.checkpoint_config import CheckpointingConfig
from rl.controller.eval_config import EvalConfig
from rl.core.config import ConfigModel
from rl.data.config import DataConfig
from rl.environments.config import EnvConfig
from rl.generation.config import GenerationConfig, VllmGenerationConfig
from rl.rollout.config import AsyncRLConfig
from rl.telemetry.config import LoggerConfig
from rl.trainer.config import PolicySettings


class PolicyConfig(PolicySettings):
    """The `policy` section."""

    generation: GenerationConfig = VllmGenerationConfig()


class MasterConfig(ConfigModel):
    """One run."""

    grpo: GRPOConfig = GRPOConfig()
    reward_penalties: RewardPenaltiesConfig = RewardPenaltiesConfig()
    loss_fn: LossConfig = LossConfig()
    policy: PolicyConfig
    data: DataConfig
    env: EnvConfig
    cluster: ClusterConfig = ClusterConfig()
    async_rl: AsyncRLConfig = AsyncRLConfig()
    eval: EvalConfig = EvalConfig()
    logger: LoggerConfig = LoggerConfig()
    checkpointing: CheckpointingConfig = CheckpointingConfig()
    extras: dict[str, Any] = Field(default_factory=dict, description="Your own keys; Tandem does not read them.")

    @property
    def sequences_per_step(self) -> int:
        """Rollouts of a whole step."""
        return self.grpo.num_prompts_per_step * self.grpo.num_generations_per_prompt
