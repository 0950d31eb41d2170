"""The staleness policy of a run, as several sections describe it together. It imports nothing heavy: checks use it."""

from rl.controller.config import MasterConfig
from rl.rollout.sampler import Sampler, build_sampler


def run_sampler(config: MasterConfig) -> Sampler:
    """The lookahead of `async_rl.sampler`; with dynamic sampling also the surplus of `grpo.batch_multiplier`."""
    multiplier = config.grpo.batch_multiplier if config.grpo.use_dynamic_sampling else None
    return build_sampler(config.async_rl.sampler, multiplier)
