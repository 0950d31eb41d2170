"""Validation: held-out prompts with their own sampling settings, over the same path as training rollouts.

consumes: a fixed list of prompts
produces: validation/... metrics over exactly the samples asked for
waits for: its own groups, which share the engines with the training groups in flight
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rl.controller.pump import GroupRuns
from rl.controller.step_metrics import environment_metrics
from rl.core.clock import Clock
from rl.core.concurrency import gather_or_cancel
from rl.core.types import Dropped, RolloutGroup
from rl.data.prompts import HeldOut
from rl.rollout.ticket import Ticket


@dataclass(frozen=True)
class ValidationReport:
    """Outcome of one validation; names carry no prefix."""

    step: int
    metrics: dict[str, float]
    groups: list[RolloutGroup]
    seconds: float


class Validator:
    """Validates the policy that the generators hold.

    Args:
        held_out: The prompts, and how many were left out.
        num_generations: Samples of each.
        make_manager: Returns a manager for one validation, by the name that starts its request ids.
        clock: Time.
    """

    def __init__(
        self, held_out: HeldOut, num_generations: int, make_manager: Callable[[str], GroupRuns], clock: Clock
    ) -> None:
        self._prompts = held_out.prompts
        self._skipped = held_out.skipped
        self._num_generations = num_generations
        self._make_manager = make_manager
        self._clock = clock

    async def run(self, step: int) -> ValidationReport:
        """Validate after `step` (0 = before the first).

        Raises:
            FatalError: the run cannot go on. Samples that fail otherwise are counted.
        """
        start = self._clock.now()
        manager = self._make_manager(f"val{step}")
        work = [
            manager.run_group(prompt, self._num_generations, Ticket(seq, step))
            for seq, prompt in enumerate(self._prompts)
        ]
        results = await gather_or_cancel(work)
        groups = [result for result in results if isinstance(result, RolloutGroup)]
        asked = len(self._prompts) * self._num_generations
        metrics = validation_metrics(groups, asked, self._num_generations)
        metrics["num_dropped_prompts"] = float(sum(isinstance(result, Dropped) for result in results))
        metrics["num_skipped_prompts"] = float(self._skipped.overlong)
        metrics["num_faulty_prompts"] = float(self._skipped.faulty)
        return ValidationReport(step, metrics, groups, self._clock.now() - start)


def validation_metrics(groups: Sequence[RolloutGroup], asked: int, num_generations: int) -> dict[str, float]:
    """Accuracy over the `asked` samples; one without a valid reward adds nothing to the sum and is counted apart."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    valid = [rollout for rollout in rollouts if rollout.is_valid]
    metrics = {
        "accuracy": sum(rollout.reward for rollout in valid) / asked,
        "num_samples": float(asked),
        "num_failed": float(asked - len(valid)),
    }
    if num_generations > 1:
        solved = sum(any(r.is_valid and r.reward > 0 for r in group.rollouts) for group in groups)
        metrics["pass_at_k"] = solved * num_generations / asked
    if rollouts:
        metrics["avg_length"] = sum(rollout.num_sampled_tokens for rollout in rollouts) / len(rollouts)
        metrics["truncation_rate"] = sum(rollout.is_truncated for rollout in rollouts) / len(rollouts)
    return metrics | environment_metrics(rollouts)
