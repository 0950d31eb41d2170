"""Tests of rl.controller.rollout_metrics."""

from collections.abc import Sequence

import pytest
import torch

from rl.controller.rollout_metrics import form_metrics, percentile, rollout_metrics
from rl.core.metric_registry import check_metric_names
from rl.core.types import (
    Completion,
    FinishReason,
    Message,
    Prompt,
    Rollout,
    RolloutEnd,
    RolloutGroup,
    Turn,
    TurnFlag,
    VersionSpan,
)


def turn(prompt: int, sampled: int, *flags: TurnFlag, forked: bool = False, drifted: bool = False) -> Turn:
    """A turn over a prompt of `prompt` tokens with `sampled` sampled ones."""
    spans = (VersionSpan(0, 0, sampled),)
    completion = Completion((5,) * sampled, (-1.0,) * sampled, FinishReason.STOP, spans, "")
    return Turn((5,) * prompt, completion, flags=frozenset(flags), forked=forked, drifted=drifted)


def group(*rollouts: Rollout) -> RolloutGroup:
    return RolloutGroup(0, Prompt("p0", (Message("user", "?"),), "echo", {}, (5, 5, 5)), rollouts)


def rollout(turns: Sequence[Turn], end: RolloutEnd) -> Rollout:
    return Rollout("0/0", tuple(turns), 1.0, end=end)


def test_turns_tokens_and_ends() -> None:
    rollouts = (
        rollout([turn(3, 4)], RolloutEnd.DONE),
        rollout([turn(3, 2), turn(8, 6), turn(16, 1)], RolloutEnd.MAX_TURNS),  # 3 and 2 tokens were added
        rollout([turn(3, 2), turn(7, 2)], RolloutEnd.CONTEXT),  # 2 were added
        rollout([turn(3, 5)], RolloutEnd.LENGTH),
    )
    metrics = rollout_metrics([group(*rollouts[:2]), group(*rollouts[2:])])
    assert metrics["total_turns"] == 7.0
    assert metrics["avg_turns_per_sample"] == 1.75 and metrics["max_turns_per_sample"] == 3.0
    assert metrics["turns_per_sample/p95"] == pytest.approx(2.85)
    assert metrics["turns_per_sample/p99"] == pytest.approx(2.97)
    assert (
        metrics["natural_termination_rate"] == metrics["truncation_rate"] == metrics["max_turns_reached_rate"] == 0.25
    )
    assert metrics["mean_prompt_length"] == 3.0
    assert metrics["mean_gen_tokens_per_sample"] == (4 + 9 + 4 + 5) / 4 and metrics["max_gen_tokens_per_sample"] == 9.0
    assert metrics["mean_total_tokens_per_sample"] == (7 + 17 + 9 + 8) / 4
    assert metrics["mean_env_tokens_per_sample"] == (0 + 5 + 2 + 0) / 4
    assert metrics["max_gen_tokens_per_turn/max"] == 6.0
    assert metrics["max_gen_tokens_per_turn/mean"] == (4 + 6 + 2 + 5) / 4
    assert metrics["max_gen_tokens_per_turn/p95"] == pytest.approx(5.85)
    check_metric_names(f"train/{name}" for name in metrics)


def test_a_fork_adds_a_sequence_and_no_rollout() -> None:
    turns = [turn(3, 4), turn(9, 2, drifted=True), turn(6, 2, forked=True), turn(10, 1)]
    metrics = rollout_metrics([group(rollout(turns, RolloutEnd.DONE), rollout([turn(3, 1)], RolloutEnd.DONE))])
    assert metrics["num_forked_rollouts"] == 1.0 and metrics["num_drifted_turns"] == 1.0
    # Sequences of 9 + 2 and of 10 + 1 tokens.
    assert metrics["mean_total_tokens_per_sample"] == (22 + 4) / 2
    assert metrics["mean_gen_tokens_per_sample"] == (9 + 1) / 2
    check_metric_names(f"train/{name}" for name in metrics)


def test_faults_of_form_are_counted_per_message_of_the_assistant() -> None:
    call, thinking = TurnFlag.INVALID_TOOL_CALL, TurnFlag.MALFORMED_THINKING
    turns = [turn(3, 4, call, thinking), turn(9, 2, call), turn(12, 1), turn(14, 1)]
    assert form_metrics([rollout(turns, RolloutEnd.DONE)]) == {
        "num_assistant_messages": 4.0,
        "num_invalid_tool_calls": 2.0,
        "invalid_tool_call_rate": 0.5,
        "num_malformed_thinking": 1.0,
        "malformed_thinking_rate": 0.25,
    }
    assert form_metrics([])["invalid_tool_call_rate"] == 0.0


def test_a_percentile_interpolates_as_torch_does() -> None:
    values = torch.randn(37, dtype=torch.float64)
    for share in (0.0, 0.5, 0.95, 0.99, 1.0):
        assert percentile(values.tolist(), share) == pytest.approx(float(torch.quantile(values, share)))


def test_no_rollouts_have_no_metrics() -> None:
    assert rollout_metrics([]) == {}
