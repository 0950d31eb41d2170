"""Rollout managers out of the configuration: for training, for each validation and for evaluation."""

from collections.abc import Mapping
from dataclasses import replace

from rl.controller.config import MasterConfig
from rl.core.clock import Clock
from rl.data.chat import PromptTokenizer
from rl.data.conversation import Conversations
from rl.environments.base import Environment
from rl.generation.generator import Generator, SamplingParams
from rl.rollout.manager import RolloutManager
from rl.rollout.movement import Movement
from rl.rollout.runner import GroupRunner, RunnerLimits
from rl.rollout.unscored import Unscored


class RolloutFactory:
    """Makes rollout managers that share engines and environments but not their sampling settings.

    Attributes:
        movement: What all its managers have under way, and what has ended.
    """

    def __init__(
        self,
        config: MasterConfig,
        generator: Generator,
        environments: Mapping[str, Environment],
        tokenizer: PromptTokenizer,
        clock: Clock,
    ) -> None:
        self._config = config
        self._generator = generator
        self._environments = environments
        self._tokenizer = tokenizer
        self._conversations = Conversations(
            tokenizer,
            is_raw=config.data.prompt_format == "raw",
            rewritten_history=config.data.rewritten_history,
        )
        self._clock = clock
        self.movement = Movement()
        self._unscored = Unscored()

    def training_sampling(self) -> SamplingParams:
        """As `policy.generation` says."""
        section = self._config.policy.generation
        stop = self._tokenizer.stop_token_ids if section.stop_token_ids is None else tuple(section.stop_token_ids)
        return SamplingParams(
            temperature=section.temperature,
            top_p=section.top_p,
            top_k=section.top_k,
            max_new_tokens=section.max_new_tokens,
            stop_token_ids=stop,
            stop_strings=tuple(section.stop_strings),
            seed=self._config.grpo.seed,
        )

    def validation_sampling(self) -> SamplingParams:
        """As the grpo.val_* keys say; the ends of a completion are those of training."""
        grpo, training = self._config.grpo, self.training_sampling()
        return replace(
            training,
            temperature=grpo.val_temperature,
            top_p=grpo.val_top_p,
            top_k=grpo.val_top_k,
            max_new_tokens=training.max_new_tokens if grpo.val_max_new_tokens is None else grpo.val_max_new_tokens,
        )

    def evaluation_sampling(self) -> SamplingParams:
        """As the `eval` section says; the ends of a completion are those of training."""
        section, training = self._config.eval, self.training_sampling()
        return replace(
            training,
            temperature=section.temperature,
            top_p=section.top_p,
            top_k=section.top_k,
            max_new_tokens=training.max_new_tokens if section.max_new_tokens is None else section.max_new_tokens,
            seed=section.seed,
        )

    def manager(self, name: str, sampling: SamplingParams) -> RolloutManager:
        """A manager whose request ids start with `name`; the seed of `sampling` is that of all its samples."""
        config, failure = self._config, self._config.async_rl.rollout_failure
        limits = RunnerLimits(
            max_turns=config.grpo.max_rollout_turns,
            max_tokens=config.policy.max_total_sequence_length,
            generation_timeout_s=failure.native.generation_timeout_s,
            env_timeout_s=failure.native.env_timeout_s,
        )
        runner = GroupRunner(
            self._generator, self._environments, sampling, self._conversations, limits, self._clock, self._unscored
        )
        return RolloutManager(
            runner,
            failure,
            config.async_rl.max_inflight_prompts,
            sampling.seed,
            name,
            self._clock,
            self.movement,
        )
