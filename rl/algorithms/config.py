"""Settings of the `grpo` and `loss_fn` sections."""

from typing import Literal

from pydantic import Field

from rl.core.config import ConfigModel, operational


class GRPOConfig(ConfigModel):
    """Group Relative Policy Optimization: the batch, its advantages, and when to validate."""

    num_prompts_per_step: int = Field(32, ge=1, description="Prompt groups of one step.")
    num_generations_per_prompt: int = Field(16, ge=1, description="Rollouts of one prompt.")
    max_num_steps: int = operational(1000, ge=1, description="RL steps of the run.")
    normalize_rewards: bool = Field(True, description="Divide by the group's standard deviation.")
    use_leave_one_out_baseline: bool = Field(
        True, description="Baseline = mean of the siblings, else of the whole group."
    )
    shuffle_advantages: bool = Field(
        False, description="Control experiment: permute advantages over the step; nothing is learned."
    )
    seed: int = Field(42, ge=0, le=2**32 - 1, description="Seed of data order, sampling and initialisation.")
    val_period: int = operational(10, ge=0, description="Steps between validations; 0 = never.")
    val_at_start: bool = operational(False, description="Validate before the first step.")
    val_at_end: bool = operational(False, description="Validate after the last step.")
    max_val_samples: int | None = operational(256, ge=1, description="Validation prompts; null = all of the dataset.")
    val_num_generations: int = operational(1, ge=1, description="Samples per validation prompt.")
    val_temperature: float = operational(0.0, ge=0, description="Sampling temperature of validation; 0 = greedy.")
    val_top_p: float = operational(1.0, gt=0, le=1, description="Nucleus mass of validation.")
    val_top_k: int | None = operational(None, ge=1, description="Top-k of validation.")
    val_max_new_tokens: int | None = operational(None, ge=1, description="Bound of validation; null = as in training.")


class LossConfig(ConfigModel):
    """The clipped policy-gradient loss."""

    ratio_clip_min: float = Field(0.2, ge=0, lt=1, description="Lower clip: ratio >= 1 - this.")
    ratio_clip_max: float = Field(0.2, ge=0, description="Upper clip: ratio <= 1 + this.")
    ratio_clip_c: float | None = Field(None, gt=1, description="Dual-clip constant; null = off.")
    force_on_policy_ratio: bool = Field(
        False, description="Ratio 1 by definition; needs one optimizer step per RL step."
    )
    token_level_loss: bool = Field(True, description="Mean over tokens, else over sequences of their token means.")
    reference_policy_kl_penalty: float = Field(
        0.01, ge=0, description="Weight of KL(policy || reference); 0 = no reference model."
    )
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = Field("k3", description="Estimator.")
    kl_input_clamp_value: float | None = Field(20.0, gt=0, description="Bound of the log-ratio; null = none.")
    kl_output_clamp_value: float | None = Field(10.0, gt=0, description="Bound of the estimate; null = none.")
    use_importance_sampling_correction: bool = Field(
        False,
        description="Weight each token by p_trainer / p_generator at its sampling; asynchronous runs must set it.",
    )
    truncated_importance_sampling_type: Literal["tis"] | None = Field(None, description="Truncation of that weight.")
    truncated_importance_sampling_ratio: float | None = Field(None, gt=0, description="Upper bound of that weight.")
    truncated_importance_sampling_ratio_min: float | None = Field(None, ge=0, description="Lower bound of that weight.")
