"""Dynamic sampling (Yu et al. 2025, "DAPO", section 3.2): which groups take a place in a step, and how many are tried.

A group that is not kept gives its place to the next one, so a step has exactly its number of kept groups, in dispatch
order; what is kept beyond that stays for the next step. This module holds the settings, the figures of a step and the
words for a step that cannot be filled; the places are the buffer's (`buffer.py`).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rl.core.types import Dropped, RolloutGroup

_SHOWN = 4


@dataclass(frozen=True)
class Refill:
    """How steps are filled.

    Attributes:
        keep: Whether a finished group is trained on.
        batch_size: Groups started for a step at first.
        max_batches: Batches tried for one step before the run ends.
        window: Versions whose groups may be under way at the same time.
    """

    keep: Callable[[RolloutGroup], bool]
    batch_size: int
    max_batches: int
    window: int = 1

    @property
    def max_groups(self) -> int:
        """Groups tried for one step."""
        return self.batch_size * self.max_batches

    @property
    def max_ahead(self) -> int:
        """Groups tried beyond the last one that a step has taken: some of them may be for later steps."""
        return self.max_groups * self.window


@dataclass
class RefillTally:
    """What steps have used up.

    A step accounts for the groups up to the last one that it takes; later ones belong to later steps, whenever they
    were made. So the figures follow from the order of dispatch, not from time, and a restart counts nothing twice.

    Attributes:
        num_groups: Groups tried: taken, filtered or dropped.
        num_filtered: Groups that were not kept.
        num_discarded: Valid rollouts in those.
        reward_sum: Raw rewards of the valid rollouts, filtered groups included.
        num_rewards: Number of those rollouts.
    """

    num_groups: int = 0
    num_filtered: int = 0
    num_discarded: int = 0
    reward_sum: float = 0.0
    num_rewards: int = 0

    def add(self, rewards: Sequence[float], is_filtered: bool) -> None:
        """Count one group with the raw rewards of its valid rollouts; a dropped group has none."""
        self.num_groups += 1
        self.num_filtered += is_filtered
        self.num_discarded += len(rewards) * is_filtered
        self.reward_sum += sum(rewards)
        self.num_rewards += len(rewards)

    def metrics(self, batch_size: int, num_carried: int) -> dict[str, float]:
        """The metrics of the step, after which `num_carried` kept groups wait for a later one."""
        prefix = "dynamic_sampling_num"
        metrics = {
            f"{prefix}_gen_batches": self.num_groups / batch_size,
            f"{prefix}_filtered_groups": float(self.num_filtered),
            f"{prefix}_discarded_valid_samples": float(self.num_discarded),
            f"{prefix}_carried_groups": float(num_carried),
        }
        if self.num_rewards:
            metrics["unfiltered_reward"] = self.reward_sum / self.num_rewards
        return metrics


def valid_rewards(group: RolloutGroup) -> tuple[float, ...]:
    """The raw rewards that count."""
    return tuple(rollout.reward for rollout in group.rollouts if rollout.is_valid)


def describe_failure(
    refill: Refill, step: int, needed: int, filtered: Sequence[Sequence[float]], drops: Sequence[Dropped]
) -> str:
    """Say why a step cannot be filled, and what helps.

    Args:
        refill: The settings.
        step: The step, from 1.
        needed: Kept groups that it needs.
        filtered: The valid raw rewards of each group that was not kept.
        drops: The last drop of each group that was dropped.
    """
    tried = refill.max_groups
    kept = tried - len(filtered) - len(drops)
    text = (
        f"step {step} cannot be filled: {len(filtered)} of {tried} prompt groups ({_share(len(filtered), tried)}) had "
        f"equal rewards for all their rollouts, and {kept} of the {needed} needed were left to train on"
    )
    if filtered:
        kinds = Counter(_kind(rewards) for rewards in filtered).most_common()
        shown = [f"{_share(count, tried)} {kind}" for kind, count in kinds[:_SHOWN]]
        rest = sum(count for _, count in kinds[_SHOWN:])
        text += f"; rewards by group: {', '.join(shown)}" + (f", {_share(rest, tried)} others" if rest else "")
    if drops:
        text += f"; {len(drops)} groups were dropped, the last for {drops[-1].reason}: {drops[-1].detail}"
    unscored = sum(not rewards for rewards in filtered)
    if unscored > len(filtered) / 2:
        return f"{text}. Most groups ended without a valid reward; run.log says why each of their rewards failed"
    return (
        f"{text}. Use easier prompts where the rewards are at their lowest and harder ones where they are at their "
        "highest, raise grpo.num_generations_per_prompt or policy.generation.temperature, or raise "
        f"grpo.dynamic_sampling_max_gen_batches={refill.max_batches} (batches of {refill.batch_size} groups)"
    )


def _kind(rewards: Sequence[float]) -> str:
    if not rewards:
        return "without a valid reward"
    return f"all {rewards[0]:.4g}" if min(rewards) == max(rewards) else "of other rewards"


def _share(count: int, total: int) -> str:
    return f"{100 * count / total:.0f}%"
