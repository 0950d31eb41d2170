"""Puts a run together: one line per part, in the order in which they depend on each other.

Cheap checks of the data come before anything heavy starts. What blocks (data sets, downloads, conversions, foreign
imports) runs in threads, so that a signal ends the set-up at once. What is built is closed in reverse order by the exit
stack, also when a later part fails. It runs nothing.
"""

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Protocol, cast

from rl.algorithms.algorithm import Algorithm, Need
from rl.algorithms.assembly import build_algorithm as assemble
from rl.algorithms.config import GDPOConfig
from rl.algorithms.filters import keep_group, keep_group_by_component
from rl.cluster.threads import ThreadPlan, thread_plan
from rl.cluster.virtual_cluster import build_cluster
from rl.cluster.worker_group import Cluster
from rl.controller.activity import Activity
from rl.controller.checkpoint import Checkpointer
from rl.controller.config import MasterConfig
from rl.controller.controller import Controller, ControllerParts
from rl.controller.disk import check_disk
from rl.controller.engine_setup import LoadedModel, generator_request, load_model, start_generator
from rl.controller.phases import Phases
from rl.controller.pump import RolloutPump
from rl.controller.refit_check import CheckParts, CheckSettings, RefitCheck, probe_tokens
from rl.controller.reporter import Reporter
from rl.controller.residency import Dedicated, Residency, Shared
from rl.controller.rollout_factory import RolloutFactory
from rl.controller.run_sampler import run_sampler
from rl.controller.step import StepParts, TrainStep
from rl.controller.stop import StopSignal
from rl.controller.validation import Validator
from rl.core.clock import Clock
from rl.core.concurrency import gather_or_cancel, in_thread
from rl.core.errors import ConfigError, DataError, InfraError, WeightSyncError
from rl.core.imports import import_object
from rl.core.resources import RunResources
from rl.data.columns import Row
from rl.data.datasets import load_rows
from rl.data.prompts import HeldOut, PromptSettings, PromptSource, Skipped
from rl.environments.base import Environment
from rl.environments.registry import build_environments
from rl.generation.generator import Generator
from rl.rollout.buffer import ReplayBuffer
from rl.rollout.refill import Refill
from rl.rollout.sampler import started_groups
from rl.trainer.kernels import require_kernels
from rl.trainer.policy import Policy, PolicyRequest, start_policy
from rl.weights.fleet import Server
from rl.weights.sync import WeightSync


class ConnectsServers(Protocol):
    """The class of the engines that others started."""

    async def connect(self, url: str, call_timeout_s: float, keeps_caches: bool) -> Server:
        """Ask one for its processes."""
        ...


@dataclass(frozen=True)
class RunContext:
    """What a run brings along beside its configuration.

    Attributes:
        resources: Tag, temporary folder and reaper.
        checkpointer: Of the run folder.
        reporter: Of the run.
        phases: Shared with the console.
        stop: Set by the signal handlers.
        clock: Time.
    """

    resources: RunResources
    checkpointer: Checkpointer
    reporter: Reporter
    phases: Phases
    stop: StopSignal
    clock: Clock


async def build_controller(config: MasterConfig, context: RunContext, stack: AsyncExitStack) -> Controller:
    """Build every part of the run.

    Raises:
        ConfigError: the configuration names something that does not exist.
        InfraError: a process did not start.
    """
    await in_thread("native kernels", lambda: check_kernels(config))
    rows, held_out = await in_thread("data", lambda: build_rows(config))
    model = await in_thread("model", lambda: build_model(config, context))
    prompts, validation_prompts = await in_thread("prompts", lambda: build_prompts(config, model, rows, held_out))
    environments = await build_envs(config, stack)
    threads = build_threads(config, context)
    cluster = await build_workers(config, context, stack)
    policy, generator = await build_models(config, cluster, model, threads, context.reporter.note, stack)
    sync = await build_weight_sync(config, policy, generator, context, stack)
    check = build_refit_check(config, CheckParts(policy, generator, sync), prompts, context)
    rollouts = RolloutFactory(config, generator, environments, model.tokenizer, context.clock)
    buffer = build_buffer(config)
    generating, training = Activity(context.clock), Activity(context.clock)
    manager = rollouts.manager("train", rollouts.training_sampling())
    pump = RolloutPump(buffer, prompts, manager, config.grpo.num_generations_per_prompt, generating)
    step_parts = StepParts(
        buffer=buffer,
        groups_per_step=config.grpo.num_prompts_per_step,
        residency=build_residency(config, policy, generator, context.phases, context.clock),
        algorithm=build_algorithm(config),
        models={"policy": policy},
        weight_sync=sync,
        refit_check=check,
        generating=generating,
        training=training,
        logprob_gap_limit=config.policy.logprob_gap_limit,
    )
    parts = ControllerParts(
        policy=policy,
        refit_check=check,
        prompts=prompts,
        buffer=buffer,
        manager=manager,
        movement=rollouts.movement,
        pump=pump,
        step=TrainStep(step_parts, context.phases, context.stop),
        validator=build_validator(config, rollouts, validation_prompts, context),
        checkpointer=context.checkpointer,
        phases=context.phases,
        stop=context.stop,
        reporter=context.reporter,
        call_timeout_s=config.cluster.call_timeout_s,
        max_unscored_steps=config.async_rl.rollout_failure.max_unscored_steps,
    )
    return Controller(parts, config.grpo, config.checkpointing, config.async_rl.stall_watchdog, context.clock)


def check_kernels(config: MasterConfig) -> None:
    """Look for the native kernels that training will use: they must be missed before data and models load.

    Raises:
        ConfigError: the CUDA kernels are missing.
        FatalError: the native operators are missing.
    """
    require_kernels(config.policy.logprob_impl, on_gpu=config.cluster.gpus_per_node > 0)


def build_rows(config: MasterConfig) -> tuple[Sequence[Row], Sequence[Row]]:
    """Load the datasets: faulty data must be seen before a model loads.

    Raises:
        ConfigError: a dataset is missing or faulty; the exit status is that of the dry run then.
    """
    validation = config.data.validation
    try:
        return load_rows(config.data.train), [] if validation is None else load_rows(validation)
    except DataError as error:
        raise ConfigError(str(error)) from error


def build_model(config: MasterConfig, context: RunContext) -> LoadedModel:
    """Find and check the model and its tokenizer, and the disk that its checkpoints need.

    Raises:
        ConfigError: there is no such model, it is damaged, or it does not suit the configuration; or the disk is full.
    """
    model = load_model(config, context.reporter.note)
    check_disk(config, model.path, context.checkpointer.folder)
    return model


def build_prompts(
    config: MasterConfig, model: LoadedModel, rows: Sequence[Row], held_out: Sequence[Row]
) -> tuple[PromptSource, HeldOut]:
    """The endless stream of training prompts, and the fixed list of validation prompts.

    Raises:
        ConfigError: one of the two has no usable prompt.
    """
    source = PromptSource(rows, model.tokenizer, prompt_settings(config, shuffle=config.data.shuffle))
    try:
        source.held_out(1)  # found out now rather than by the first step
        if not held_out:
            return source, HeldOut([], Skipped())
        validation = PromptSource(held_out, model.tokenizer, prompt_settings(config, shuffle=False))
        return source, validation.held_out(config.grpo.max_val_samples)
    except DataError as error:
        raise ConfigError(str(error)) from error


def prompt_settings(config: MasterConfig, shuffle: bool) -> PromptSettings:
    """A prompt may take what the context leaves beside the longest completion, or data.max_input_seq_length."""
    room = config.policy.max_total_sequence_length - config.policy.generation.max_new_tokens
    limit = config.data.max_input_seq_length
    return PromptSettings(
        environment=config.data.env_name,
        max_prompt_tokens=room if limit is None else limit,
        overlong=config.data.overlong_prompts,
        shuffle=shuffle,
        seed=config.grpo.seed,
    )


async def build_envs(config: MasterConfig, stack: AsyncExitStack) -> dict[str, Environment]:
    """Start the environments' scoring processes."""
    environments = await in_thread("environments", lambda: build_environments(config.env))
    for environment in environments.values():
        stack.push_async_callback(environment.close)
    return environments


def build_threads(config: MasterConfig, context: RunContext) -> ThreadPlan:
    """Divide the cores and say so; what comes next takes the longest of the start."""
    plan = thread_plan(
        config.cluster.threads,
        overlapping=run_sampler(config).max_staleness > 0,
        policy_workers=config.policy.num_workers,
        generation_workers=config.policy.generation.num_replicas,
    )
    context.reporter.note(f"{plan.describe()}; starting trainer and generators")
    return plan


async def build_workers(config: MasterConfig, context: RunContext, stack: AsyncExitStack) -> Cluster:
    """Start or join the cluster."""
    cluster = await build_cluster(config.cluster, context.resources)
    stack.push_async_callback(cluster.shutdown)
    return cluster


async def build_models(
    config: MasterConfig,
    cluster: Cluster,
    model: LoadedModel,
    threads: ThreadPlan,
    note: Callable[[str], None],
    stack: AsyncExitStack,
) -> tuple[Policy, Generator]:
    """Start trainer and engines side by side: each spends most of its start on reading files and importing."""
    policy, generator = await gather_or_cancel(
        [
            build_policy(config, cluster, model, threads, note, stack),
            build_generator(config, cluster, model, threads, stack),
        ]
    )
    return cast(Policy, policy), cast(Generator, generator)


async def build_policy(
    config: MasterConfig,
    cluster: Cluster,
    model: LoadedModel,
    threads: ThreadPlan,
    note: Callable[[str], None],
    stack: AsyncExitStack,
) -> Policy:
    """Start the trainer; `note` is told what the model cannot do."""
    request = PolicyRequest(
        model_path=model.path,
        tokenizer_path=model.tokenizer.path,
        temperature=config.policy.generation.temperature,
        seed=config.grpo.seed,
        sequences_per_step=config.sequences_per_step,
        needs_reference=Need.REFERENCE in build_algorithm(config).needs,
        num_threads=threads.policy,
        gpus_per_worker=min(config.cluster.gpus_per_node, 1),
        call_timeout_s=config.cluster.call_timeout_s,
        version=0,
    )
    policy = await start_policy(cluster, config.policy, request, note)
    stack.push_async_callback(policy.close)
    return policy


async def build_generator(
    config: MasterConfig, cluster: Cluster, model: LoadedModel, threads: ThreadPlan, stack: AsyncExitStack
) -> Generator:
    """Start the engines."""
    request = generator_request(config, model, threads.generation)
    return await start_generator(config, cluster, request, stack)


async def build_weight_sync(
    config: MasterConfig, policy: Policy, generator: Generator, context: RunContext, stack: AsyncExitStack
) -> WeightSync:
    """Join trainer and engines."""
    refit, cluster = config.policy.generation.refit_cfg, config.cluster
    transport = refit.transport_for(on_gpus=cluster.gpus_per_node > 0, num_hosts=cluster.num_nodes)
    refit = refit.model_copy(update={"transport": transport})
    servers = await connect_servers(config)
    tag, link = context.resources.tag, refit.link_for(num_hosts=cluster.num_nodes)
    sync = WeightSync(policy.weight_sender(), generator, refit, tag, context.clock, servers, link)
    await sync.connect()
    stack.push_async_callback(sync.close)
    return sync


async def connect_servers(config: MasterConfig) -> list[Server]:
    """Ask the servers that others started whether they can be refitted.

    Raises:
        WeightSyncError: one cannot.
        InfraError: one is not there.
    """
    refit = config.policy.generation.refit_cfg
    if not refit.servers:
        return []
    # By path: most runs have no server, and need no HTTP client.
    receiver = cast(ConnectsServers, import_object("rl.generation.vllm.http_receiver:HttpReceiver"))
    keeps_caches = not refit.recompute_kv_cache_after_weight_updates
    # One that hangs is found out within the refit in which it does, and dropped.
    timeout_s, key = min(config.cluster.call_timeout_s, refit.timeout_s), "policy.generation.refit_cfg.servers"
    try:
        return [await receiver.connect(url, timeout_s, keeps_caches) for url in refit.servers]
    except InfraError as error:
        raise InfraError(f"{key}: {error}") from error
    except WeightSyncError as error:
        raise WeightSyncError(f"{key}: {error}") from error


def build_refit_check(
    config: MasterConfig, parts: CheckParts, prompts: PromptSource, context: RunContext
) -> RefitCheck:
    """The probe: the first prompt of the run, scored by both sides."""
    refit, precision = config.policy.generation.refit_cfg, config.policy.precision
    (prompt,) = prompts.held_out(1).prompts
    settings = CheckSettings(
        tokens=probe_tokens(prompt.token_ids, config.policy.max_total_sequence_length),
        every=refit.check_every_for(on_gpus=config.cluster.gpus_per_node > 0),
        tolerance=refit.tolerance_for(precision),
        precision=precision,
        timeout_s=refit.timeout_s,
    )
    return RefitCheck(parts, settings, context.clock)


def build_residency(
    config: MasterConfig, policy: Policy, generator: Generator, phases: Phases, clock: Clock
) -> Residency:
    """Who is on the devices while the model trains."""
    if config.policy.generation.colocated:
        return Shared(policy, generator, phases, clock)
    return Dedicated()


def build_buffer(config: MasterConfig) -> ReplayBuffer:
    """Join pump and step."""
    return ReplayBuffer(
        run_sampler(config),
        config.grpo.num_prompts_per_step,
        config.async_rl.max_buffered_rollouts,
        config.async_rl.rollout_failure.max_replacement_attempts,
        build_refill(config),
    )


def build_refill(config: MasterConfig) -> Refill | None:
    """Dynamic sampling, where it is on."""
    grpo = config.grpo
    if not grpo.use_dynamic_sampling:
        return None
    return Refill(
        keep_group_by_component if isinstance(grpo.adv_estimator, GDPOConfig) else keep_group,
        batch_size=started_groups(grpo.num_prompts_per_step, grpo.batch_multiplier),
        max_batches=grpo.dynamic_sampling_max_gen_batches,
        window=config.async_rl.sampler.max_lookahead_versions + 1,
    )


def build_algorithm(config: MasterConfig) -> Algorithm:
    """The algorithm that the sections `grpo`, `reward_penalties` and `loss_fn` describe."""
    chunk = config.policy.train_global_batch_size
    single_update = chunk is None or chunk == config.sequences_per_step
    return assemble(config.grpo, config.loss_fn, single_update, config.reward_penalties)


def build_validator(
    config: MasterConfig, rollouts: RolloutFactory, held_out: HeldOut, context: RunContext
) -> Validator | None:
    """Validation over the held-out prompts, where there are any."""
    if not held_out.prompts:
        return None
    skipped = held_out.skipped
    if skipped.overlong or skipped.faulty:
        context.reporter.note(
            f"validation has {len(held_out.prompts)} prompts; left out: {skipped.overlong} too long, "
            f"{skipped.faulty} faulty"
        )
    sampling = rollouts.validation_sampling()
    samples = config.grpo.val_num_generations
    return Validator(held_out, samples, lambda name: rollouts.manager(name, sampling), context.clock)
