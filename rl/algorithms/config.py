"""Settings of the `grpo`, `reward_penalties` and `loss_fn` sections."""

from typing import Annotated, Literal

from pydantic import Field

from rl.core.config import ConfigModel, operational


class GroupRelativeConfig(ConfigModel):
    """GRPO: reward relative to the siblings, by `grpo.normalize_rewards` and `grpo.use_leave_one_out_baseline`."""

    name: Literal["grpo"] = "grpo"


class RLOOConfig(ConfigModel):
    """RLOO: reward minus the mean of the siblings, not divided by anything."""

    name: Literal["rloo"]


class DrGRPOConfig(ConfigModel):
    """Dr. GRPO: reward minus the mean of the whole group, not divided by anything."""

    name: Literal["dr_grpo"]


class ReinforcePlusPlusConfig(ConfigModel):
    """Reinforce++: rewards whitened over all tokens of the step."""

    name: Literal["reinforce_plus_plus"]
    minus_baseline: bool = Field(True, description="Subtract the group's mean first (Reinforce++-baseline).")


class GDPOConfig(ConfigModel):
    """GDPO: every reward component normalised in its group by itself, then summed and whitened over the step."""

    name: Literal["gdpo"]
    reward_weights: dict[str, float] = Field(
        default_factory=dict, description="Weight of each reward component, by name; 1 where none is given."
    )


class RawRewardConfig(ConfigModel):
    """REINFORCE: the reward itself."""

    name: Literal["raw_reward"]
    whiten: bool = Field(False, description="Whiten over all tokens of the step.")


AdvantageConfig = Annotated[
    GroupRelativeConfig | RLOOConfig | DrGRPOConfig | ReinforcePlusPlusConfig | GDPOConfig | RawRewardConfig,
    Field(discriminator="name"),
]


class RewardScalingConfig(ConfigModel):
    """Linear map of rewards from the source range, to which they are clamped, to the target range."""

    enabled: bool = Field(False, description="Scale rewards.")
    source_min: float = Field(0.0, description="Reward that becomes target_min; lower ones are clamped to it.")
    source_max: float = Field(1.0, description="Reward that becomes target_max; higher ones are clamped to it.")
    target_min: float = Field(0.0, description="Image of source_min.")
    target_max: float = Field(1.0, description="Image of source_max.")


class RewardShapingConfig(ConfigModel):
    """Penalties on long and on truncated responses; they come after scaling and never raise a reward."""

    enabled: bool = Field(False, description="Shape rewards.")
    max_response_length: int | None = Field(
        None, ge=1, description="DAPO overlong penalty: longest response, in generated tokens."
    )
    overlong_buffer_length: int | None = Field(
        None, ge=1, description="Last tokens before max_response_length over which the penalty grows."
    )
    overlong_buffer_penalty: float | None = Field(
        None, ge=0, description="Largest penalty, reached at max_response_length."
    )
    stop_properly_penalty_coef: float | None = Field(
        None, ge=0, le=1, description="Factor of the reward of a truncated response; excludes the overlong penalty."
    )


class RewardPenaltiesConfig(ConfigModel):
    """Faults of form that cap the reward at 0, before scaling; a negative reward stays as it is."""

    unwanted_token_ids: list[int] = Field(
        default_factory=list, description="A response that holds one of these token ids is penalised."
    )
    malformed_think_tag: bool = Field(
        False,
        description="Penalise turns whose think tags do not match: none where the prompt leaves none open, else one "
        "closing tag; needs both ids.",
    )
    think_open_id: int | None = Field(None, ge=0, description="Token id of the opening think tag.")
    think_close_id: int | None = Field(None, ge=0, description="Token id of the closing think tag.")


class GRPOConfig(ConfigModel):
    """Group Relative Policy Optimization: the batch, its advantages, and when to validate."""

    num_prompts_per_step: int = Field(32, ge=1, le=1_000_000, description="Prompt groups of one step.")
    num_generations_per_prompt: int = Field(16, ge=1, le=10_000, description="Rollouts of one prompt.")
    max_num_steps: int = operational(1000, ge=1, description="RL steps of the run.")
    normalize_rewards: bool = Field(True, description="Divide by the group's standard deviation.")
    use_leave_one_out_baseline: bool = Field(
        True, description="Baseline = mean of the siblings, else of the whole group."
    )
    adv_estimator: AdvantageConfig = GroupRelativeConfig()
    reward_scaling: RewardScalingConfig = RewardScalingConfig()
    reward_shaping: RewardShapingConfig = RewardShapingConfig()
    use_dynamic_sampling: bool = Field(
        False, description="Replace groups whose raw rewards are all equal, until the step is full (DAPO)."
    )
    dynamic_sampling_max_gen_batches: int = Field(
        10, ge=1, description="Batches of num_prompts_per_step x batch_multiplier groups tried for one step."
    )
    batch_multiplier: float = Field(
        1.0, ge=1, description="Groups started for a step, as a multiple of num_prompts_per_step; surplus is kept."
    )
    overlong_filtering: bool = Field(
        False, description="Truncated responses have no weight in the loss; they still vote in the baseline."
    )
    seq_logprob_error_threshold: float | None = Field(
        None, ge=1, description="Drop sequences whose mean exp(|generator - trainer logprob|) is above; null = none."
    )
    advantage_clip_low: float | None = Field(None, le=0, description="Lower bound of advantages; null = none.")
    advantage_clip_high: float | None = Field(None, ge=0, description="Upper bound of advantages; null = none.")
    invalid_tool_call_advantage: float | None = Field(
        None, description="Advantage of all tokens of a turn with a malformed tool call; null = as any other turn."
    )
    malformed_thinking_advantage: float | None = Field(
        None, description="Advantage of all tokens of a turn with malformed think tags; null = as any other turn."
    )
    max_rollout_turns: int = Field(1, ge=1, description="Most completions of one rollout.")
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
    """The policy-gradient loss."""

    disable_ppo_ratio: bool = Field(
        False, description="REINFORCE: the log-probability itself in place of the ratio; nothing is clipped."
    )
    force_on_policy_ratio: bool = Field(
        False, description="Ratio 1 by definition; needs one optimizer step per RL step."
    )
    sequence_level_importance_ratios: bool = Field(
        False, description="GSPO: one ratio per sequence, the geometric mean of its tokens' ratios."
    )
    use_cispo: bool = Field(
        False, description="CISPO: the clipped ratio is a weight without gradient, so no token is ever left out."
    )
    ratio_clip_min: float = Field(0.2, ge=0, le=1, description="Lower clip: ratio >= 1 - this.")
    ratio_clip_max: float = Field(0.2, ge=0, description="Upper clip: ratio <= 1 + this.")
    ratio_clip_c: float | None = Field(None, gt=1, description="Dual-clip constant; null = off.")
    token_level_loss: bool = Field(True, description="Mean over tokens, else over sequences of their token means.")
    sequence_loss_divisor: int | None = Field(
        None,
        ge=1,
        description="Dr. GRPO: divide the sum of a sequence's tokens by this instead of by their number; needs "
        "token_level_loss: false.",
    )
    entropy_coef: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    positive_example_nll_weight: float = Field(
        0.0, ge=0, description="VAPO: weight of the negative log-likelihood of responses with a positive reward."
    )
    reference_policy_kl_penalty: float = Field(
        0.01, ge=0, description="Weight of KL(policy || reference); 0 = no reference model."
    )
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = Field("k3", description="Estimator.")
    kl_input_clamp_value: float | None = Field(20.0, gt=0, description="Bound of the log-ratio; null = none.")
    kl_output_clamp_value: float | None = Field(10.0, gt=0, description="Bound of the estimate; null = none.")
    use_on_policy_kl_approximation: bool = Field(
        False, description="Weight the KL estimate by p_policy / p_generator instead of 1."
    )
    use_kl_in_reward: bool = Field(
        False, description="Subtract the KL estimate from the reward of each token (Reinforce++) instead of the loss."
    )
    use_importance_sampling_correction: bool = Field(
        False,
        description="Weight each token by p_trainer / p_generator at its sampling; asynchronous runs must set it.",
    )
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = Field(
        None, description="Truncation of that weight: clamp it, drop tokens out of bounds, or drop sequences."
    )
    truncated_importance_sampling_ratio: float | None = Field(None, gt=0, description="Upper bound of that weight.")
    truncated_importance_sampling_ratio_min: float | None = Field(None, ge=0, description="Lower bound of that weight.")
