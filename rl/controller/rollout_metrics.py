"""How rollouts went: turns, tokens, ends and the form of what was said. Pure functions; names carry no prefix.

Everything is counted over rollouts ("samples"), whether or not their reward was valid; a rollout over several
sequences counts once.
"""

import math
from collections.abc import Sequence

from rl.core.types import Rollout, RolloutEnd, RolloutGroup, TurnFlag


def rollout_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Turns, tokens and ends of the rollouts, and how often their form was faulty; nothing when there are none."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        return {}
    return _turn_metrics(rollouts) | _end_metrics(rollouts) | _token_metrics(rollouts) | form_metrics(rollouts)


def form_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """How many turns the environment found faulty in form, and their share of all turns."""
    flags = [turn.flags for rollout in rollouts for turn in rollout.turns]
    calls = float(sum(TurnFlag.INVALID_TOOL_CALL in found for found in flags))
    thinking = float(sum(TurnFlag.MALFORMED_THINKING in found for found in flags))
    return {
        "num_assistant_messages": float(len(flags)),
        "num_invalid_tool_calls": calls,
        "invalid_tool_call_rate": calls / max(len(flags), 1),
        "num_malformed_thinking": thinking,
        "malformed_thinking_rate": thinking / max(len(flags), 1),
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie, interpolated linearly between two neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _turn_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    turns = [float(len(rollout.turns)) for rollout in rollouts]
    metrics = {
        "total_turns": sum(turns),
        "avg_turns_per_sample": _mean(turns),
        "max_turns_per_sample": max(turns),
        "turns_per_sample/p95": percentile(turns, 0.95),
        "turns_per_sample/p99": percentile(turns, 0.99),
    }
    if max(turns) > 1:
        metrics["num_forked_rollouts"] = float(sum(any(turn.forked for turn in r.turns) for r in rollouts))
        metrics["num_drifted_turns"] = float(sum(turn.drifted for r in rollouts for turn in r.turns))
    return metrics


def _end_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    return {
        "natural_termination_rate": _mean([float(rollout.end is RolloutEnd.DONE) for rollout in rollouts]),
        "truncation_rate": _mean([float(rollout.is_truncated) for rollout in rollouts]),
        "max_turns_reached_rate": _mean([float(rollout.end is RolloutEnd.MAX_TURNS) for rollout in rollouts]),
    }


def _token_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    prompts = [float(len(rollout.turns[0].prompt_tokens)) for rollout in rollouts]
    generated = [float(rollout.num_sampled_tokens) for rollout in rollouts]
    total = [float(rollout.num_tokens) for rollout in rollouts]
    added = [a - b - c for a, b, c in zip(total, prompts, generated, strict=True)]
    longest = [float(max(len(turn.completion.tokens) for turn in rollout.turns)) for rollout in rollouts]
    return {
        "mean_prompt_length": _mean(prompts),
        "mean_total_tokens_per_sample": _mean(total),
        "mean_gen_tokens_per_sample": _mean(generated),
        "max_gen_tokens_per_sample": max(generated),
        "mean_env_tokens_per_sample": _mean(added),
        "max_gen_tokens_per_turn/max": max(longest),
        "max_gen_tokens_per_turn/mean": _mean(longest),
        "max_gen_tokens_per_turn/p95": percentile(longest, 0.95),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
