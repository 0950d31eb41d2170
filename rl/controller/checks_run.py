"""Cross-section checks of data, environments, validation, checkpoints and machines. See `rl.controller.checks`."""

import re
from collections.abc import Iterator
from difflib import get_close_matches

from rl.controller.config import MasterConfig
from rl.controller.conflicts import Check, Conflict, inert
from rl.controller.run_sampler import run_sampler
from rl.controller.scored_datasets import scored_datasets
from rl.core.metric_registry import find_spec, metric_groups
from rl.data.config import ReasoningGymDataset
from rl.environments.config import FunctionEnvConfig, ReasoningGymEnvConfig
from rl.generation.config import VllmGenerationConfig

_TRAIN = "train/"
_REFIT = "policy.generation.refit_cfg"
_COLOCATED = "policy.generation.colocated"
_METRIC_NAME = re.compile(r"(val|train):[^\s:]+")
# Names of validation metrics; beside them env/<the environment's own>.
VALIDATION_METRICS = (
    "accuracy",
    "num_samples",
    "num_failed",
    "pass_at_k",
    "avg_length",
    "truncation_rate",
    "num_dropped_prompts",
    "num_skipped_prompts",
    "num_faulty_prompts",
)


def _validation_switches(config: MasterConfig) -> list[tuple[str, bool | int]]:
    """Return the settings that turn validation on, with their values."""
    grpo = config.grpo
    switches = {"val_period": grpo.val_period, "val_at_start": grpo.val_at_start, "val_at_end": grpo.val_at_end}
    return [(f"grpo.{name}", value) for name, value in switches.items() if value]


def backoff_is_ordered(config: MasterConfig) -> Iterator[Conflict]:
    """The longest pause is no shorter than the first."""
    failure = config.async_rl.rollout_failure
    if failure.max_backoff_s < failure.backoff_base_s:
        keys = ("async_rl.rollout_failure.max_backoff_s", "async_rl.rollout_failure.backoff_base_s")
        problem = f"{keys[0]}={failure.max_backoff_s} is below {keys[1]}={failure.backoff_base_s}"
        yield Conflict(keys, problem, f"set {keys[0]} to at least {failure.backoff_base_s}")


def watchdog_looks_in_time(config: MasterConfig) -> Iterator[Conflict]:
    """A stall is noticed at a look."""
    watchdog = config.async_rl.stall_watchdog
    if watchdog.interval_s > watchdog.stall_timeout_s:
        keys = ("async_rl.stall_watchdog.interval_s", "async_rl.stall_watchdog.stall_timeout_s")
        problem = f"{keys[0]}={watchdog.interval_s} is longer than {keys[1]}={watchdog.stall_timeout_s}"
        yield Conflict(keys, problem, f"lower {keys[0]}")


def validation_has_prompts(config: MasterConfig) -> Iterator[Conflict]:
    """Validation needs held-out prompts."""
    switches = _validation_switches(config)
    if switches and config.data.validation is None:
        names = [name for name, _ in switches]
        shown = ", ".join(f"{name}={str(value).lower()}" for name, value in switches)
        fix = "set data.validation.kind and its keys, or turn validation off: "
        off = [f"{name}={'0' if name.endswith('period') else 'false'}" for name in names]
        if _keeps_by_validation(config):
            off.append("checkpointing.metric_name=null")
        yield Conflict(("data.validation", *names), f"{shown} needs data.validation, got null", fix + " ".join(off))


def greedy_validation_samples_once(config: MasterConfig) -> Iterator[Conflict]:
    """Greedy samples of one prompt are all the same, and greedy decoding has no nucleus."""
    grpo, key = config.grpo, "grpo.val_temperature"
    if grpo.val_temperature == 0:
        names = ["val_num_generations", "val_top_p", "val_top_k"]
        yield from inert(grpo, "grpo", names, key, f"{key}=0 is greedy; set it above 0 to sample")
    elif grpo.val_num_generations > 1 and grpo.val_top_k == 1:
        keys = ("grpo.val_num_generations", "grpo.val_top_k")
        problem = f"{keys[0]}={grpo.val_num_generations} with {keys[1]}=1 repeats one greedy sample"
        yield Conflict(keys, problem, f"raise {keys[1]}, or set {keys[0]}=1")


def metric_name_has_a_prefix(config: MasterConfig) -> Iterator[Conflict]:
    """The metric by which checkpoints are kept is a validation or a training metric."""
    name, key = config.checkpointing.metric_name, "checkpointing.metric_name"
    if name is not None and not _METRIC_NAME.fullmatch(name):
        yield Conflict(
            (key,),
            f"{key}={name} is not of the form val:<name> or train:<name>",
            f"set {key}=val:accuracy or {key}=null",
        )


def metric_name_is_known(config: MasterConfig) -> Iterator[Conflict]:
    """All names are known before the run, but for those that an environment adds."""
    name, key = config.checkpointing.metric_name or "", "checkpointing.metric_name"
    kind, _, metric = name.partition(":")
    if not metric or metric.startswith("env/") or not config.checkpointing.enabled:
        return
    if kind == "train" and find_spec(_TRAIN + metric) is None and find_spec(metric) is None:
        names = [spec.name.removeprefix(_TRAIN) for _, specs in metric_groups() for spec in specs]
        close = get_close_matches(metric, names, n=1)
        problem = f"{key}={name} is not among the training metrics of docs/metrics.md"
        yield Conflict((key,), problem, f"set {key}=train:{close[0] if close else 'reward'}")
    if kind != "val":
        return
    known = [each for each in VALIDATION_METRICS if each != "pass_at_k" or config.grpo.val_num_generations > 1]
    if metric not in known:
        close = get_close_matches(metric, known, n=1)
        more = " (pass_at_k needs grpo.val_num_generations > 1)" if metric == "pass_at_k" else ""
        problem = f"{key}={name} is not among the validation metrics {', '.join(known)}, env/<name>{more}"
        yield Conflict((key,), problem, f"set {key}=val:{close[0] if close else 'accuracy'}")


def _keeps_by_validation(config: MasterConfig) -> bool:
    saving = config.checkpointing
    return saving.enabled and saving.keep_top_k is not None and (saving.metric_name or "").startswith("val:")


def best_checkpoint_has_a_metric(config: MasterConfig) -> Iterator[Conflict]:
    """Keeping the best by a validation metric needs validation."""
    saving, key = config.checkpointing, "checkpointing.metric_name"
    if _keeps_by_validation(config) and not _validation_switches(config):
        pair = f"{key}={saving.metric_name} with checkpointing.keep_top_k={saving.keep_top_k}"
        problem = f"{pair} needs validation, but grpo.val_period=0"
        fix = f"set {key}=null (keep the newest) or {key}=train:reward, or grpo.val_period=10"
        yield Conflict((key, "checkpointing.keep_top_k", "grpo.val_period"), problem, fix)


def environment_exists(config: MasterConfig) -> Iterator[Conflict]:
    """The prompts' environment is one of `env`."""
    name = config.data.env_name
    if name not in config.env:
        problem = f"data.env_name={name} is not among the environments of env: {', '.join(config.env) or 'none'}"
        yield Conflict(("data.env_name", "env"), problem, f"add env.{name}.kind, or change data.env_name")


def reasoning_gym_scores_its_own(config: MasterConfig) -> Iterator[Conflict]:
    """reasoning-gym's prompts and scorer go together; a function of the user's may score anything."""
    for each in scored_datasets(config):
        key, dataset, env_key, env = each.key, each.dataset, f"{each.env_key}.kind", each.env
        is_task, is_scorer = isinstance(dataset, ReasoningGymDataset), isinstance(env, ReasoningGymEnvConfig)
        if is_task != is_scorer and not isinstance(env, FunctionEnvConfig):
            problem = f"{key}.kind={dataset.kind} with {env_key}={env.kind}: reasoning_gym scores its own prompts only"
            yield Conflict((f"{key}.kind", env_key), problem, f"set {env_key}={'reasoning_gym' if is_task else 'math'}")


def raw_prompts_have_no_template(config: MasterConfig) -> Iterator[Conflict]:
    """Without the chat template its settings mean nothing."""
    if config.data.prompt_format == "raw":
        reason = "data.prompt_format=raw uses no chat template"
        names = ["system_prompt", "rewritten_history"]
        yield from inert(config.data, "data", names, "data.prompt_format", reason)
        yield from inert(config.policy.tokenizer, "policy.tokenizer", ["chat_template"], "data.prompt_format", reason)


def one_turn_has_no_history(config: MasterConfig) -> Iterator[Conflict]:
    """A template can rewrite the history of several turns only."""
    if config.grpo.max_rollout_turns == 1 and config.data.prompt_format == "chat":
        key = "grpo.max_rollout_turns"
        yield from inert(config.data, "data", ["rewritten_history"], key, f"{key}=1 leaves no history")


def local_cluster_is_one_process(config: MasterConfig) -> Iterator[Conflict]:
    """`local` runs all workers as threads of this process, on its CPUs."""
    cluster, key = config.cluster, "cluster.kind"
    if cluster.kind != "local":
        return
    names = ["address", "num_nodes", "gpus_per_node", "object_store_mib"]
    yield from inert(cluster, "cluster", names, key, f"{key}=local runs everything in this process, on the CPU")
    if isinstance(config.policy.generation, VllmGenerationConfig):
        backend = "policy.generation.backend"
        problem = f"{key}=local with {backend}=vllm: vLLM needs a process of its own"
        yield Conflict((key, backend), problem, f"set {backend}=hf or {key}=ray")


def joined_cluster_has_its_own_store(config: MasterConfig) -> Iterator[Conflict]:
    """A cluster that runs already has its object store."""
    if config.cluster.address is not None:
        reason = f"cluster.address={config.cluster.address} joins a cluster that has its own"
        yield from inert(config.cluster, "cluster", ["object_store_mib"], "cluster.address", reason)


def gpus_suffice(config: MasterConfig) -> Iterator[Conflict]:
    """Trainer and generators have GPUs of their own."""
    cluster, generation = config.cluster, config.policy.generation
    total = cluster.num_nodes * cluster.gpus_per_node
    ranks = generation.vllm_cfg.tensor_parallel_size if isinstance(generation, VllmGenerationConfig) else 1
    needed = config.policy.num_workers + generation.num_replicas * ranks
    if cluster.kind == "ray" and 0 < total < needed:
        keys = ("cluster.gpus_per_node", "policy.num_workers", "policy.generation.num_replicas")
        sizes = f"{keys[1]}={config.policy.num_workers} + {keys[2]}={generation.num_replicas} x {ranks} ranks"
        problem = (
            f"{keys[0]}={cluster.gpus_per_node} on {cluster.num_nodes} nodes is {total} GPUs, but {sizes} need {needed}"
        )
        yield Conflict(keys, problem, f"raise {keys[0]}, or 0 for a CPU run")


def taking_turns_leaves_no_lookahead(config: MasterConfig) -> Iterator[Conflict]:
    """Engines that sleep while the model trains cannot run ahead of it."""
    if not config.policy.generation.colocated or run_sampler(config).max_staleness == 0:
        return
    lookahead = ("async_rl.sampler.max_lookahead_versions", config.async_rl.sampler.max_lookahead_versions, 0)
    ahead, value, off = lookahead if lookahead[1] else ("grpo.batch_multiplier", config.grpo.batch_multiplier, 1)
    problem = f"{_COLOCATED}=true lets nothing be generated while the model trains, but {ahead}={value} generates then"
    yield Conflict((_COLOCATED, ahead), problem, f"set {ahead}={off}, or {_COLOCATED}=false")


def taking_turns_needs_placement(config: MasterConfig) -> Iterator[Conflict]:
    """Each worker group has whole GPUs of its own, and NCCL takes no two ranks on one."""
    gpus = config.cluster.gpus_per_node
    if config.policy.generation.colocated and config.cluster.kind == "ray" and gpus > 0:
        keys = (_COLOCATED, "cluster.gpus_per_node")
        problem = f"{keys[0]}=true with {keys[1]}={gpus}: trainer and engines cannot be placed on the same GPUs yet"
        yield Conflict(keys, problem, f"set {keys[0]}=false, and {keys[1]} to as many as both need")


def shared_memory_is_on_one_host(config: MasterConfig) -> Iterator[Conflict]:
    """POSIX shared memory does not reach another node, nor a server on one."""
    refit, nodes = config.policy.generation.refit_cfg, config.cluster.num_nodes
    keys = (f"{_REFIT}.transport", "cluster.num_nodes", f"{_REFIT}.servers")
    if refit.transport == "shm" and nodes > 1:
        problem = f"{keys[0]}=shm works on one host, but {keys[1]}={nodes}"
        yield Conflict(keys[:2], problem, f"set {keys[0]}=auto, or {keys[1]}=1")
    if refit.transport == "shm" and refit.remote_servers:
        problem = f"{keys[0]}=shm works on one host, but {keys[2]} has {refit.remote_servers[0]}"
        yield Conflict((keys[0], keys[2]), problem, f"set {keys[0]}=auto")


def addresses_are_for_tcp(config: MasterConfig) -> Iterator[Conflict]:
    """Shared memory and NCCL have no addresses; a loopback's is no use to another host."""
    refit, cluster = config.policy.generation.refit_cfg, config.cluster
    transport = refit.transport_for(on_gpus=cluster.gpus_per_node > 0, num_hosts=cluster.num_nodes)
    key, host_key = f"{_REFIT}.transport", f"{_REFIT}.host"
    if transport != "tcp":
        source = f"{refit.transport} is {transport} here" if refit.transport == "auto" else f"{refit.transport}"
        yield from inert(refit, _REFIT, ["host", "silence_s"], key, f"{key}={source}, and only tcp uses it")
    elif refit.host_is_local and (cluster.num_nodes > 1 or refit.remote_servers):
        others = f"{_REFIT}.servers" if refit.remote_servers else "cluster.num_nodes"
        value = refit.remote_servers[0] if refit.remote_servers else cluster.num_nodes
        problem = f"{host_key}={refit.host} reaches no other host, but {others}={value}"
        yield Conflict((host_key, others), problem, f"set {host_key}=null, or to the address on their network")


def nccl_needs_gpus(config: MasterConfig) -> Iterator[Conflict]:
    """NCCL moves memory of GPUs."""
    refit, gpus = config.policy.generation.refit_cfg, config.cluster.gpus_per_node
    if refit.transport == "nccl" and gpus == 0:
        keys = (f"{_REFIT}.transport", "cluster.gpus_per_node")
        yield Conflict(keys, f"{keys[0]}=nccl needs GPUs, but {keys[1]}=0", f"set {keys[0]}=auto")


def enough_replicas_are_started(config: MasterConfig) -> Iterator[Conflict]:
    """A fleet cannot be smaller than what must be left of it."""
    generation = config.policy.generation
    if generation.refit_cfg.min_replicas > generation.num_replicas:
        keys = (f"{_REFIT}.min_replicas", "policy.generation.num_replicas")
        problem = f"{keys[0]}={generation.refit_cfg.min_replicas} exceeds {keys[1]}={generation.num_replicas}"
        yield Conflict(keys, problem, f"lower {keys[0]} to {generation.num_replicas}")


def caches_are_kept_only_where_there_are_any(config: MasterConfig) -> Iterator[Conflict]:
    """Only requests that a refit freezes have keys and values that could be recomputed."""
    generation, name = config.policy.generation, "recompute_kv_cache_after_weight_updates"
    if generation.refit_cfg.pause_mode != "keep":
        reason = f"pause_mode={generation.refit_cfg.pause_mode} leaves no request under way"
        yield from inert(generation.refit_cfg, _REFIT, [name], f"{_REFIT}.pause_mode", reason)
    elif not isinstance(generation, VllmGenerationConfig) and not generation.refit_cfg.servers:
        reason = f"backend {generation.backend} keeps no cache"
        yield from inert(generation.refit_cfg, _REFIT, [name], "policy.generation.backend", reason)


def engine_memory_matches_the_device(config: MasterConfig) -> Iterator[Conflict]:
    """The KV cache is a size on a CPU, and what is left of a share on a GPU."""
    generation, prefix = config.policy.generation, "policy.generation.vllm_cfg"
    if isinstance(generation, VllmGenerationConfig):
        gpus = config.cluster.gpus_per_node
        name = "kv_cache_gib" if gpus else "gpu_memory_utilization"
        reason = f"with cluster.gpus_per_node={gpus} the engine runs on {'GPUs' if gpus else 'the CPU'}"
        yield from inert(generation.vllm_cfg, prefix, [name], "cluster.gpus_per_node", reason)


RUN_CHECKS: list[Check] = [
    backoff_is_ordered,
    watchdog_looks_in_time,
    validation_has_prompts,
    greedy_validation_samples_once,
    metric_name_has_a_prefix,
    metric_name_is_known,
    best_checkpoint_has_a_metric,
    environment_exists,
    reasoning_gym_scores_its_own,
    raw_prompts_have_no_template,
    one_turn_has_no_history,
    local_cluster_is_one_process,
    joined_cluster_has_its_own_store,
    gpus_suffice,
    taking_turns_leaves_no_lookahead,
    taking_turns_needs_placement,
    shared_memory_is_on_one_host,
    addresses_are_for_tcp,
    nccl_needs_gpus,
    enough_replicas_are_started,
    caches_are_kept_only_where_there_are_any,
    engine_memory_matches_the_device,
]
