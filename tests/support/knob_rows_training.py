"""What the settings of `grpo`, `reward_penalties`, `loss_fn` and `policy` do: rows of `tests/unit/configs`."""

from tests.support.knob_probes import OTHER_CLOSE, OTHER_OPEN, THINK_CLOSE, THINK_OPEN, UNWANTED, cut, learned, trained
from tests.support.knob_probes_run import admitted, prompted, requested, rolled, started
from tests.support.knob_probes_whole import ran
from tests.support.knobs import Flip, Refused

BOOL = ("false", "true")
# Two optimizer steps per RL step.
SEVERAL = ("policy.train_global_batch_size=4",)
KL = ("loss_fn.reference_policy_kl_penalty=0.1",)
CORRECTED = ("loss_fn.use_importance_sampling_correction=true",)
BOUNDS = (
    *CORRECTED,
    "loss_fn.truncated_importance_sampling_ratio=1.1",
    "loss_fn.truncated_importance_sampling_ratio_min=0.9",
)
TRUNCATION = "loss_fn.truncated_importance_sampling_type"
ICEPOP = (*BOUNDS, f"{TRUNCATION}=icepop")
BY_SEQUENCE = ("loss_fn.token_level_loss=false",)
WHITENED = ("grpo.adv_estimator={name: reinforce_plus_plus}",)
COMPONENTS = ("data.env_name=parts", "env.parts={kind: math_multi_reward, answer_form: line}")
GDPO = (*COMPONENTS, "grpo.adv_estimator={name: gdpo}")
TOOLS = (
    "data.env_name=tools",
    "env.tools={kind: tools, tools: {calculator: {kind: calculator}}}",
    "grpo.max_rollout_turns=3",
)
JUDGED = ("env.reward.think_tags=true",)
IDS = (f"reward_penalties.think_open_id={THINK_OPEN}", f"reward_penalties.think_close_id={THINK_CLOSE}")
BY_IDS = (*IDS, "reward_penalties.malformed_think_tag=true")
SCALED = ("grpo.reward_scaling.enabled=true", "grpo.normalize_rewards=false")
SHAPING = "grpo.reward_shaping"
OVERLONG = (
    f"{SHAPING}.enabled=true",
    f"{SHAPING}.max_response_length=6",
    f"{SHAPING}.overlong_buffer_length=3",
    f"{SHAPING}.overlong_buffer_penalty=0.5",
)
DYNAMIC = ("grpo.use_dynamic_sampling=true", *CORRECTED)
SAMPLED_VALIDATION = ("grpo.val_temperature=1.0",)
VALIDATED = ("grpo.val_at_end=true", "grpo.max_num_steps=1")
ONE_STEP = ("grpo.max_num_steps=1", "checkpointing.enabled=false")
DECAY = ("policy.scheduler.name=linear", "policy.scheduler.decay_steps=4")
WARM = ("policy.scheduler.warmup_steps=3",)

_LOSS = [
    Flip("loss_fn.disable_ppo_ratio", BOOL, trained),
    Refused("loss_fn.force_on_policy_ratio", "true", "needs one optimizer step per RL step", SEVERAL),
    Flip("loss_fn.sequence_level_importance_ratios", BOOL, trained, SEVERAL + BY_SEQUENCE),
    Flip("loss_fn.use_cispo", BOOL, trained, SEVERAL),
    Flip("loss_fn.ratio_clip_min", ("0.2", "0.03"), trained, SEVERAL),
    Flip("loss_fn.ratio_clip_max", ("0.2", "0.03"), trained, SEVERAL),
    Flip("loss_fn.ratio_clip_c", ("null", "1.1"), trained, SEVERAL),
    Flip("loss_fn.token_level_loss", BOOL, trained),
    Flip("loss_fn.sequence_loss_divisor", ("null", "7"), trained, BY_SEQUENCE),
    Flip("loss_fn.entropy_coef", ("0.0", "0.2"), trained),
    Flip("loss_fn.positive_example_nll_weight", ("0.0", "0.2"), trained),
    Flip("loss_fn.reference_policy_kl_penalty", ("0.0", "0.3"), trained),
    Flip("loss_fn.reference_policy_kl_type", ("k1", "k2", "k3"), trained, KL),
    Flip("loss_fn.kl_input_clamp_value", ("null", "0.15"), trained, KL),
    Flip("loss_fn.kl_output_clamp_value", ("null", "0.01"), trained, KL),
    Flip("loss_fn.use_on_policy_kl_approximation", BOOL, trained, KL),
    Flip("loss_fn.use_kl_in_reward", BOOL, trained, KL + WHITENED),
    Flip("loss_fn.use_importance_sampling_correction", BOOL, trained),
    Flip(TRUNCATION, ("tis", "icepop", "seq-mask-tis"), trained, BOUNDS),
    Flip("loss_fn.truncated_importance_sampling_ratio", ("1.1", "1.01"), trained, ICEPOP),
    Flip("loss_fn.truncated_importance_sampling_ratio_min", ("0.9", "0.97"), trained, ICEPOP),
]

_ADVANTAGES = [
    Flip("grpo.normalize_rewards", BOOL, trained),
    Flip("grpo.use_leave_one_out_baseline", BOOL, trained),
    Flip(
        "grpo.adv_estimator",
        tuple(
            f"{{_override_: true, name: {name}}}"
            for name in ("grpo", "rloo", "dr_grpo", "reinforce_plus_plus", "gdpo", "raw_reward")
        ),
        trained,
        COMPONENTS,
    ),
    Flip("grpo.adv_estimator.minus_baseline", BOOL, trained, WHITENED),
    Flip("grpo.adv_estimator.reward_weights", ("{}", "{correctness: 3.0}"), trained, GDPO),
    Flip("grpo.adv_estimator.whiten", BOOL, trained, ("grpo.adv_estimator={name: raw_reward}",)),
    Flip("grpo.reward_scaling.enabled", BOOL, trained),
    Flip("grpo.reward_scaling.source_min", ("0.0", "-1.0"), trained, SCALED),
    Flip("grpo.reward_scaling.source_max", ("1.0", "2.0"), trained, SCALED),
    Flip("grpo.reward_scaling.target_min", ("0.0", "-1.0"), trained, SCALED),
    Flip("grpo.reward_scaling.target_max", ("1.0", "3.0"), trained, SCALED),
    Flip(
        SHAPING,
        ("{enabled: false}", "{enabled: true, stop_properly_penalty_coef: 0.5}"),
        trained,
        field="enabled",
    ),
    Flip(f"{SHAPING}.max_response_length", ("6", "5"), trained, OVERLONG),
    Flip(f"{SHAPING}.overlong_buffer_length", ("3", "2"), trained, OVERLONG),
    Flip(f"{SHAPING}.overlong_buffer_penalty", ("0.5", "1.0"), trained, OVERLONG),
    Flip(f"{SHAPING}.stop_properly_penalty_coef", ("0.5", "0.0"), trained, (f"{SHAPING}.enabled=true",)),
    Flip("reward_penalties.unwanted_token_ids", ("[]", f"[{UNWANTED}]"), trained),
    Flip("reward_penalties.malformed_think_tag", BOOL, trained, (*IDS, "grpo.malformed_thinking_advantage=-1")),
    Flip("reward_penalties.think_open_id", (str(THINK_OPEN), str(OTHER_OPEN)), trained, BY_IDS),
    Flip("reward_penalties.think_close_id", (str(THINK_CLOSE), str(OTHER_CLOSE)), trained, BY_IDS),
    Flip("grpo.overlong_filtering", BOOL, trained),
    Flip("grpo.seq_logprob_error_threshold", ("null", "1.12"), trained),
    Flip("grpo.advantage_clip_low", ("null", "-0.2"), trained),
    Flip("grpo.advantage_clip_high", ("null", "0.2"), trained),
    Flip("grpo.invalid_tool_call_advantage", ("null", "-5.0"), trained, TOOLS),
    Flip("grpo.malformed_thinking_advantage", ("null", "-5.0"), trained, JUDGED),
    Flip("grpo.shuffle_advantages", BOOL, trained),
]

_STEPS = [
    Flip("grpo.num_prompts_per_step", ("2", "1"), ran, ONE_STEP),
    Flip("grpo.num_generations_per_prompt", ("4", "2"), ran, ONE_STEP),
    Flip("grpo.max_num_steps", ("1", "2"), ran, ("checkpointing.enabled=false",)),
    Flip("grpo.use_dynamic_sampling", BOOL, admitted),
    Flip("grpo.dynamic_sampling_max_gen_batches", ("10", "3"), admitted, DYNAMIC),
    Flip("grpo.batch_multiplier", ("1.0", "2.0"), admitted, DYNAMIC),
    Flip("grpo.max_rollout_turns", ("2", "3"), rolled, TOOLS),
    Flip("grpo.seed", ("1", "2"), prompted),
    Flip("grpo.seed", ("1", "2"), requested),
    Flip("grpo.val_period", ("0", "1"), ran, ONE_STEP),
    Flip("grpo.val_at_start", BOOL, ran, ONE_STEP),
    Flip("grpo.val_at_end", BOOL, ran, ONE_STEP),
    Flip("grpo.max_val_samples", ("256", "2", "1"), prompted),
    Flip("grpo.val_num_generations", ("1", "2"), ran, VALIDATED + SAMPLED_VALIDATION),
    Flip("grpo.val_temperature", ("0.0", "0.7"), requested),
    Flip("grpo.val_top_p", ("1.0", "0.9"), requested, SAMPLED_VALIDATION),
    Flip("grpo.val_top_k", ("null", "5"), requested, SAMPLED_VALIDATION),
    Flip("grpo.val_max_new_tokens", ("null", "3"), requested),
]

_POLICY = [
    Flip("policy.model_name", ("$W/model", "$W/other"), requested),
    Flip("policy.tokenizer.name", ("null", "$W/other"), prompted, ("data.prompt_format=chat",)),
    Flip(
        "policy.tokenizer.chat_template",
        ("null", "'{{ messages[0].content }}!'"),
        prompted,
        ("data.prompt_format=chat",),
    ),
    Flip("policy.precision", ("float32", "bfloat16"), requested),
    Flip("policy.train_global_batch_size", ("null", "4"), trained),
    Flip("policy.train_micro_batch_size", ("8", "2"), cut, ("policy.share_prefixes=off",)),
    Flip("policy.share_prefixes", ("on", "off"), cut),
    Flip("policy.share_prefixes", ("auto", "off"), cut),
    Flip("policy.max_total_sequence_length", ("32", "24"), requested),
    Flip("policy.max_grad_norm", ("1.0", "null", "0.1"), learned),
    Flip("policy.num_workers", ("1", "2"), cut),
    Flip("policy.num_workers", ("1", "2"), started),
    Flip("policy.trust_remote_code", BOOL, requested),
    Flip("policy.dynamic_batching.enabled", BOOL, cut, ("policy.share_prefixes=off",)),
    Flip("policy.dynamic_batching.train_mb_tokens", ("null", "40"), cut, ("policy.dynamic_batching.enabled=true",)),
    Flip("policy.dynamic_batching.logprob_mb_tokens", ("null", "40"), cut, ("policy.dynamic_batching.enabled=true",)),
    Flip("policy.dynamic_batching.sequence_length_round", ("1", "8"), cut, ("policy.dynamic_batching.enabled=true",)),
    Flip("policy.sequence_packing.enabled", BOOL, cut, ("policy.share_prefixes=off",)),
    Flip("policy.sequence_packing.train_mb_tokens", ("null", "40"), cut, ("policy.sequence_packing.enabled=true",)),
    Flip("policy.sequence_packing.logprob_mb_tokens", ("null", "40"), cut, ("policy.sequence_packing.enabled=true",)),
    Refused("policy.optimizer.name", "torch.optim.SGD", "must be torch.optim.AdamW"),
    Flip("policy.optimizer.kwargs.lr", ("0.01", "0.02"), learned),
    Flip("policy.optimizer.kwargs.betas", ("[0.9, 0.999]", "[0.8, 0.999]", "[0.9, 0.9]"), learned),
    Flip("policy.optimizer.kwargs.eps", ("1.0e-8", "0.1"), learned),
    Flip("policy.optimizer.kwargs.weight_decay", ("0.0", "0.1"), learned),
    Flip(
        "policy.scheduler",
        ("{name: constant}", "{name: linear, decay_steps: 4}", "{name: cosine, decay_steps: 4}"),
        learned,
        field="name",
    ),
    Flip("policy.scheduler.warmup_steps", ("0", "2"), learned),
    Flip("policy.scheduler.warmup_start_factor", ("0.1", "0.5"), learned, WARM),
    Flip("policy.scheduler.decay_steps", ("4", "5"), learned, DECAY),
    Flip("policy.scheduler.min_factor", ("0.0", "0.5"), learned, DECAY),
]

TRAINING_ROWS: list[Flip | Refused] = [*_LOSS, *_ADVANTAGES, *_STEPS, *_POLICY]
