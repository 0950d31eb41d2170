"""Overrides of flagged turns, and the clip."""

import torch

from rl.algorithms.overrides import clip_advantages, override_turns
from rl.core.batch import FLAG_BITS, TrainBatch
from rl.core.types import TurnFlag
from tests.support.reward_batches import NAN, reward_batch

TOOL, THINKING = FLAG_BITS[TurnFlag.INVALID_TOOL_CALL], FLAG_BITS[TurnFlag.MALFORMED_THINKING]


def flagged(flags: list[int], reward: float = 1.0) -> TrainBatch:
    """One rollout of a turn of 2 tokens and one of 3, and the flag of each token."""
    batch = reward_batch([reward], masks=[[1, 1, 0, 1, 1, 1]])
    return batch.with_columns(turn_flags=torch.tensor([0, *flags]))


def override(batch: TrainBatch, tool: float | None = -5.0, thinking: float | None = -2.0) -> list[float]:
    plain = torch.where(batch.loss_mask, 0.5, 0.0)
    got: list[float] = override_turns(plain, batch, invalid_tool_call=tool, malformed_thinking=thinking).tolist()
    assert plain.tolist() == [0, 0.5, 0.5, 0, 0.5, 0.5, 0.5]
    return got


def test_the_flagged_turn_changes_and_no_other() -> None:
    assert override(flagged([0, 0, 0, TOOL, TOOL, TOOL])) == [0, 0.5, 0.5, 0, -5, -5, -5]
    assert override(flagged([THINKING, THINKING, 0, 0, 0, 0])) == [0, -2, -2, 0, 0.5, 0.5, 0.5]


def test_an_invalid_tool_call_goes_before_malformed_thinking() -> None:
    both = TOOL | THINKING
    assert override(flagged([both, both, 0, 0, 0, 0])) == [0, -5, -5, 0, 0.5, 0.5, 0.5]
    assert override(flagged([both, both, 0, 0, 0, 0]), tool=None) == [0, -2, -2, 0, 0.5, 0.5, 0.5]


def test_without_a_value_flags_do_nothing_and_failed_rollouts_stay_at_zero() -> None:
    assert override(flagged([TOOL] * 6), None, None) == [0, 0.5, 0.5, 0, 0.5, 0.5, 0.5]
    assert -5 not in override(flagged([TOOL] * 6, reward=NAN))


def test_the_clip_bounds_each_side_by_itself() -> None:
    values = torch.tensor([-3.0, 0.0, 3.0])
    assert clip_advantages(values, -1.0, 2.0).tolist() == [-1, 0, 2]
    assert clip_advantages(values, None, 2.0).tolist() == [-3, 0, 2]
    assert clip_advantages(values, -1.0, None).tolist() == [-1, 0, 3]
    assert clip_advantages(values, None, None) is values
