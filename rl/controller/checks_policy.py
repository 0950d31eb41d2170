"""Cross-section checks of the step, the trained model and the generator. See `rl.controller.checks`."""

from collections.abc import Iterator

from rl.controller.config import MasterConfig
from rl.controller.conflicts import Check, Conflict, inert, is_changed


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


def one_rule_cuts_micro_batches(config: MasterConfig) -> Iterator[Conflict]:
    """Micro-batches are padded rows of a token budget, or one packed row."""
    keys = ("policy.dynamic_batching.enabled", "policy.sequence_packing.enabled")
    if config.policy.dynamic_batching.enabled and config.policy.sequence_packing.enabled:
        yield Conflict(keys, f"{keys[0]}=true and {keys[1]}=true exclude each other", f"set {keys[0]}=false")


def token_budgets_have_an_effect(config: MasterConfig) -> Iterator[Conflict]:
    """A budget belongs to a mode that is on, and takes the place of the number of sequences."""
    policy = config.policy
    for name, section in (("dynamic_batching", policy.dynamic_batching), ("sequence_packing", policy.sequence_packing)):
        key = f"policy.{name}"
        if not section.enabled:
            names = [field for field in type(section).model_fields if field != "enabled"]
            yield from inert(section, key, names, f"{key}.enabled", f"{key}.enabled=false")
        elif section.train_mb_tokens and section.logprob_mb_tokens and is_changed(policy, "train_micro_batch_size"):
            size = f"policy.train_micro_batch_size={policy.train_micro_batch_size}"
            keys = ("policy.train_micro_batch_size", f"{key}.train_mb_tokens", f"{key}.logprob_mb_tokens")
            problem = f"{size} has no effect: {keys[1]} and {keys[2]} are set"
            yield Conflict(keys, problem, f"set {keys[1]}=null and {keys[2]}=null, or {keys[0]} to its default")


def token_budgets_hold_a_sequence(config: MasterConfig) -> Iterator[Conflict]:
    """The longest sequence must fit in a micro-batch."""
    total_key, total = "policy.max_total_sequence_length", config.policy.max_total_sequence_length
    for name in ("dynamic_batching", "sequence_packing"):
        section = config.policy.dynamic_batching if name == "dynamic_batching" else config.policy.sequence_packing
        for field, budget in (
            ("train_mb_tokens", section.train_mb_tokens),
            ("logprob_mb_tokens", section.logprob_mb_tokens),
        ):
            if section.enabled and budget is not None and budget < total:
                key = f"policy.{name}.{field}"
                problem = f"{key}={budget} is less than the longest sequence, {total_key}={total}"
                yield Conflict((key, total_key), problem, f"raise {key} to {total} or more")


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


POLICY_CHECKS: list[Check] = [
    step_divides_into_updates,
    one_rule_cuts_micro_batches,
    token_budgets_have_an_effect,
    token_budgets_hold_a_sequence,
    decay_has_a_length,
    schedule_settings_have_an_effect,
    completion_fits_the_context,
    prompt_fits_the_context,
]
