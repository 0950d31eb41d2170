"""Who is trained on: groups before the step, sequences within it.

Filters never touch a reward or a vote: a sequence that a filter drops has weight 0 in the loss and still counts in its
group's baseline. Groups are dropped whole and before the step (dynamic sampling), by the buffer.
"""

from collections.abc import Iterable

from rl.core.types import RolloutGroup


def keep_group(group: RolloutGroup) -> bool:
    """Say whether a group can teach anything (dynamic sampling: Yu et al. 2025, "DAPO", equation 11).

    In YAML: `grpo.use_dynamic_sampling: true`. Raw rewards decide, so that no scaling or shaping can hide that all
    siblings did equally well.
    """
    return has_varied_rewards(rollout.reward for rollout in group.rollouts if rollout.is_valid)


def has_varied_rewards(rewards: Iterable[float]) -> bool:
    """Say whether valid rewards differ: by their extrema, for a variance of equal numbers need not round to 0."""
    values = list(rewards)
    return bool(values) and max(values) != min(values)
