"""Settings that cannot go together, or have no effect, are refused with keys, values and a fix."""

import pytest

from rl.controller.checks import ALL_CHECKS, check_config, find_conflicts
from rl.controller.checks_policy import POLICY_CHECKS
from rl.controller.checks_run import RUN_CHECKS
from rl.controller.config import MasterConfig
from rl.controller.load import load_config
from rl.core.config_file import build, load
from rl.core.config_paths import find_config
from rl.core.errors import ConfigError

DEFAULT = find_config("grpo_smollm2_cpu")
NO_VALIDATION = ["grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false"]
REASONING_GYM = "{_override_: true, kind: reasoning_gym, task: leg_counting}"

# What is wrong, the overrides that make it so, and a piece of the message; each has one fix that the message names.
REFIT = "policy.generation.refit_cfg"
COLOCATED = "policy.generation.colocated=true"
CONFLICTS = [
    (
        "step_divides_into_updates",
        ["policy.train_global_batch_size=48", "loss_fn.force_on_policy_ratio=false"],
        "train_global_batch_size=48 does not divide the sequences of a step, 64",
    ),
    (
        "one_rule_cuts_micro_batches",
        ["policy.dynamic_batching.enabled=true", "policy.sequence_packing.enabled=true"],
        "dynamic_batching.enabled=true and policy.sequence_packing.enabled=true exclude each other",
    ),
    (
        "token_budgets_have_an_effect",
        ["policy.dynamic_batching.train_mb_tokens=4096"],
        "dynamic_batching.train_mb_tokens=4096 has no effect",
    ),
    (
        "token_budgets_have_an_effect",
        ["policy.sequence_packing.logprob_mb_tokens=4096"],
        "sequence_packing.logprob_mb_tokens=4096 has no effect",
    ),
    (
        "token_budgets_have_an_effect",
        ["policy.sequence_packing={enabled: true, train_mb_tokens: 4096, logprob_mb_tokens: 4096}"],
        "train_micro_batch_size=16 has no effect",
    ),
    (
        "token_budgets_hold_a_sequence",
        ["policy.dynamic_batching={enabled: true, train_mb_tokens: 63}"],
        "train_mb_tokens=63 is less than the longest sequence, policy.max_total_sequence_length=64",
    ),
    (
        "decay_has_a_length",
        ["policy.scheduler.name=cosine", "policy.scheduler.warmup_steps=5"],
        "set policy.scheduler.decay_steps=15",
    ),
    ("schedule_settings_have_an_effect", ["policy.scheduler.decay_steps=5"], "decay_steps=5 has no effect"),
    (
        "schedule_settings_have_an_effect",
        ["policy.scheduler.warmup_start_factor=0.5"],
        "warmup_start_factor=0.5 has no effect",
    ),
    (
        "completion_fits_the_context",
        ["policy.generation.max_new_tokens=64"],
        "max_new_tokens=64 leaves no token for a prompt",
    ),
    (
        "completion_fits_the_context",
        ["grpo.val_max_new_tokens=100"],
        "val_max_new_tokens=100 leaves no token for a prompt",
    ),
    ("prompt_fits_the_context", ["data.max_input_seq_length=62"], "lower data.max_input_seq_length to 60"),
    ("backoff_is_ordered", ["async_rl.rollout_failure.max_backoff_s=0.5"], "max_backoff_s=0.5 is below"),
    ("watchdog_looks_in_time", ["async_rl.stall_watchdog.stall_timeout_s=3"], "interval_s=30.0 is longer than"),
    (
        "validation_has_prompts",
        ["data.validation=null"],
        "turn validation off: grpo.val_period=0 grpo.val_at_start=false grpo.val_at_end=false "
        "checkpointing.metric_name=null",
    ),
    ("greedy_validation_samples_once", ["grpo.val_num_generations=4"], "val_num_generations=4 has no effect"),
    ("greedy_validation_samples_once", ["grpo.val_top_p=0.9"], "val_top_p=0.9 has no effect"),
    (
        "metric_name_has_a_prefix",
        ["checkpointing.metric_name=accuracy"],
        "is not of the form val:<name> or train:<name>",
    ),
    ("metric_name_is_known", ["checkpointing.metric_name=val:accuracy_"], "set checkpointing.metric_name=val:accuracy"),
    ("metric_name_is_known", ["checkpointing.metric_name=val:nope"], "val:nope is not among the validation metrics"),
    (
        "metric_name_is_known",
        ["checkpointing.metric_name=train:rewards"],
        "not among the training metrics of docs/metrics.md; set checkpointing.metric_name=train:reward",
    ),
    (
        "metric_name_is_known",
        ["checkpointing.metric_name=val:pass_at_k"],
        "pass_at_k needs grpo.val_num_generations > 1",
    ),
    ("best_checkpoint_has_a_metric", NO_VALIDATION, "needs validation, but grpo.val_period=0"),
    ("environment_exists", ["data.env_name=maths"], "data.env_name=maths is not among the environments of env: math"),
    (
        "reasoning_gym_scores_its_own",
        [f"data.train={REASONING_GYM}", f"data.validation={REASONING_GYM}"],
        "set env.math.kind=reasoning_gym",
    ),
    ("reasoning_gym_scores_its_own", ["env.math={_override_: true, kind: reasoning_gym}"], "set env.math.kind=math"),
    ("raw_prompts_have_no_template", ["data.system_prompt=Hello"], "system_prompt=Hello has no effect"),
    ("raw_prompts_have_no_template", ["policy.tokenizer.chat_template=x"], "chat_template=x has no effect"),
    ("raw_prompts_have_no_template", ["data.rewritten_history=fork"], "rewritten_history=fork has no effect"),
    (
        "one_turn_has_no_history",
        ["data.rewritten_history=fork", "data.prompt_format=chat"],
        "grpo.max_rollout_turns=1 leaves no history",
    ),
    ("local_cluster_is_one_process", ["cluster.kind=local"], "set policy.generation.backend=hf or cluster.kind=ray"),
    (
        "local_cluster_is_one_process",
        ["cluster.kind=local", "policy.generation.backend=hf", "cluster.gpus_per_node=2"],
        "gpus_per_node=2 has no effect",
    ),
    (
        "joined_cluster_has_its_own_store",
        ["cluster.address=auto", "cluster.object_store_mib=512"],
        "object_store_mib=512 has no effect",
    ),
    (
        "gpus_suffice",
        ["cluster.gpus_per_node=1"],
        "is 1 GPUs, but policy.num_workers=1 + policy.generation.num_replicas=1 x 1 ranks need 2",
    ),
    (
        "taking_turns_leaves_no_lookahead",
        [COLOCATED, "async_rl.sampler.max_lookahead_versions=1", "loss_fn.use_importance_sampling_correction=true"],
        "colocated=true lets nothing be generated while the model trains, "
        "but async_rl.sampler.max_lookahead_versions=1 generates then; "
        "set async_rl.sampler.max_lookahead_versions=0, or policy.generation.colocated=false",
    ),
    (
        "taking_turns_leaves_no_lookahead",
        [
            COLOCATED,
            "grpo.use_dynamic_sampling=true",
            "grpo.batch_multiplier=2",
            "loss_fn.use_importance_sampling_correction=true",
        ],
        "but grpo.batch_multiplier=2.0 generates then; set grpo.batch_multiplier=1,",
    ),
    (
        "taking_turns_needs_placement",
        [COLOCATED, "cluster.gpus_per_node=2"],
        "colocated=true with cluster.gpus_per_node=2: trainer and engines cannot be placed on the same GPUs yet; "
        "set policy.generation.colocated=false, and cluster.gpus_per_node to as many as both need",
    ),
    (
        "engine_memory_matches_the_device",
        ["policy.generation.vllm_cfg.gpu_memory_utilization=0.5"],
        "gpu_memory_utilization=0.5 has no effect",
    ),
    (
        "engine_memory_matches_the_device",
        ["cluster.gpus_per_node=2", "policy.generation.vllm_cfg.kv_cache_gib=2"],
        "kv_cache_gib=2.0 has no effect",
    ),
    (
        "shared_memory_is_on_one_host",
        ["cluster.num_nodes=2", f"{REFIT}.transport=shm"],
        "works on one host, but cluster.num_nodes=2",
    ),
    (
        "shared_memory_is_on_one_host",
        [f"{REFIT}.transport=shm", f"{REFIT}.servers=['http://10.0.0.7:8000']"],
        "works on one host, but policy.generation.refit_cfg.servers has http://10.0.0.7:8000",
    ),
    (
        "addresses_are_for_tcp",
        [f"{REFIT}.host=10.0.0.7"],
        'host="10.0.0.7" has no effect: policy.generation.refit_cfg.transport=auto is shm here, and only tcp',
    ),
    ("addresses_are_for_tcp", [f"{REFIT}.silence_s=5", f"{REFIT}.transport=shm"], "silence_s=5.0 has no effect"),
    (
        "addresses_are_for_tcp",
        [f"{REFIT}.silence_s=5", "cluster.gpus_per_node=2"],
        "transport=auto is nccl here, and only tcp uses it",
    ),
    (
        "addresses_are_for_tcp",
        ["cluster.num_nodes=2", f"{REFIT}.host=127.0.0.1"],
        "host=127.0.0.1 reaches no other host, but cluster.num_nodes=2",
    ),
    (
        "addresses_are_for_tcp",
        [f"{REFIT}.servers=['http://10.0.0.7:8000']", f"{REFIT}.host='[::1]'"],
        "host=::1 reaches no other host, but policy.generation.refit_cfg.servers=http://10.0.0.7:8000",
    ),
    ("nccl_needs_gpus", [f"{REFIT}.transport=nccl"], "nccl needs GPUs, but cluster.gpus_per_node=0"),
    ("enough_replicas_are_started", [f"{REFIT}.min_replicas=2"], "min_replicas=2 exceeds"),
    (
        "caches_are_kept_only_where_there_are_any",
        [f"{REFIT}.recompute_kv_cache_after_weight_updates=false"],
        "no effect: pause_mode=drain leaves no request under way",
    ),
    (
        "caches_are_kept_only_where_there_are_any",
        [
            "policy.generation={_override_: true, backend: hf, max_new_tokens: 6}",
            f"{REFIT}.pause_mode=keep",
            f"{REFIT}.recompute_kv_cache_after_weight_updates=false",
        ],
        "no effect: backend hf keeps no cache",
    ),
]


def _config(overrides: list[str]) -> MasterConfig:
    return build(load(DEFAULT, overrides, MasterConfig), MasterConfig, allow_unknown=False)


@pytest.mark.parametrize(
    ("check", "overrides", "message"),
    CONFLICTS,
    ids=[f"{name}-{index}" for index, (name, _, _) in enumerate(CONFLICTS)],
)
def test_a_conflict_is_refused_by_its_check_alone(check: str, overrides: list[str], message: str) -> None:
    config = _config(overrides)
    refusing = {each.__name__ for each in ALL_CHECKS if list(each(config))}
    assert refusing == {check}
    text = "\n".join(f"{conflict.problem}; {conflict.fix}" for conflict in find_conflicts(config))
    assert message in text


def test_every_check_has_a_conflict_above() -> None:
    covered = {name for name, _, _ in CONFLICTS}
    assert {each.__name__ for each in [*POLICY_CHECKS, *RUN_CHECKS]} == covered


@pytest.mark.parametrize(
    "overrides",
    [
        ["policy.train_global_batch_size=64"],
        ["policy.num_workers=3", "policy.train_micro_batch_size=5"],
        ["policy.sequence_packing={enabled: true, train_mb_tokens: 4096}"],
        ["grpo.num_prompts_per_step=1", "grpo.num_generations_per_prompt=3"],
        ["loss_fn.force_on_policy_ratio=false", "policy.train_global_batch_size=16", "loss_fn.ratio_clip_max=0.28"],
        ["policy.scheduler.name=linear", "policy.scheduler.decay_steps=10", "policy.scheduler.warmup_steps=3"],
        [*NO_VALIDATION, "data.validation=null", "checkpointing.metric_name=null"],
        [*NO_VALIDATION, "checkpointing.metric_name=train:reward"],
        [*NO_VALIDATION, "checkpointing.metric_name=train:timing/train/total_step_time"],
        ["checkpointing.metric_name=val:env/solved"],
        ["checkpointing.metric_name=val:nope", "checkpointing.enabled=false"],
        [*NO_VALIDATION, "checkpointing.enabled=false"],
        ["grpo.val_temperature=1", "grpo.val_num_generations=4", "grpo.val_top_p=0.9", "grpo.val_top_k=5"],
        ["cluster.kind=local", "policy.generation.backend=hf"],
        ["cluster.gpus_per_node=2"],
        [COLOCATED],
        [COLOCATED, f"{REFIT}.servers=['http://127.0.0.1:8000']"],
        [f"{REFIT}.transport=tcp", f"{REFIT}.host=127.0.0.1", f"{REFIT}.silence_s=5"],
        ["cluster.num_nodes=2", f"{REFIT}.host=10.0.0.7", f"{REFIT}.silence_s=5"],
        ["async_rl.sampler.max_lookahead_versions=1", "loss_fn.use_importance_sampling_correction=true"],
        ["env.mine={kind: function, target: 'm:f'}", "data.env_name=mine", f"data.train={REASONING_GYM}"],
    ],
)
def test_what_goes_together_is_accepted(overrides: list[str]) -> None:
    config = _config(overrides)
    assert list(find_conflicts(config)) == []
    check_config(config)


def test_the_message_says_where_each_key_was_written() -> None:
    with pytest.raises(
        ConfigError, match=r"train_global_batch_size at command line.*num_prompts_per_step at .*smollm2_cpu.yaml:\d+"
    ):
        load_config(DEFAULT, ["policy.train_global_batch_size=48", "loss_fn.force_on_policy_ratio=false"])


def test_all_conflicts_are_listed_at_once() -> None:
    with pytest.raises(ConfigError, match="2 conflicts in the configuration:\n  .*\n  "):
        load_config(DEFAULT, ["data.env_name=x", "policy.scheduler.decay_steps=5"])
