"""Cross-section checks of the step, the trained model and the generator. See `rl.controller.checks`."""

from collections.abc import Iterator

from rl.controller.config import MasterConfig
from rl.controller.conflicts import Check, Conflict, inert


def _sequences_per_update(config: MasterConfig) -> int:
    return config.policy.train_global_batch_size or config.sequences_per_step


def _step_text(config: MasterConfig) -> str:
    prompts, generations = config.grpo.num_prompts_per_step, config.grpo.num_generations_per_prompt
    return (
        f"{prompts * generations} (grpo.num_prompts_per_step={prompts} x grpo.num_generations_per_prompt={generations})"
    )


_STEP_KEYS = ("grpo.num_prompts_per_step", "grpo.num_generations_per_prompt")


def step_divides_into_updates(config: MasterConfig) -> Iterator[Conflict]:
    """A step must hold a whole number of optimizer steps."""
    size = config.policy.train_global_batch_size
    if size is not None and config.sequences_per_step % size:
        key = "policy.train_global_batch_size"
        problem = f"{key}={size} does not divide the sequences of a step, {_step_text(config)}"
        yield Conflict(
            (key, *_STEP_KEYS), problem, f"use a divisor of {config.sequences_per_step}, or null for all of them"
        )


def updates_divide_over_workers(config: MasterConfig) -> Iterator[Conflict]:
    """Every trainer process takes the same number of sequences."""
    size, workers = _sequences_per_update(config), config.policy.num_workers
    if size % workers:
        keys = ("policy.num_workers", "policy.train_global_batch_size", *_STEP_KEYS)
        what = (
            "policy.train_global_batch_size"
            if config.policy.train_global_batch_size
            else f"the step {_step_text(config)}"
        )
        problem = f"policy.num_workers={workers} does not divide the {size} sequences of an optimizer step ({what})"
        yield Conflict(keys, problem, f"use a number of workers that divides {size}")


def micro_batches_divide(config: MasterConfig) -> Iterator[Conflict]:
    """A worker's share is one micro-batch, or a whole number of them."""
    workers, micro = config.policy.num_workers, config.policy.train_micro_batch_size
    share, rest = divmod(_sequences_per_update(config), workers)
    if not rest and share > micro and share % micro:
        key = "policy.train_micro_batch_size"
        problem = f"{key}={micro} does not divide the {share} sequences of one worker and optimizer step"
        keys = (key, "policy.train_global_batch_size", "policy.num_workers", *_STEP_KEYS)
        yield Conflict(
            keys,
            f"{problem}, with policy.num_workers={workers} and {_step_text(config)} a step",
            f"use a divisor of {share}",
        )


def decay_has_a_length(config: MasterConfig) -> Iterator[Conflict]:
    """A decaying schedule needs its length."""
    scheduler, keys = config.policy.scheduler, ("policy.scheduler.name", "policy.scheduler.decay_steps")
    if scheduler.name != "constant" and scheduler.decay_steps is None:
        fix = f"set {keys[1]}={max(1, config.grpo.max_num_steps - scheduler.warmup_steps)}"
        yield Conflict(keys, f"{keys[0]}={scheduler.name} needs {keys[1]}, got null", fix)


def schedule_settings_have_an_effect(config: MasterConfig) -> Iterator[Conflict]:
    """A constant rate does not decay, and no warm-up has no start."""
    scheduler, prefix = config.policy.scheduler, "policy.scheduler"
    if scheduler.name == "constant":
        key = f"{prefix}.name"
        yield from inert(scheduler, prefix, ["decay_steps", "min_factor"], key, f"{key}=constant does not decay")
    if scheduler.warmup_steps == 0:
        key = f"{prefix}.warmup_steps"
        yield from inert(scheduler, prefix, ["warmup_start_factor"], key, f"{key}=0")


def completion_fits_the_context(config: MasterConfig) -> Iterator[Conflict]:
    """At least one token must be left for the prompt."""
    total_key, total = "policy.max_total_sequence_length", config.policy.max_total_sequence_length
    bounds = (
        ("policy.generation.max_new_tokens", config.policy.generation.max_new_tokens),
        ("grpo.val_max_new_tokens", config.grpo.val_max_new_tokens),
    )
    for key, value in bounds:
        if value is not None and value >= total:
            problem = f"{key}={value} leaves no token for a prompt within {total_key}={total}"
            yield Conflict((key, total_key), problem, f"lower {key} or raise {total_key}")


def prompt_fits_the_context(config: MasterConfig) -> Iterator[Conflict]:
    """The longest prompt and the longest completion fit together."""
    prompt, new = config.data.max_input_seq_length, config.policy.generation.max_new_tokens
    total = config.policy.max_total_sequence_length
    if prompt is not None and prompt + new > total:
        keys = ("data.max_input_seq_length", "policy.max_total_sequence_length", "policy.generation.max_new_tokens")
        problem = f"{keys[0]}={prompt} + {keys[2]}={new} is more than {keys[1]}={total}"
        yield Conflict(keys, problem, f"lower {keys[0]} to {max(total - new, 1)} or raise {keys[1]} to {prompt + new}")


def native_logprobs_run_on_the_cpu(config: MasterConfig) -> Iterator[Conflict]:
    """The fused operator reads logits in host memory."""
    keys = ("policy.logprob_impl", "cluster.gpus_per_node")
    if config.policy.logprob_impl == "native" and config.cluster.gpus_per_node > 0:
        problem = (
            f"{keys[0]}=native works on the CPU alone, and {keys[1]}={config.cluster.gpus_per_node} trains on GPUs"
        )
        yield Conflict(keys, problem, f"set {keys[0]}=torch")


POLICY_CHECKS: list[Check] = [
    step_divides_into_updates,
    updates_divide_over_workers,
    micro_batches_divide,
    decay_has_a_length,
    schedule_settings_have_an_effect,
    completion_fits_the_context,
    prompt_fits_the_context,
    native_logprobs_run_on_the_cpu,
]
