"""TrainBatch lays rollouts out without loss, refuses impossible ones, and cuts without changing anything."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.core.batch import TrainBatch
from rl.core.errors import DataError
from rl.core.types import Completion, FinishReason, RolloutStatus, VersionSpan
from tests.support.rollouts import make_completion, make_group, make_rollout, random_groups


def test_single_turn_layout_masks_the_prompt_and_keeps_logprobs_and_versions() -> None:
    completion = Completion((5, 6), (-0.5, -0.25), FinishReason.STOP, (VersionSpan(3, 0, 1), VersionSpan(4, 1, 2)), "")
    batch = TrainBatch.from_groups([make_group(7, [make_rollout([((1, 2), completion)], reward=1.0)])])
    assert batch.tokens.tolist() == [1, 2, 5, 6]
    assert batch.offsets.tolist() == [0, 4]
    assert batch.loss_mask.tolist() == [False, False, True, True]
    assert batch.generation_logprobs.tolist() == [0.0, 0.0, -0.5, -0.25]
    assert batch.token_versions.tolist() == [-1, -1, 3, 4]
    assert (batch.group_ids.tolist(), batch.rewards.tolist(), batch.versions.tolist()) == ([7], [1.0], [[3, 4]])
    assert (batch.num_sequences, batch.num_tokens, batch.lengths.tolist()) == (1, 4, [4])


def test_multi_turn_layout_masks_environment_tokens() -> None:
    turns = [((1, 2), make_completion([3])), ((1, 2, 3, 9, 9), make_completion([4, 5], version=1))]
    batch = TrainBatch.from_groups([make_group(0, [make_rollout(turns)])])
    assert batch.tokens.tolist() == [1, 2, 3, 9, 9, 4, 5]
    assert batch.loss_mask.tolist() == [False, False, True, False, False, True, True]
    assert batch.versions.tolist() == [[0, 1]]


@pytest.mark.parametrize("second_prompt", [(1, 2, 8, 9), (1, 2), (2, 2, 3, 9)])
def test_a_turn_that_rewrites_history_is_a_data_error(second_prompt: tuple[int, ...]) -> None:
    turns = [((1, 2), make_completion([3])), (second_prompt, make_completion([4]))]
    with pytest.raises(DataError, match="turn 1.*does not begin"):
        TrainBatch.from_groups([make_group(0, [make_rollout(turns)])])


def test_an_empty_prompt_no_group_and_no_turn_are_data_errors() -> None:
    with pytest.raises(DataError, match="empty prompt"):
        TrainBatch.from_groups([make_group(0, [make_rollout([((), make_completion([4]))])])])
    with pytest.raises(DataError, match="at least one rollout"):
        TrainBatch.from_groups([])
    group = make_group(0, [make_rollout([((1,), make_completion([4]))])])
    with pytest.raises(DataError, match="no turn"):
        TrainBatch.from_groups([replace(group, rollouts=(replace(group.rollouts[0], turns=()),))])


@pytest.mark.parametrize(
    ("reward", "status"),
    [
        (math.nan, RolloutStatus.OK),
        (math.inf, RolloutStatus.OK),
        (1.0, RolloutStatus.REWARD_ERROR),
        (0.0, RolloutStatus.REWARD_TIMEOUT),
        (0.0, RolloutStatus.REWARD_INVALID),
    ],
)
def test_a_failed_rollout_has_weight_zero_and_reward_nan(reward: float, status: RolloutStatus) -> None:
    good = make_rollout([((1,), make_completion([2]))], reward=1.0)
    bad = make_rollout([((1,), make_completion([2]))], reward=reward, status=status)
    batch = TrainBatch.from_groups([make_group(0, [good, bad])])
    assert batch.valid.tolist() == [True, False]
    assert batch.sample_weights.tolist() == [1.0, 0.0]
    assert batch.rewards[0] == 1.0 and torch.isnan(batch.rewards[1])
    assert batch.token_weights.tolist() == [0.0, 1.0, 0.0, 0.0]


def test_columns_of_the_wrong_length_dtype_or_name_are_refused() -> None:
    batch = TrainBatch.from_groups(random_groups(0))
    with pytest.raises(ValueError, match="advantages must be"):
        batch.with_columns(advantages=torch.zeros(batch.num_tokens - 1))
    with pytest.raises(ValueError, match="advantages must be"):
        batch.with_columns(advantages=torch.zeros(batch.num_tokens, dtype=torch.float64))
    with pytest.raises(ValueError, match="unknown columns"):
        batch.with_columns(advantage=torch.zeros(batch.num_tokens))


def test_impossible_offsets_and_an_unmasked_first_position_are_refused() -> None:
    batch = TrainBatch.from_groups(random_groups(0))
    with pytest.raises(ValueError, match="offsets end at"):
        replace(batch, offsets=batch.offsets - batch.offsets.eq(batch.num_tokens).long())
    with pytest.raises(ValueError, match="no tokens"):
        replace(batch, offsets=torch.where(torch.arange(batch.offsets.numel()) == 1, 0, batch.offsets))
    with pytest.raises(ValueError, match="first position"):
        replace(batch, loss_mask=torch.ones_like(batch.loss_mask))


@settings(deadline=None)
@given(seed=st.integers(0, 20), size=st.integers(1, 20))
def test_splitting_or_sharding_and_joining_gives_back_every_column(seed: int, size: int) -> None:
    batch = TrainBatch.from_groups(random_groups(seed, num_groups=3, group_size=3))
    batch = batch.with_columns(advantages=torch.arange(batch.num_tokens, dtype=torch.float32))
    for parts in (batch.split(size), batch.shard(size)):
        for name in ("tokens", "loss_mask", "generation_logprobs", "token_versions", "advantages"):
            assert torch.equal(torch.cat([vars(part)[name] for part in parts]), vars(batch)[name])
        for name in ("group_ids", "rewards", "valid", "sample_weights", "versions", "lengths"):
            joined = torch.cat([part.lengths if name == "lengths" else vars(part)[name] for part in parts])
            assert torch.equal(joined, batch.lengths if name == "lengths" else vars(batch)[name])
    assert len(batch.shard(size)) == size
    sizes = [part.num_sequences for part in batch.shard(size)]
    assert max(sizes) - min(sizes) <= 1


def test_select_takes_sequences_in_the_asked_order() -> None:
    batch = TrainBatch.from_groups(random_groups(1))
    picked = batch.select([5, 0])
    five = batch.tokens[batch.offsets[5] : batch.offsets[6]].tolist()
    zero = batch.tokens[batch.offsets[0] : batch.offsets[1]].tolist()
    assert picked.tokens.tolist() == five + zero
    assert picked.sequence_ids.tolist() == [0] * len(five) + [1] * len(zero)


def test_the_version_mark_survives_cutting() -> None:
    batch = TrainBatch.from_groups(random_groups(1)).at_version(4)
    assert [part.policy_version for part in batch.shard(2)] == [4, 4]


def _numbered(count: int) -> TrainBatch:
    rollouts = [make_rollout([((1,), make_completion([2] * (1 + number % 3)))]) for number in range(count)]
    batch = TrainBatch.from_groups([make_group(0, rollouts)])
    return batch.with_columns(group_ids=torch.arange(count))


@pytest.mark.parametrize(
    ("count", "update", "ranks", "expected"),
    [
        (8, 8, 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (8, 4, 2, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (5, 5, 2, [[0, 1, 2], [3, 4]]),
        (5, 5, 4, [[0, 1], [2], [3], [4]]),
        (2, 2, 4, [[0], [], [1], []]),
    ],
)
def test_updates_are_consecutive_and_each_is_cut_evenly(
    count: int, update: int, ranks: int, expected: list[list[int]]
) -> None:
    shards = [chunk.shard(ranks) for chunk in _numbered(count).split(update)]
    by_rank = [[number for chunk in shards for number in chunk[rank].group_ids.tolist()] for rank in range(ranks)]
    assert by_rank == expected


def test_selecting_by_the_inverse_order_undoes_a_selection() -> None:
    batch = _numbered(4)
    order = torch.tensor([1, 2, 3, 0])
    moved = batch.select(order)
    assert moved.group_ids.tolist() == [1, 2, 3, 0]
    back = moved.select(order.argsort())
    assert torch.equal(back.group_ids, batch.group_ids)
    assert torch.equal(back.tokens, batch.tokens)
    assert torch.equal(back.offsets, batch.offsets)


def test_positions_of_sequences_are_where_their_tokens_stand() -> None:
    batch = _numbered(4)
    assert batch.offsets.tolist() == [0, 2, 5, 9, 11]
    assert batch.positions_of([2, 0]).tolist() == [5, 6, 7, 8, 0, 1]
    assert torch.equal(batch.tokens[batch.positions_of([3, 1])], batch.select([3, 1]).tokens)


def test_counts_and_their_mark_survive_cutting() -> None:
    batch = _numbered(4).with_columns(sample_weights=torch.tensor([1.0, 0.5, 0.0, 1.0]))
    counts = batch.count()
    assert (counts.tokens, counts.sequences) == (1 + 2 * 0.5 + 1, 2.5)
    assert [part.counts for part in batch.with_counts(counts).select([3, 1, 0]).split(2)] == [counts, counts]
