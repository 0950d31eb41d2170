"""The tables of the metric registry: one line per metric, by area. Data only; see `rl.core.metric_registry`.

A row is (name without the area's prefix, unit, reduction, meaning) and, where it is not logged always, when it is.
"""

from dataclasses import dataclass

Row = tuple[str, str, str, str] | tuple[str, str, str, str, str]

# How the parts of one step become one value. Over several optimizer steps of a step, means are averaged, counts
# added, and extrema stay extrema.
TOKENS = "mean over trained tokens"
LEVEL = "mean at the level of the loss (tokens or sequences)"
ROLLOUTS = "mean over rollouts"
VALID = "mean over valid rollouts"
TURNS = "mean over turns"
SUM = "sum"
MIN = "minimum"
MAX = "maximum"
LAST = "value at the end of the step"
STEPS = "mean over optimizer steps"
P95 = "95th percentile over rollouts"
P99 = "99th percentile over rollouts"
SEQUENCES = "mean over sequences"
GROUPS_SHARE = "share of prompt groups"

_TRAINED = "where a token is trained on"
_OWN = "where the step's own version sampled a token"
_PREV = "several optimizer steps per step, or grpo.seq_logprob_error_threshold"
_FILTER = "grpo.seq_logprob_error_threshold"
_REWARD_MODEL_RUNS = "an environment of kind reward_model"
_SCORED = "where a rollout is valid"
_DYNAMIC = "grpo.use_dynamic_sampling"
_COLOCATED = "policy.generation.colocated"


@dataclass(frozen=True)
class MetricGroup:
    """One area.

    Attributes:
        title: Its heading in the documentation.
        prefix: What all its names begin with.
        rows: The metrics.
    """

    title: str
    prefix: str
    rows: tuple[Row, ...]


_LOSS: tuple[Row, ...] = (
    ("loss", "1", LEVEL, "The loss that was minimised, all its terms together."),
    ("kl_penalty", "nats", LEVEL, "KL(policy || reference) of the loss, before its factor.", _TRAINED),
    ("positive_nll_loss", "nats", "mean over trained tokens of sequences with a positive reward",
     "Negative log-likelihood of the examples that were right.", "loss_fn.positive_example_nll_weight > 0"),
    ("probs_ratio", "1", TOKENS,
     "p(policy) / p(policy at the start of the step); the true ratio in every mode.", _TRAINED),
    ("probs_ratio_clamped", "1", TOKENS, "The ratio inside its bounds.", _TRAINED),
    ("probs_ratio_min", "1", MIN, "Smallest ratio.", _TRAINED),
    ("probs_ratio_max", "1", MAX, "Largest ratio.", _TRAINED),
    ("probs_ratio_clamped_min", "1", MIN, "Smallest ratio inside its bounds.", _TRAINED),
    ("probs_ratio_clamped_max", "1", MAX, "Largest ratio inside its bounds.", _TRAINED),
    ("num_clamped_log_ratios", "tokens", SUM,
     "Tokens whose log-ratio is kept from beyond +-20, where nothing is learned from them.", _TRAINED),
    ("clipfrac_low", "1", TOKENS, "Share of tokens whose gradient the lower bound of the ratio cuts.", _TRAINED),
    ("clipfrac_high", "1", TOKENS, "Share of tokens whose gradient the upper bound of the ratio cuts.", _TRAINED),
    ("dual_clipfrac", "1", TOKENS,
     "Share of tokens with a negative advantage that loss_fn.ratio_clip_c bounds.", _TRAINED),
    ("entropy", "nats", TOKENS, "Exact entropy of the policy over the vocabulary.", _TRAINED),
    ("approx_entropy", "nats", TOKENS, "Entropy estimated from the sampled tokens: -p/p(generator) log p.", _TRAINED),
    ("num_valid_samples", "sequences", SUM, "Sequences with weight in the loss."),
)  # fmt: skip

_MISMATCH: tuple[Row, ...] = (
    ("max_logprob_diff", "nats", MAX,
     "Largest |trainer - generator| of a token's log-probability; rounding alone when all is well.", _OWN),
    ("num_nonfinite_logprob_gaps", "tokens", SUM, "Tokens whose gap is no number.", _OWN),
    ("token_mult_prob_error", "1", TOKENS,
     "exp|trainer - generator|: the factor by which the probabilities differ; 1 is ideal.", _TRAINED),
    ("gen_kl_error", "nats", TOKENS, "Estimate of KL(generator || trainer).", _TRAINED),
    ("policy_kl_error", "nats", TOKENS,
     "Estimate of KL(trainer || generator) on the generator's samples; explodes on rare tokens.", _TRAINED),
    ("js_divergence_error", "nats", TOKENS, "Estimate of the Jensen-Shannon divergence of the two.", _TRAINED),
    ("sampling_importance_ratio", "1", "mean over trained tokens, over sequences with a sequence ratio",
     "p(trainer) / p(generator) after truncation, whether or not the correction is on.", _TRAINED),
    ("is_oob_ratio", "1", "share of trained tokens, of sequences with seq-mask-tis",
     "Share outside the bounds of the truncation.", "loss_fn.truncated_importance_sampling_type"),
    ("max_seq_mult_prob_error", "1", MAX, "Largest mean of exp|trainer - generator| over a sequence.", _PREV),
    ("mean_seq_mult_prob_error", "1", SEQUENCES, "Mean of exp|trainer - generator| over each sequence.", _PREV),
    ("min_seq_mult_prob_error", "1", MIN, "Smallest mean of exp|trainer - generator| over a sequence.", _PREV),
    ("max_seq_mult_prob_error_after_mask", "1", MAX, "The same over the sequences that the filter kept.", _FILTER),
    ("mean_seq_mult_prob_error_after_mask", "1", SEQUENCES,
     "The same over the sequences that the filter kept.", _FILTER),
    ("min_seq_mult_prob_error_after_mask", "1", MIN, "The same over the sequences that the filter kept.", _FILTER),
    ("num_masked_seqs_by_logprob_error", "sequences", SUM, "Sequences that the filter dropped.", _FILTER),
    ("masked_correct_pct", "1", "share of the dropped sequences",
     "Dropped sequences whose reward is exactly 1.", _FILTER),
)  # fmt: skip

_OPTIMIZER: tuple[Row, ...] = (
    ("grad_norm", "1", "value of the last optimizer step",
     "Norm of the gradient before it is clipped.", "where an optimizer step was made"),
    ("lr", "1", STEPS, "Learning rate."),
    ("wd", "1", STEPS, "Decoupled weight decay."),
    ("global_valid_toks", "tokens", STEPS, "Sum of token weights: what token-level sums are divided by."),
    ("global_valid_seqs", "sequences", STEPS, "Sum of sequence weights: what sequence-level sums are divided by."),
    ("steps_skipped_empty", "optimizer steps", SUM, "Skipped because no token had weight."),
    ("num_skipped_sequences", "sequences", SUM, "Left out of forward and backward because they change nothing."),
    ("steps_skipped_nonfinite", "optimizer steps", SUM, "Skipped because loss or gradient was no number."),
    ("num_computed_positions", "positions", SUM,
     "Token positions that forward and backward went through, shared prefixes once, padding left out."),
)  # fmt: skip

_REWARD: tuple[Row, ...] = (
    ("reward", "reward", VALID,
     "Reward after scaling, shaping and penalties: what the advantages are made of.", _SCORED),
    ("raw_reward", "reward", VALID,
     "Reward as the environment gave it.", "rewards are scaled, shaped or penalised"),
    ("unfiltered_reward", "reward", VALID,
     "Raw reward over all groups, those that dynamic sampling filtered included.", _DYNAMIC),
    ("filtered_reward", "reward", VALID,
     "train/reward over the groups whose raw rewards differ.", "where a group's raw rewards differ"),
    ("reward/*", "reward", VALID, "One named component of the raw reward.", "the environment gives components"),
    ("num_valid_rollouts", "rollouts", SUM, "Rollouts with a reward."),
    ("num_invalid_rollouts", "rollouts", SUM, "Rollouts whose reward failed; they have no vote and no weight."),
    ("baseline_reward/pct_0", "1", GROUPS_SHARE, "Groups whose mean raw reward is 0.", _SCORED),
    ("baseline_reward/pct_1", "1", GROUPS_SHARE, "Groups whose mean raw reward is 1.", _SCORED),
    ("baseline_reward/pct_mixed", "1", GROUPS_SHARE, "All other groups.", _SCORED),
    ("advantages/mean", "1", TOKENS, "Mean advantage.", _TRAINED),
    ("advantages/max", "1", MAX, "Largest advantage.", _TRAINED),
    ("advantages/min", "1", MIN, "Smallest advantage.", _TRAINED),
    ("advantages/sum", "1", SUM, "Sum of the advantages over the trained tokens.", _TRAINED),
    ("num_overlong_filtered", "sequences", SUM,
     "Truncated responses without weight in the loss.", "grpo.overlong_filtering"),
    ("num_scaled_out_of_range", "rollouts", SUM,
     "Rewards outside the source range of the scaling, which were clamped.", "grpo.reward_scaling.enabled"),
    ("reward_penalties/*", "rollouts", SUM, "Rollouts that one penalty has hit.", "the penalty is on"),
)  # fmt: skip

_DYNAMIC_SAMPLING: tuple[Row, ...] = (
    ("dynamic_sampling_num_gen_batches", "batches", LAST, "Batches of prompts that the step took.", _DYNAMIC),
    ("dynamic_sampling_num_discarded_valid_samples", "rollouts", SUM,
     "Valid rollouts that no step will train; surplus groups are kept, so they do not count.", _DYNAMIC),
    ("dynamic_sampling_num_filtered_groups", "groups", SUM, "Groups without variance, which were replaced.", _DYNAMIC),
    ("dynamic_sampling_num_carried_groups", "groups", LAST, "Surplus groups that wait for the next step.", _DYNAMIC),
)  # fmt: skip

_ROLLOUTS: tuple[Row, ...] = (
    ("num_rollouts", "rollouts", SUM, "Rollouts of the step."),
    ("num_sequences", "sequences", SUM,
     "Sequences of the step: a rollout whose template rewrote its history has several.",
     "where they differ from rollouts"),
    ("num_prompt_groups", "groups", SUM, "Prompt groups of the step."),
    ("total_num_tokens", "tokens", SUM, "Tokens of the step, prompts included."),
    ("mean_prompt_length", "tokens", ROLLOUTS, "Tokens of the first prompt."),
    ("mean_gen_tokens_per_sample", "tokens", ROLLOUTS, "Sampled tokens over all turns."),
    ("max_gen_tokens_per_sample", "tokens", MAX, "Most sampled tokens of a rollout."),
    ("mean_total_tokens_per_sample", "tokens", ROLLOUTS, "Tokens of all its sequences: prompt, completions, answers."),
    ("mean_env_tokens_per_sample", "tokens", ROLLOUTS,
     "Tokens that were neither sampled nor in the first prompt: the environment's answers and the template's."),
    ("max_gen_tokens_per_turn/max", "tokens", MAX, "Longest turn of all rollouts."),
    ("max_gen_tokens_per_turn/mean", "tokens", ROLLOUTS, "Longest turn of each rollout."),
    ("max_gen_tokens_per_turn/p95", "tokens", P95, "Longest turn of each rollout."),
    ("total_turns", "turns", SUM, "Turns of all rollouts."),
    ("avg_turns_per_sample", "turns", ROLLOUTS, "Turns of a rollout."),
    ("max_turns_per_sample", "turns", MAX, "Most turns of a rollout."),
    ("turns_per_sample/p95", "turns", P95, "Turns of a rollout."),
    ("turns_per_sample/p99", "turns", P99, "Turns of a rollout."),
    ("natural_termination_rate", "1", ROLLOUTS, "Share that the environment ended, untruncated."),
    ("truncation_rate", "1", ROLLOUTS, "Share that a length bound cut off."),
    ("max_turns_reached_rate", "1", ROLLOUTS, "Share that ended at grpo.max_rollout_turns."),
    ("mean_total_reward", "reward", VALID, "Raw reward over all turns.", _SCORED),
    ("max_total_reward", "reward", MAX, "Largest raw reward.", _SCORED),
    ("min_total_reward", "reward", MIN, "Smallest raw reward.", _SCORED),
    ("num_forked_rollouts", "rollouts", SUM,
     "Rollouts whose history the template rewrote.", "rollouts of several turns"),
    ("num_drifted_turns", "turns", SUM,
     "Turns before which the template writes the answer with other outer whitespace, or another end, than was sampled.",
     "rollouts of several turns"),
    ("num_assistant_messages", "turns", SUM, "Turns that the policy made."),
    ("num_invalid_tool_calls", "turns", SUM, "Turns with a malformed tool call."),
    ("num_malformed_thinking", "turns", SUM, "Turns with malformed think tags."),
    ("invalid_tool_call_rate", "1", "share of turns", "Turns with a malformed tool call."),
    ("malformed_thinking_rate", "1", "share of turns", "Turns with malformed think tags."),
    ("staleness_mean", "versions", TOKENS, "Version that trains a token minus the one that sampled it.", _TRAINED),
    ("staleness_max", "versions", MAX, "The same, at its largest.", _TRAINED),
    ("env/*", "as the environment says", ROLLOUTS,
     "A number of the environment, over the rollouts that have it.", "the environment reports it"),
)  # fmt: skip

_REWARD_MODEL: tuple[Row, ...] = (
    ("num_samples", "rollouts", ROLLOUTS, "Samples of a group that the reward model scored.", _REWARD_MODEL_RUNS),
    ("mean_reward", "reward", ROLLOUTS, "Mean score of a group.", _REWARD_MODEL_RUNS),
    ("std_reward", "reward", ROLLOUTS,
     "Standard deviation (n - 1; 0 for one sample) of a group's scores.", _REWARD_MODEL_RUNS),
    ("min_reward", "reward", ROLLOUTS, "Least score of a group.", _REWARD_MODEL_RUNS),
    ("max_reward", "reward", ROLLOUTS, "Greatest score of a group.", _REWARD_MODEL_RUNS),
)  # fmt: skip

_COUNTERS: tuple[Row, ...] = (
    ("num_reward_errors", "rollouts", SUM, "The reward raised an error."),
    ("num_reward_timeouts", "rollouts", SUM, "The reward did not come in time."),
    ("num_reward_invalid", "rollouts", SUM, "The reward was no finite number."),
    ("num_unusable_samples", "rollouts", SUM,
     "Left out of their group: the engine returned an unusable completion (no finite log-probability, say) twice."),
    ("num_infra_retries", "attempts", SUM,
     "Attempts at a group that failed for a machine's reason and were made again."),
    ("num_data_retries", "attempts", SUM, "Attempts at a group that failed for its own reason and were made again."),
    ("num_failed_prompt_groups", "groups", SUM, "Groups given up after all attempts."),
    ("dropped_prompt_groups", "groups", SUM, "Groups that ended without being trained."),
    ("dropped_prompt_groups/*", "groups", SUM, "The same, by reason.", "the reason occurs"),
    ("replaced_prompt_groups", "groups", SUM, "Dropped groups whose place another prompt took."),
    ("num_skipped_prompts", "rows", "sum over the run", "Prompts longer than the limit."),
    ("num_faulty_prompts", "rows", "sum over the run", "Rows that cannot be read or tokenized."),
    ("consumed_prompts", "groups", "sum over the run", "Groups trained so far."),
)  # fmt: skip

_TIMING: tuple[Row, ...] = (
    ("total_step_time", "s", LAST, "The whole step."),
    ("exposed_generation", "s", SUM, "Waiting for the groups of the step."),
    ("data_processing", "s", SUM, "Laying out the batch."),
    ("policy_and_reference_logprobs", "s", SUM, "Scoring tokens with the policy and the reference."),
    ("advantage_calculation", "s", SUM, "Rewards to advantages."),
    ("policy_training", "s", SUM, "Forward, backward, optimizer."),
    ("weight_sync", "s", SUM, "The refit."),
    ("residency", "s", SUM, "Models that make room for each other, but for what wakes within the refit.", _COLOCATED),
    ("checkpointing", "s", SUM, "Saving the checkpoint of the step.", "a checkpoint was saved"),
)  # fmt: skip

_PERFORMANCE: tuple[Row, ...] = (
    ("tokens_per_sec", "tokens/s", LAST, "Tokens of the step, prompts included, by the time of the whole step."),
    ("samples_per_sec", "rollouts/s", LAST, "Rollouts of the step by the time of the whole step."),
    ("policy_training_tokens_per_sec", "tokens/s", LAST, "Tokens of the step by the time of training."),
    ("overlap_s", "s", LAST, "Time in which generation and training ran side by side."),
)  # fmt: skip

_REFIT: tuple[Row, ...] = (
    ("version", "versions", LAST, "Version that every generator holds."),
    ("seconds", "s", LAST, "Duration of the refit, from the pause to the resumed generators."),
    ("pause_s", "s", LAST, "Stopping the generators."),
    ("transfer_s", "s", LAST, "From the first call to the last byte loaded; the ends work side by side in it."),
    ("commit_s", "s", LAST, "Finishing layers, reading back, comparing digests, resuming."),
    ("gather_s", "s", LAST, "Collecting shards or adapters at the trainer; the slowest root."),
    ("copy_s", "s", LAST, "Copying in and out of buckets; the slowest end."),
    ("digest_s", "s", LAST, "Digests; the slowest end."),
    ("wire_s", "s", LAST, "Waiting for a bucket or for room for one; the slowest end."),
    ("load_s", "s", LAST, "Handing tensors to the engine; the slowest reader."),
    ("digest_share", "1", LAST, "Digests by the duration of the refit."),
    ("mib", "MiB", LAST, "Weights that moved."),
    ("tensors", "tensors", LAST, "Tensors that moved."),
    ("changed_tensors", "tensors", LAST, "Those whose bytes are others than in the refit before."),
    ("replicas", "replicas", LAST, "Generators that got them, and servers."),
    ("attempts", "attempts", LAST, "1, and 1 for every failed attempt."),
    (
        "probe_gap",
        "nats",
        LAST,
        "Mean |trainer - generator| over the probe, of the weights that the step began with; the worst replica.",
        "a probe was due",
    ),
    ("probe_s", "s", LAST, "Duration of the probe.", "a probe was due"),
)

_RESIDENCY: tuple[Row, ...] = (
    ("generator_out_mib", "MiB", SUM, "What the generators gave up before training: weights and caches.", _COLOCATED),
    ("generator_out_s", "s", SUM, "Its duration.", _COLOCATED),
    ("trainer_in_mib", "MiB", SUM, "The optimizer's moments that came back to the device.", _COLOCATED),
    ("trainer_in_s", "s", SUM, "Its duration.", _COLOCATED),
    ("trainer_out_mib", "MiB", SUM, "Moments and gradients that left before the refit.", _COLOCATED),
    ("trainer_out_s", "s", SUM, "Its duration.", _COLOCATED),
    ("generator_in_mib", "MiB", SUM, "What the generators took again: weights, and caches at the end.", _COLOCATED),
    ("generator_in_s", "s", SUM, "Its duration; that of the caches is within refit/commit_s.", _COLOCATED),
)  # fmt: skip

_VALIDATION: tuple[Row, ...] = (
    ("accuracy", "reward", "sum over samples / samples asked for", "Mean raw reward; a failed sample adds nothing."),
    (
        "pass_at_k",
        "1",
        "share of prompts",
        "Prompts with a sample of positive raw reward.",
        "grpo.val_num_generations > 1",
    ),
    ("num_samples", "rollouts", SUM, "Samples asked for: prompts x grpo.val_num_generations."),
    ("num_failed", "rollouts", SUM, "Samples without a reward."),
    ("avg_length", "tokens", ROLLOUTS, "Sampled tokens.", "where a sample was made"),
    ("truncation_rate", "1", ROLLOUTS, "Share that a length bound cut off.", "where a sample was made"),
    ("num_dropped_prompts", "prompts", SUM, "Prompts given up after all attempts."),
    ("num_skipped_prompts", "rows", SUM, "Prompts longer than the limit."),
    ("num_faulty_prompts", "rows", SUM, "Rows that cannot be read or tokenized."),
    ("env/*", "as the environment says", ROLLOUTS, "A number of the environment.", "the environment reports it"),
)

_EVAL: tuple[Row, ...] = (
    ("avg@*", "reward", "sum over samples / samples asked for", "Mean raw reward of n samples of each prompt."),
    ("pass@*", "1", "mean over prompts", "Unbiased estimate that k samples hold a right one."),
    ("env/*", "as the environment says", ROLLOUTS, "A number of the environment.", "the environment reports it"),
    ("cons@*", "1", "mean over prompts", "Share of all k-subsets whose most frequent answer is right.", "k > 1"),
    ("avg_length", "tokens", ROLLOUTS, "Sampled tokens.", "where a sample was made"),
    ("truncation_rate", "1", ROLLOUTS, "Share that a length bound cut off.", "where a sample was made"),
)

GROUPS: tuple[MetricGroup, ...] = (
    MetricGroup("Loss", "train/", _LOSS),
    MetricGroup("Trainer against generator", "train/", _MISMATCH),
    MetricGroup("Optimizer", "train/", _OPTIMIZER),
    MetricGroup("Rewards and advantages", "train/", _REWARD),
    MetricGroup("Dynamic sampling", "train/", _DYNAMIC_SAMPLING),
    MetricGroup("Rollouts", "train/", _ROLLOUTS),
    MetricGroup("Reward model", "train/env/reward_model_env/", _REWARD_MODEL),
    MetricGroup("What went wrong, and how far the run is", "train/", _COUNTERS),
    MetricGroup("Time of a step by phase", "timing/train/", _TIMING),
    MetricGroup("Rates", "performance/", _PERFORMANCE),
    MetricGroup("Refit", "refit/", _REFIT),
    MetricGroup("Models that share devices", "residency/", _RESIDENCY),
    MetricGroup("Validation", "validation/", _VALIDATION),
    MetricGroup("Evaluation: results.json of `tandem eval`, without the prefix", "eval/", _EVAL),
    MetricGroup("Time of a validation", "timing/validation/", (("total", "s", LAST, "The whole validation."),)),
)
