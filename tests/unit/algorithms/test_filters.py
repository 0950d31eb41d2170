"""Filters take weight, never votes: dynamic sampling, the overlong filter, the log-probability filter."""

import math
from dataclasses import replace

import pytest

from rl.algorithms.filters import (
    drop_by_logprob_error,
    drop_truncated,
    has_varied_rewards,
    keep_group,
    keep_group_by_component,
)
from rl.algorithms.grpo import GRPO
from rl.core.types import RolloutStatus
from tests.support.reward_batches import NAN, by_sequence, reward_batch
from tests.support.rollouts import make_completion, make_group, make_rollout


@pytest.mark.parametrize(
    ("rewards", "varied"),
    [
        ([1, 1, 1, 1], False),
        ([0, 0, 0, 0], False),
        ([1, 0, 1, 0], True),
        ([1, 0, 0, 0], True),
        ([0.1, 0.1, 0.1], False),
        ([1 / 3] * 7, False),
        ([0.1 + 0.2, 0.3], False),
        ([0.3, 0.30001], True),
        ([0.5], False),
        ([], False),
    ],
)
def test_only_groups_with_unlike_rewards_teach(rewards: list[float], varied: bool) -> None:
    assert has_varied_rewards(rewards) is varied


@pytest.mark.parametrize(("failed_reward", "kept"), [(0.0, False), (NAN, False)])
def test_failed_rollouts_have_no_say_in_whether_a_group_is_kept(failed_reward: float, kept: bool) -> None:
    turn = ([1, 2], make_completion([3]))
    failed = make_rollout([turn], failed_reward, RolloutStatus.REWARD_TIMEOUT)
    group = make_group(0, [make_rollout([turn], 1.0), make_rollout([turn], 1.0), failed])
    assert keep_group(group) is kept
    assert keep_group(make_group(0, [*group.rollouts, make_rollout([turn], 0.0)]))


@pytest.mark.parametrize(
    ("parts", "kept"),
    [
        ([{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}], True),
        ([{"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 0.0}], False),
        ([{"a": 1.0}, {"a": 1.0, "b": 0.0}], False),
        ([{}, {}], False),
    ],
)
def test_equal_sums_of_unlike_components_are_kept_where_components_count(
    parts: list[dict[str, float]], kept: bool
) -> None:
    turn = ([1, 2], make_completion([3]))
    rollouts = [replace(make_rollout([turn], 1.0), reward_components=components) for components in parts]
    failed = replace(make_rollout([turn], NAN), reward_components={"a": 7.0})
    assert keep_group_by_component(make_group(0, [*rollouts, failed])) is kept
    assert keep_group(make_group(0, rollouts)) is False


def test_truncated_responses_lose_their_weight_and_keep_their_vote() -> None:
    batch = reward_batch([1, 0, 0, NAN], truncated=[False, True, False, True])
    filtered, metrics = drop_truncated(batch)
    assert filtered.sample_weights.tolist() == [1, 0, 1, 0]
    assert metrics == {"num_overlong_filtered": 1.0}
    assert by_sequence(GRPO()(filtered)["advantages"], batch) == by_sequence(GRPO()(batch)["advantages"], batch)


def test_when_all_are_truncated_nothing_is_left_to_train_on() -> None:
    filtered, _ = drop_truncated(reward_batch([1, 0], truncated=[True, True]))
    counts = filtered.count()
    assert (counts.tokens, counts.sequences) == (0, 0)


@pytest.mark.parametrize(("threshold", "weight"), [(1.3, 0.0), (1.5, 1.0), (1.3243607, 1.0), (None, 1.0)])
def test_a_sequence_above_the_threshold_is_dropped(threshold: float | None, weight: float) -> None:
    # The generator says -1 everywhere: |e| = [.5, 0].
    batch = reward_batch([1], masks=[[1, 0, 1]], prev_logprobs=[-1.5, 99, -1])
    filtered, metrics = drop_by_logprob_error(batch, threshold)
    assert filtered.sample_weights.tolist() == [weight]
    assert metrics["max_seq_mult_prob_error"] == pytest.approx(1.3243606)


def test_the_error_is_measured_before_and_after() -> None:
    gaps = [0, math.log(1.2), math.log(5), math.log(3)]
    batch = reward_batch([0, 1, 1, 0, NAN], [1] * 5, prev_logprobs=[-1 + gap for gap in gaps] + [NAN])
    filtered, metrics = drop_by_logprob_error(batch, 2.0)
    assert filtered.sample_weights.tolist() == [1, 1, 0, 0, 0]
    assert filtered.valid.tolist() == [True] * 4 + [False]
    assert metrics == pytest.approx(
        {
            "max_seq_mult_prob_error": 5.0,
            "mean_seq_mult_prob_error": 2.55,
            "min_seq_mult_prob_error": 1.0,
            "max_seq_mult_prob_error_after_mask": 1.2,
            "mean_seq_mult_prob_error_after_mask": 1.1,
            "min_seq_mult_prob_error_after_mask": 1.0,
            "num_masked_seqs_by_logprob_error": 2.0,
            "masked_correct_pct": 0.5,
        }
    )


def test_correct_means_the_raw_reward() -> None:
    batch = reward_batch([1.0], [1], prev_logprobs=[5]).with_columns(rewards=reward_batch([-7.0]).rewards)
    assert drop_by_logprob_error(batch, 2.0)[1]["masked_correct_pct"] == 1.0


@pytest.mark.parametrize("broken", [NAN, math.inf, -math.inf, 2000.0])
def test_an_error_that_is_no_number_is_above_every_threshold(broken: float) -> None:
    batch = reward_batch([1, 0], [1, 1], prev_logprobs=[broken, -1])
    filtered, metrics = drop_by_logprob_error(batch, 1e9)
    assert filtered.sample_weights.tolist() == [0, 1]
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["max_seq_mult_prob_error"] == 1.0


def test_dropped_sequences_still_vote() -> None:
    batch = reward_batch([1, 0, 0], [1] * 3, prev_logprobs=[5, -1, -1])
    filtered, _ = drop_by_logprob_error(batch, 2.0)
    assert by_sequence(GRPO()(filtered)["advantages"], batch) == by_sequence(GRPO()(batch)["advantages"], batch)


def test_without_the_column_nothing_is_measured_and_a_threshold_is_an_error() -> None:
    batch = reward_batch([1])
    assert drop_by_logprob_error(batch, None) == (batch, {})
    with pytest.raises(ValueError, match="prev_logprobs"):
        drop_by_logprob_error(batch, 2.0)


def test_sequences_without_weight_are_not_measured() -> None:
    filtered, metrics = drop_by_logprob_error(reward_batch([NAN], prev_logprobs=[5, 5]), 2.0)
    assert metrics == {"num_masked_seqs_by_logprob_error": 0.0}
    assert filtered.sample_weights.tolist() == [0]
