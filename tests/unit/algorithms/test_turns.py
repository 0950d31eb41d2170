"""Turns are runs of sampled tokens, and never cross sequences."""

import torch

from rl.algorithms.turns import count_tokens, find_turns
from tests.support.reward_batches import reward_batch


def test_every_run_of_sampled_tokens_is_a_turn() -> None:
    batch = reward_batch([1, 1, 1], masks=[[1, 1, 0, 1], [1], [0, 1]])
    turns = find_turns(batch)
    assert turns.starts.tolist() == [1, 4, 6, 9]
    assert turns.sequences.tolist() == [0, 0, 1, 2]
    assert turns.of_token.tolist() == [-1, 0, 0, -1, 1, -1, 2, -1, -1, 3]


def test_marks_are_counted_by_turn_and_only_inside_turns() -> None:
    batch = reward_batch([1], masks=[[1, 1, 0, 1, 1, 1]])
    marks = torch.tensor([1, 1, 1, 1, 0, 1, 0], dtype=torch.bool)
    assert count_tokens(marks, find_turns(batch)).tolist() == [2, 1]
