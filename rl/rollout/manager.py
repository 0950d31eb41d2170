"""One prompt group from start to end: limits, attempts, back-off, accounting.

consumes: prompts and their tickets
produces: RolloutGroup or Dropped, never neither
waits for: a place among the groups in flight; the runner; the pause between attempts (which holds no place)

It decides nothing about failures itself (`retry.decide`), and nothing about order or staleness (`buffer.py`).
"""

import asyncio
import logging
from collections import Counter

from rl.core.clock import Clock
from rl.core.types import Dropped, Prompt, Rollout, RolloutGroup, RolloutStatus
from rl.rollout.config import RolloutFailureConfig
from rl.rollout.movement import Movement
from rl.rollout.retry import Fail, Failures, GiveUp, decide, is_infra
from rl.rollout.runner import Attempt, GroupRunner
from rl.rollout.ticket import Ticket

_log = logging.getLogger(__name__)
_STATUS_COUNTERS = {
    RolloutStatus.REWARD_ERROR: "num_reward_errors",
    RolloutStatus.REWARD_TIMEOUT: "num_reward_timeouts",
    RolloutStatus.REWARD_INVALID: "num_reward_invalid",
}
_COUNTERS = (
    *_STATUS_COUNTERS.values(),
    "num_unusable_samples",
    "num_infra_retries",
    "num_data_retries",
    "num_failed_prompt_groups",
)


class RolloutManager:
    """Turns prompts into groups.

    Args:
        runner: One attempt.
        budgets: Attempts and pauses.
        max_inflight: Groups that run at the same time.
        seed: Seed of the run.
        name: Start of the request ids, unique among the managers of one generator.
        clock: Time.
        movement: Counts the attempts; shared by the managers of a run.
    """

    def __init__(
        self,
        runner: GroupRunner,
        budgets: RolloutFailureConfig,
        max_inflight: int,
        seed: int,
        name: str,
        clock: Clock,
        movement: Movement,
    ) -> None:
        self._runner = runner
        self._budgets = budgets
        self._permits = asyncio.Semaphore(max_inflight)
        self._seed = seed
        self._name = name
        self._clock = clock
        self._counters: Counter[str] = Counter()
        self.movement = movement

    async def run_group(self, prompt: Prompt, n: int, ticket: Ticket) -> RolloutGroup | Dropped:
        """Roll out `n` siblings of `prompt`, with retries.

        Raises:
            FatalError: the run cannot go on. Everything else ends in the result.
        """
        failures = Failures()
        while True:
            number = failures.infra + failures.data
            try:
                rollouts = await self._attempt(prompt, n, ticket, number)
            except Exception as error:
                failures = failures.plus(error)
                decision = decide(error, failures, self._budgets)
                if isinstance(decision, Fail):
                    raise
                if isinstance(decision, GiveUp):
                    return self._give_up(prompt, decision, number + 1, error)
                self._count_retry(prompt, error)
                if decision.delay_s > 0:
                    await self._clock.sleep(decision.delay_s)
            else:
                self._counters.update(_STATUS_COUNTERS[r.status] for r in rollouts if r.status in _STATUS_COUNTERS)
                self._counters["num_unusable_samples"] += n - len(rollouts)
                return RolloutGroup(ticket.seq, prompt, rollouts)

    def drain_counters(self) -> dict[str, int]:
        """Return what went wrong since the last call, by kind; rewards of zero are not among it."""
        counters = {name: self._counters[name] for name in _COUNTERS}
        self._counters = Counter()
        return counters

    async def _attempt(self, prompt: Prompt, n: int, ticket: Ticket, number: int) -> tuple[Rollout, ...]:
        async with self._permits:
            with self.movement.attempt():
                attempt = Attempt(self._seed, ticket.seq, ticket.replacement, number, self._name)
                return await self._runner.run(prompt, n, attempt)

    def _count_retry(self, prompt: Prompt, error: Exception) -> None:
        self._counters["num_infra_retries" if is_infra(error) else "num_data_retries"] += 1
        _log.warning("prompt %s: attempt failed, trying again: %s: %s", prompt.prompt_id, type(error).__name__, error)

    def _give_up(self, prompt: Prompt, decision: GiveUp, attempts: int, error: Exception) -> Dropped:
        self._counters["num_failed_prompt_groups"] += 1
        _log.error(
            "prompt %s: dropped after %d attempts (%s)", prompt.prompt_id, attempts, decision.reason, exc_info=error
        )
        return Dropped(decision.reason, attempts, f"{type(error).__name__}: {error}")
