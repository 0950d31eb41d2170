"""Cross-section checks of the buffer and of dynamic sampling. See `rl.controller.checks`."""

from collections.abc import Iterator

from rl.controller.config import MasterConfig
from rl.controller.conflicts import Check, Conflict, inert
from rl.controller.run_sampler import run_sampler
from rl.rollout.sampler import started_groups

_PROMPTS = "grpo.num_prompts_per_step"
_SAMPLING = "grpo.use_dynamic_sampling"
_MULTIPLIER = "grpo.batch_multiplier"


def buffer_holds_the_window(config: MasterConfig) -> Iterator[Conflict]:
    """Training would wait for groups that cannot start."""
    prompts, held = config.grpo.num_prompts_per_step, config.async_rl.max_buffered_rollouts
    needed = run_sampler(config).required_capacity(prompts)
    if held < needed:
        key, lookahead = "async_rl.max_buffered_rollouts", "async_rl.sampler.max_lookahead_versions"
        keys: tuple[str, ...] = (key, lookahead, _PROMPTS)
        sizes = f"{_PROMPTS}={prompts}"
        if config.grpo.use_dynamic_sampling and config.grpo.batch_multiplier > 1:
            keys += (_MULTIPLIER,)
            sizes += f", {_MULTIPLIER}={config.grpo.batch_multiplier}"
        ahead = f"{lookahead}={config.async_rl.sampler.max_lookahead_versions}"
        yield Conflict(keys, f"{ahead} needs {key} >= {needed} ({sizes}), got {held}", f"set {key}={needed}")


def dynamic_sampling_settings_have_an_effect(config: MasterConfig) -> Iterator[Conflict]:
    """Without dynamic sampling its settings mean nothing."""
    if not config.grpo.use_dynamic_sampling:
        names = ["dynamic_sampling_max_gen_batches", "batch_multiplier"]
        reason = f"{_SAMPLING}=false fills no step again; set {_SAMPLING}=true"
        yield from inert(config.grpo, "grpo", names, _SAMPLING, reason)


def _surplus(config: MasterConfig) -> int:
    """Groups started for a step beyond those that it trains."""
    if not config.grpo.use_dynamic_sampling:
        return 0
    prompts = config.grpo.num_prompts_per_step
    return started_groups(prompts, config.grpo.batch_multiplier) - prompts


def multiplier_starts_more_groups(config: MasterConfig) -> Iterator[Conflict]:
    """A small multiple of few prompts is no further group."""
    prompts, multiplier = config.grpo.num_prompts_per_step, config.grpo.batch_multiplier
    if config.grpo.use_dynamic_sampling and multiplier > 1 and _surplus(config) == 0:
        problem = f"{_MULTIPLIER}={multiplier} has no effect: {multiplier} x {_PROMPTS}={prompts} rounds to {prompts}"
        yield Conflict(
            (_MULTIPLIER, _PROMPTS), problem, f"set {_MULTIPLIER}={(prompts + 1) / prompts:.4g}, or remove it"
        )


def surplus_needs_correction(config: MasterConfig) -> Iterator[Conflict]:
    """What is made beyond a step is trained by a later version than the one that sampled it."""
    correction = "loss_fn.use_importance_sampling_correction"
    if _surplus(config) > 0 and not config.loss_fn.use_importance_sampling_correction:
        staleness = run_sampler(config).max_staleness
        problem = (
            f"{_MULTIPLIER}={config.grpo.batch_multiplier} keeps surplus groups for the next step, so rollouts may be "
            f"{staleness} versions old, which needs {correction}=true, got false"
        )
        yield Conflict((_MULTIPLIER, correction), problem, f"set {correction}=true, or {_MULTIPLIER}=1")


ROLLOUT_CHECKS: list[Check] = [
    buffer_holds_the_window,
    dynamic_sampling_settings_have_an_effect,
    multiplier_starts_more_groups,
    surplus_needs_correction,
]
