"""What the settings do that say how a run is carried out: rows of `tests/unit/configs`."""

from tests.support.knob_probes import computed
from tests.support.knob_probes_run import crowded, joined, replaced, requested, started
from tests.support.knob_probes_whole import asked, logged, ran, stopped
from tests.support.knobs import Elsewhere, Flip, Refused

BOOL = ("false", "true")
UNIT, INTEGRATION = "tests/unit", "tests/integration"
ONE_STEP = ("grpo.max_num_steps=1",)
UNSAVED = (*ONE_STEP, "checkpointing.enabled=false")
OVER_RAY = ("cluster.kind=ray", "policy.logprob_impl=torch")
SAMPLED = ("eval.temperature=1.0",)
REWARD = "tests.support.tiny_rewards:always_right"
KEPT = ("grpo.seed=3", "grpo.max_num_steps=4", "checkpointing.save_period=1", "checkpointing.keep_top_k=1")
FAILURE = "async_rl.rollout_failure"

_CLUSTER = [
    Elsewhere(f"{UNIT}/cluster/test_virtual_cluster.py", "test_the_local_kind_is_built", ("ClusterConfig.kind",)),
    Elsewhere(
        f"{INTEGRATION}/cluster/test_ray_join.py",
        "test_workers_get_gpus_of_their_own_and_leaving_does_not_end_the_cluster",
        ("ClusterConfig.address",),
    ),
    Elsewhere(
        f"{INTEGRATION}/cluster/test_ray_cluster.py",
        "test_more_gpus_or_nodes_than_there_are_are_refused_before_ray_starts",
        ("ClusterConfig.num_nodes",),
    ),
    Flip("cluster.gpus_per_node", ("0", "2"), started, OVER_RAY),
    Elsewhere(
        f"{UNIT}/cluster/test_local.py",
        "test_a_hanging_constructor_meets_the_start_deadline",
        ("ClusterConfig.start_timeout_s",),
    ),
    Flip("cluster.object_store_mib", ("256", "100"), joined, OVER_RAY),
    Flip("cluster.call_timeout_s", ("1800.0", "2000.0"), started),
    Flip("cluster.threads.policy", ("1", "2", "null"), started),
    Flip("cluster.threads.generation", ("1", "2", "null"), started),
]

_ROLLOUTS = [
    Flip("async_rl.max_inflight_prompts", ("32", "2"), crowded),
    Refused("async_rl.max_buffered_rollouts", "1", "async_rl.max_buffered_rollouts >= 2"),
    Elsewhere(
        f"{UNIT}/rollout/test_retry.py",
        "test_infrastructure_pauses_double_up_to_a_bound_and_then_the_group_is_dropped",
        (
            "RolloutFailureConfig.max_infra_attempts_per_prompt",
            "RolloutFailureConfig.backoff_base_s",
            "RolloutFailureConfig.max_backoff_s",
        ),
    ),
    Elsewhere(
        f"{UNIT}/rollout/test_retry.py",
        "test_data_errors_are_retried_at_once_and_rarely",
        ("RolloutFailureConfig.max_data_attempts_per_prompt",),
    ),
    Flip(f"{FAILURE}.max_replacement_attempts", ("1", "0", "3"), replaced),
    Elsewhere(
        f"{UNIT}/trainer/test_logprob_gap.py",
        "test_the_limit_follows_the_precision_unless_it_is_given",
        ("PolicyConfig.max_logprob_gap",),
    ),
    Elsewhere(
        f"{UNIT}/controller/test_controller.py",
        "test_a_scorer_that_scores_nothing_ends_the_run_after_a_few_steps",
        ("RolloutFailureConfig.max_unscored_steps",),
    ),
    Elsewhere(
        f"{UNIT}/rollout/test_runner.py",
        "test_a_hanging_generator_and_a_hanging_environment_meet_their_deadlines",
        ("NativeRolloutConfig.generation_timeout_s", "NativeRolloutConfig.env_timeout_s"),
    ),
    Elsewhere(
        f"{UNIT}/controller/test_watchdog.py",
        "test_a_stall_names_what_is_awaited",
        ("StallWatchdogConfig.interval_s", "StallWatchdogConfig.stall_timeout_s"),
    ),
    Elsewhere(
        f"{UNIT}/controller/test_watchdog.py",
        "test_warn_says_it_once_and_goes_on",
        ("StallWatchdogConfig.stall_action",),
    ),
]

_TRAINER = [
    Elsewhere(
        f"{UNIT}/trainer/test_policy.py",
        "test_the_native_operator_trains_like_plain_torch",
        ("PolicyConfig.logprob_impl",),
    ),
    Flip("policy.skip_zero_advantages", BOOL, computed),
]

_EVAL = [
    Elsewhere(
        f"{INTEGRATION}/test_tandem_eval.py",
        "test_an_evaluation_counts_exactly_and_its_numbers_follow_from_its_samples",
        ("EvalConfig.num_generations", "EvalConfig.k", "EvalConfig.correct_reward"),
    ),
    Flip("eval.temperature", ("0.0", "0.7"), requested),
    Flip("eval.top_p", ("1.0", "0.9"), requested, SAMPLED),
    Flip("eval.top_k", ("null", "5"), requested, SAMPLED),
    Flip("eval.max_new_tokens", ("null", "3"), requested),
    Flip("eval.seed", ("42", "7"), requested),
    Flip("eval.max_samples", ("null", "2"), asked),
    Flip("eval.task_key", ("task", "gold"), asked, ("data.validation.path=$W/rows.jsonl",)),
    Flip(
        "eval.tasks.one.env_name",
        ("reward", "spare"),
        asked,
        (
            "eval.tasks={one: {dataset: {kind: jsonl, path: $W/rows.jsonl}, env_name: null}}",
            f"env.spare={{kind: function, target: '{REWARD}'}}",
        ),
    ),
]

_LOGGER = [
    Elsewhere(
        f"{UNIT}/controller/test_run_folder.py",
        "test_a_place_that_cannot_be_written_is_an_error_of_the_configuration",
        ("LoggerConfig.log_dir",),
    ),
    Flip("logger.tensorboard_enabled", BOOL, ran, UNSAVED),
    Flip("logger.log_rollouts", BOOL, ran, UNSAVED),
    Flip("logger.wandb_enabled", BOOL, logged),
    Flip("logger.wandb.project", ("tandem", "other"), logged, ("logger.wandb_enabled=true",)),
    Flip("logger.wandb.name", ("null", "mine"), logged, ("logger.wandb_enabled=true",)),
    Flip("logger.wandb.mode", ("online", "offline"), logged, ("logger.wandb_enabled=true",)),
    Flip("logger.mlflow_enabled", BOOL, logged),
    Flip("logger.mlflow.experiment_name", ("tandem", "other"), logged, ("logger.mlflow_enabled=true",)),
    Flip("logger.mlflow.run_name", ("null", "mine"), logged, ("logger.mlflow_enabled=true",)),
    Flip("logger.mlflow.tracking_uri", ("null", "file:/tmp/x"), logged, ("logger.mlflow_enabled=true",)),
    Elsewhere(
        f"{UNIT}/telemetry/test_console.py",
        "test_a_step_is_one_plain_line_when_output_is_no_terminal",
        ("LoggerConfig.console",),
    ),
]

_CHECKPOINTS = [
    Flip("checkpointing.enabled", BOOL, ran, ONE_STEP),
    Flip("checkpointing.save_period", ("1", "2"), ran, ("grpo.max_num_steps=3",)),
    Flip("checkpointing.keep_top_k", ("null", "0"), ran, ("grpo.max_num_steps=2", "checkpointing.save_period=1")),
    Flip("checkpointing.metric_name", ("null", "train:reward"), ran, KEPT),
    Flip("checkpointing.higher_is_better", BOOL, ran, (*KEPT, "checkpointing.metric_name=train:reward")),
    Flip("checkpointing.save_optimizer", BOOL, ran, ONE_STEP),
    Flip("checkpointing.export_hf", BOOL, ran, ONE_STEP),
    Flip("checkpointing.stop_timeout_s", ("600.0", "30.0"), stopped),
]

_FREE = [
    Elsewhere(f"{UNIT}/core/test_config_file.py", "test_own_keys_under_extras_are_free", ("MasterConfig.extras",)),
]

OPERATION_ROWS: list[Flip | Refused | Elsewhere] = [
    *_CLUSTER,
    *_ROLLOUTS,
    *_TRAINER,
    *_EVAL,
    *_LOGGER,
    *_CHECKPOINTS,
    *_FREE,
]
