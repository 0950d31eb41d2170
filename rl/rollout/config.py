"""Settings of the `async_rl` section that the rollout layer owns."""

from typing import Literal

from pydantic import Field

from rl.core.config import ConfigModel, operational


class InOrderSampler(ConfigModel):
    """Groups are trained in the order in which they were dispatched."""

    name: Literal["in_order"] = "in_order"
    max_lookahead_versions: int = Field(
        1, ge=0, description="How many versions rollouts may run ahead; 0 = synchronous."
    )


class NativeRolloutConfig(ConfigModel):
    """Deadlines of the calls that a rollout makes."""

    generation_timeout_s: float = operational(1800.0, gt=0, description="Deadline of one completion, in seconds.")
    env_timeout_s: float = operational(
        1800.0, gt=0, description="Deadline of one environment step of a group, in seconds."
    )


class RolloutFailureConfig(ConfigModel):
    """What happens when a rollout fails."""

    max_infra_attempts_per_prompt: int = operational(5, ge=1, description="Attempts when engines or processes fail.")
    max_data_attempts_per_prompt: int = operational(2, ge=1, description="Attempts when the sample is at fault.")
    backoff_base_s: float = operational(1.0, gt=0, description="First pause between attempts, in seconds; doubles.")
    max_backoff_s: float = operational(30.0, gt=0, description="Longest pause, in seconds.")
    max_replacement_attempts: int = operational(1, ge=0, description="Fresh prompts tried for one dropped group.")
    max_unscored_steps: int = operational(
        5, ge=1, description="Consecutive steps without one valid reward that end the run: the scorer is broken then."
    )
    native: NativeRolloutConfig = NativeRolloutConfig()


class StallWatchdogConfig(ConfigModel):
    """Watches that generation and training move."""

    interval_s: float = operational(30.0, gt=0, description="Seconds between looks.")
    stall_timeout_s: float = operational(600.0, gt=0, description="Seconds without progress that count as a stall.")
    stall_action: Literal["warn", "abort"] = operational("abort", description="What a stall does.")


class AsyncRLConfig(ConfigModel):
    """How far rollouts run ahead of training, and what bounds them."""

    sampler: InOrderSampler = InOrderSampler()
    max_inflight_prompts: int = operational(32, ge=1, description="Prompt groups generated at the same time.")
    max_buffered_rollouts: int = operational(
        64, ge=1, description="Live prompt groups; must hold the window of the sampler, which bounds them already."
    )
    rollout_failure: RolloutFailureConfig = RolloutFailureConfig()
    stall_watchdog: StallWatchdogConfig = StallWatchdogConfig()
