"""What the settings of `data`, `env`, `policy.generation` and `async_rl.sampler` do: rows of `tests/unit/configs`."""

from tests.support.knob_probes_run import (
    admitted,
    classified,
    pooled,
    prompted,
    requested,
    scored,
    started,
)
from tests.support.knob_probes_whole import checked, confined, engine_built, refitted, shared
from tests.support.knobs import Elsewhere, Flip, Refused

BOOL = ("false", "true")
ROLES = ("tool", "user")
CHAT = ("data.prompt_format=chat",)
ROWS = "{_override_: true, kind: jsonl, path: $W/rows.jsonl}"
REWARDS = "tests.support.tiny_rewards"
SCORING = "tests.support.reward_functions"


def dataset(kind: str, more: str = "") -> tuple[str, ...]:
    """Prompts of this kind, and an environment that takes any."""
    return (f"data.train={{_override_: true, kind: {kind}{more}}}", "policy.max_total_sequence_length=400")


def environment(kind: str, more: str = "", *beside: str) -> tuple[str, ...]:
    """The environment of the prompts, and no validation."""
    return ("data.env_name=e", f"env.e={{kind: {kind}{more}}}", "data.validation=null", *beside)


TURNS = "grpo.max_rollout_turns=3"
JSONL = ("data.train.path=$W/rows.jsonl",)
SAVED = dataset("hf", ", path: $W/saved")
GYM = dataset("reasoning_gym", ", task: leg_counting, size: 5")
PUZZLE = dataset("sliding_puzzle", ", size: 8")
PRODUCTS = dataset("calculator_products", ", size: 20")
GYM_ENV = (*GYM, *environment("reasoning_gym"))
MATH = environment("math")
TOOLS = environment("tools", ", tools: {calculator: {kind: calculator}}", TURNS)
CODE = environment("code")
RETRIED = environment("code", ", max_attempts: 2", TURNS)
TAGGED = environment("code", ", reward: share, open_tag: '[code]', close_tag: '[/code]'")
PLAYED = (*PUZZLE, *environment("sliding_puzzle", "", TURNS))
CLASSIFIED = environment("reward_model", ", model_name: $W/classifier")
MULTI = environment("math_multi_reward")
FUNCTION = environment("function", f", target: {SCORING}:ones")
PARTS = f"{{a: {SCORING}:ones, b: {SCORING}:zeros}}"
SHARES = f"{{a: {SCORING}:zeros, b: {SCORING}:ones}}"

_DATA = [
    Flip(
        "data.train",
        (
            ROWS,
            "{_override_: true, kind: hf, path: $W/saved}",
            "{_override_: true, kind: reasoning_gym, task: leg_counting, size: 5}",
            "{_override_: true, kind: few_shot_addition}",
            "{_override_: true, kind: calculator_products}",
            "{_override_: true, kind: sliding_puzzle}",
        ),
        prompted,
        ("policy.max_total_sequence_length=400",),
    ),
    Flip(
        "data.env_name", ("reward", "spare"), prompted, (f"env.spare={{kind: function, target: '{REWARDS}:raises'}}",)
    ),
    Flip("data.prompt_format", ("raw", "chat"), prompted),
    Flip("data.system_prompt", ("null", "Be brief."), prompted, (*CHAT, "policy.max_total_sequence_length=64")),
    Flip("data.shuffle", BOOL, prompted, JSONL),
    Flip("data.max_input_seq_length", ("null", "3"), prompted, JSONL),
    Flip("data.overlong_prompts", ("skip", "error"), prompted, (*JSONL, "data.max_input_seq_length=3")),
    Elsewhere(
        "tests/integration/test_multi_turn_run.py",
        "test_a_template_that_rewrites_history_forks_where_that_is_asked_for",
        ("DataConfig.rewritten_history",),
    ),
    Flip("data.train.path", ("$W/train.jsonl", "$W/rows.jsonl"), prompted),
    Flip("data.train.prompt_key", ("prompt", "question"), prompted, JSONL),
    Flip("data.train.answer_key", ("answer", "gold", "null"), prompted, JSONL),
    Flip("data.train.path", ("$W/short", "$W/saved"), prompted, SAVED),
    Flip("data.train.split", ("train", "test"), prompted, SAVED),
    Flip("data.train.prompt_key", ("prompt", "question"), prompted, SAVED),
    Flip("data.train.answer_key", ("answer", "gold", "null"), prompted, SAVED),
    Flip("data.train.task", ("leg_counting", "chain_sum"), prompted, GYM),
    Flip("data.train.size", ("5", "6"), prompted, GYM),
    Flip("data.train.seed", ("0", "1"), prompted, GYM),
    Flip("data.train.kwargs", ("{}", "{max_animals: 10, min_animals: 9}"), prompted, GYM),
    Flip("data.train.part", ("train", "heldout"), prompted, dataset("few_shot_addition")),
    Flip("data.train.part", ("train", "heldout"), prompted, PRODUCTS),
    Flip("data.train.size", ("20", "21"), prompted, PRODUCTS),
    Flip("data.train.seed", ("0", "1"), prompted, PRODUCTS),
    *[
        Flip(f"data.train.{name}", values, prompted, PUZZLE)
        for name, values in {
            "rows": ("3", "2"),
            "columns": ("3", "2"),
            "shuffle_moves": ("4", "9"),
            "size": ("8", "9"),
            "seed": ("0", "1"),
        }.items()
    ],
]

_ENVIRONMENTS = [
    Flip(
        "env.e",
        (
            "{kind: math}",
            "{kind: math_multi_reward}",
            f"{{kind: function, target: '{SCORING}:ones'}}",
            ("{kind: tools, tools: {calculator: {kind: calculator}}}", TURNS),
            ("{kind: sliding_puzzle}", TURNS, *PUZZLE),
            "{kind: code}",
            "{kind: reward_model, model_name: $W/classifier}",
            ("{kind: reasoning_gym}", *GYM),
        ),
        scored,
        ("data.env_name=e", "data.validation=null"),
    ),
    *[Flip("env.e.think_tags", BOOL, scored, base) for base in (MATH, MULTI, FUNCTION, GYM_ENV, CODE, CLASSIFIED)],
    *[
        Flip("env.e.num_workers", ("1", "2"), pooled, base)
        for base in (MATH, FUNCTION, GYM_ENV, CODE, TOOLS, CLASSIFIED)
    ],
    *[
        Flip("env.e.timeout_s", ("20.0", "30.0"), pooled, base)
        for base in (MATH, FUNCTION, GYM_ENV, CODE, TOOLS, CLASSIFIED)
    ],
    Flip("env.e.literal_answer", BOOL, scored, MATH),
    Flip("env.e.answer_form", ("tags", "line"), scored, MULTI),
    Flip("env.e.weights", ("{}", "{correctness: 2.0}"), scored, MULTI),
    Flip("env.e.target", (f"{SCORING}:ones", f"{SCORING}:zeros"), scored, FUNCTION),
    Flip("env.e.targets", (PARTS, SHARES), scored, environment("function", f", targets: {PARTS}")),
    Flip("env.e.weights", ("{}", "{a: 2.0, b: 1.0}"), scored, environment("function", f", targets: {PARTS}")),
    Flip("env.e.max_moves", ("3", "2"), scored, PLAYED),
    Flip("env.e.answer_role", ROLES, scored, PLAYED),
    Flip("env.e.answer_prefix", ("''", "'A:'"), scored, TOOLS),
    Flip("env.e.max_tool_calls", ("4", "1"), scored, TOOLS),
    Flip("env.e.call_open", ("<tool_call>", "'[call]'"), scored, TOOLS),
    Flip("env.e.call_close", ("</tool_call>", "'[/call]'"), scored, TOOLS),
    Flip("env.e.result_role", ROLES, scored, TOOLS),
    Flip("env.e.result_template", ("'{result}'", "'= {result}'"), scored, TOOLS),
    Flip("env.e.max_result_chars", ("1000", "20"), scored, TOOLS),
    Flip(
        "env.e.tools.calculator",
        (
            "{_override_: true, kind: calculator}",
            "{_override_: true, kind: python}",
            "{_override_: true, kind: function, target: 'tests.support.tools:anything'}",
        ),
        scored,
        (*TOOLS, "env.e.timeout_s=20"),
    ),
    Flip(
        "env.e.tools.calculator.target",
        ("tests.support.tools:anything", "tests.support.tools:speaks_long"),
        scored,
        environment("tools", ", tools: {calculator: {kind: function, target: 'a:b'}}", TURNS),
    ),
    Flip("env.e.reward", ("all", "share"), scored, CODE),
    Flip("env.e", ("{kind: code}", "{open_tag: '[code]', close_tag: '[/code]'}"), scored, CODE, field="open_tag"),
    Flip("env.e.close_tag", ("'[/code]'", "')[/code]'"), scored, TAGGED),
    Flip("env.e.max_attempts", ("2", "3"), scored, RETRIED),
    Flip("env.e.feedback_role", ROLES, scored, RETRIED),
    Flip("env.e.max_feedback_chars", ("1000", "10"), scored, RETRIED),
    Flip("env.e.model_name", ("$W/classifier", "$W/judge"), classified, CLASSIFIED),
    Flip("env.e.trust_remote_code", BOOL, classified, environment("reward_model", ", model_name: $W/coded")),
    Flip("env.e.precision", ("float32", "bfloat16", "float16"), classified, CLASSIFIED),
    Elsewhere(
        "tests/unit/environments/test_reward_model.py",
        "test_scores_are_those_of_a_plain_forward_whatever_the_padding",
        ("RewardModelEnvConfig.micro_batch_size",),
    ),
    Elsewhere(
        "tests/unit/environments/test_machine_checks.py",
        "test_a_gpu_that_is_not_there_is_reported",
        ("RewardModelEnvConfig.device",),
    ),
    Elsewhere(
        "tests/unit/environments/test_sandbox.py",
        "test_a_fork_bomb_meets_its_limit",
        ("SandboxLimits.processes",),
    ),
    Elsewhere(
        "tests/unit/environments/test_sandbox.py",
        "test_a_memory_bomb_ends_in_one_process_and_over_several",
        ("SandboxLimits.memory_mib",),
    ),
    Elsewhere(
        "tests/unit/environments/test_sandbox.py",
        "test_an_endless_loop_or_sleep_ends_at_the_deadline",
        ("SandboxLimits.wall_s",),
    ),
    Elsewhere(
        "tests/unit/environments/test_sandbox.py", "test_processor_time_is_bounded_too", ("SandboxLimits.cpu_s",)
    ),
    Elsewhere(
        "tests/unit/environments/test_sandbox.py",
        "test_endless_output_ends_at_its_bound",
        ("SandboxLimits.output_kib",),
    ),
    Elsewhere(
        "tests/unit/environments/test_sandbox.py",
        "test_a_huge_file_and_many_files_meet_their_limits",
        ("SandboxLimits.file_mib", "SandboxLimits.scratch_mib"),
    ),
    Flip("env.e.limits.open_files", ("64", "32"), confined, CODE),
    Flip("env.e.limits.scratch_files", ("1000", "50"), confined, CODE),
]

HF = ("policy.generation={_override_: true, backend: hf, max_new_tokens: 6}", "cluster.kind=ray")
VLLM = ("policy.generation={_override_: true, backend: vllm, max_new_tokens: 6}", "cluster.kind=ray")
GPUS = (*VLLM, "cluster.gpus_per_node=4", "policy.logprob_impl=torch")
ENGINE = "policy.generation.vllm_cfg"
REFIT = "policy.generation.refit_cfg"


def _of_each_backend() -> list[Flip | Refused]:
    rows: list[Flip | Refused] = []
    for base in (HF, VLLM):
        rows += [
            Flip(f"policy.generation.{name}", values, probe, base)
            for name, values, probe in (
                ("max_new_tokens", ("6", "5"), requested),
                ("temperature", ("1.0", "0.7"), requested),
                ("stop_token_ids", ("null", "[3]"), requested),
                ("stop_strings", ("[]", "['x']"), requested),
                ("num_replicas", ("1", "2"), started),
                ("colocated", BOOL, shared),
            )
        ]
        rows += [
            Refused("policy.generation.top_p", "0.9", "training takes 1.0 alone", base),
            Refused("policy.generation.top_k", "5", "training takes null alone", base),
            Refused("policy.generation.temperature", "0.0", "training needs a temperature above 0", base),
        ]
    return rows


_GENERATION = [
    Flip(
        "policy.generation",
        ("{_override_: true, backend: hf}", "{_override_: true, backend: vllm}"),
        requested,
        ("cluster.kind=ray", "policy.max_total_sequence_length=400"),
    ),
    *_of_each_backend(),
    Refused("policy.generation.colocated", "true", "cannot be placed on the same GPUs yet", GPUS),
    Flip("policy.generation.request_timeout_s", ("300.0", "7200.0"), started, HF),
    Flip(f"{REFIT}.transport", ("shm", "tcp"), refitted),
    Refused(f"{REFIT}.transport", "nccl", "nccl needs GPUs, but cluster.gpus_per_node=0"),
    Flip(f"{REFIT}.bucket_mib", ("null", "2.0"), refitted),
    Flip(f"{REFIT}.num_buffers", ("null", "3"), refitted),
    Flip(f"{REFIT}.host", ("null", "10.0.0.7", "'::1'"), refitted, (f"{REFIT}.transport=tcp",)),
    Refused(f"{REFIT}.host", "10.0.0.7", 'host="10.0.0.7" has no effect'),
    Flip(f"{REFIT}.silence_s", ("20.0", "5.0"), refitted, (f"{REFIT}.transport=tcp",)),
    Refused(f"{REFIT}.silence_s", "5.0", "silence_s=5.0 has no effect"),
    Flip(f"{REFIT}.pause_mode", ("drain", "keep", "abort"), refitted),
    Flip(f"{REFIT}.check_every", ("null", "5"), checked),
    Flip(f"{REFIT}.check_tolerance", ("null", "0.5"), checked),
    Refused(f"{REFIT}.min_replicas", "2", "min_replicas=2 exceeds"),
    Flip(
        f"{REFIT}.recompute_kv_cache_after_weight_updates",
        ("true", "false"),
        engine_built,
        (*VLLM, f"{REFIT}.pause_mode=keep"),
    ),
    Elsewhere(
        "tests/unit/controller/test_setup.py",
        "test_servers_that_others_started_are_asked_before_the_first_refit",
        ("RefitConfig.servers",),
    ),
    Refused(f"{REFIT}.recompute_kv_cache_after_weight_updates", "false", "pause_mode=drain leaves no request"),
    Elsewhere(
        "tests/unit/weights/test_config.py",
        "test_the_transport_follows_where_trainer_and_engines_are",
        ("RefitConfig.transport",),
    ),
    Elsewhere(
        "tests/unit/weights/test_sync.py",
        "test_the_only_replica_that_hangs_ends_the_refit_at_the_deadline_and_is_named",
        ("RefitConfig.timeout_s",),
    ),
    Elsewhere(
        "tests/unit/weights/test_sync.py",
        "test_a_replica_that_dies_is_an_error_where_too_few_would_be_left",
        ("RefitConfig.min_replicas",),
    ),
    Flip(f"{ENGINE}.tensor_parallel_size", ("1", "2"), requested, VLLM),
    Flip(f"{ENGINE}.kv_cache_gib", ("1.0", "0.5"), requested, VLLM),
    Flip(f"{ENGINE}.gpu_memory_utilization", ("0.6", "0.5"), requested, GPUS),
    Flip(f"{ENGINE}.block_size", ("16", "32"), requested, VLLM),
    Flip(f"{ENGINE}.enable_prefix_caching", BOOL, requested, VLLM),
    Flip(f"{ENGINE}.enforce_eager", BOOL, requested, VLLM),
    Flip(f"{ENGINE}.max_num_seqs", ("256", "8"), requested, VLLM),
    Flip(f"{ENGINE}.start_timeout_s", ("600.0", "90.0"), requested, VLLM),
    Flip(f"{ENGINE}.request_timeout_s", ("900.0", "7200.0"), started, VLLM),
    Flip(f"{ENGINE}.collect_usage_stats", BOOL, requested, VLLM),
    Flip(f"{ENGINE}.vllm_kwargs", ("{}", "{max_num_batched_tokens: 77}"), requested, VLLM),
    Refused("async_rl.sampler.name", "random", "must be in_order"),
    Flip(
        "async_rl.sampler.max_lookahead_versions",
        ("0", "1", "2"),
        admitted,
        ("loss_fn.use_importance_sampling_correction=true",),
    ),
]

INPUT_ROWS: list[Flip | Refused | Elsewhere] = [*_DATA, *_ENVIRONMENTS, *_GENERATION]
