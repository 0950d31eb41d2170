"""What holds for every estimator: votes, zeros, permutations, forks, and what must never matter."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl.algorithms.algorithm import Estimator
from rl.algorithms.dr_grpo import DrGRPO
from rl.algorithms.gae import GAE
from rl.algorithms.gdpo import GDPO
from rl.algorithms.grpo import GRPO
from rl.algorithms.kl_in_reward import RewardKl
from rl.algorithms.opd import OnPolicyDistillation
from rl.algorithms.raw_reward import RawReward
from rl.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from rl.algorithms.rloo import RLOO
from rl.core.batch import TrainBatch
from tests.support.reward_batches import NAN, by_sequence, reward_batch
from tests.support.rollouts import make_completion, make_group, make_rollout

BY_GROUP: dict[str, Estimator] = {
    "grpo": GRPO(leave_one_out=False),
    "grpo_leave_one_out": GRPO(leave_one_out=True),
    "rloo": RLOO(),
    "dr_grpo": DrGRPO(),
}
ALL: dict[str, Estimator] = {
    **BY_GROUP,
    "reinforce_plus_plus": ReinforcePlusPlus(minus_baseline=True),
    "reinforce_plus_plus_kl": ReinforcePlusPlus(minus_baseline=False, kl=RewardKl(0.1, "k3", 20.0, 10.0)),
    "gdpo": GDPO({"b": 0.5}),
    "raw_reward": RawReward(whiten=False),
    "raw_reward_whitened": RawReward(whiten=True),
    "gae": GAE(length_alpha=0.05),
    "opd": OnPolicyDistillation(),
}
REWARD = st.one_of(st.floats(-5, 5, width=32), st.just(NAN))


def build(rewards: list[float], lengths: list[int], groups: list[int], **options: list[int]) -> TrainBatch:
    """A batch with every column that an estimator may need."""
    generator = torch.Generator().manual_seed(len(rewards))
    total = sum(lengths)
    columns = {
        name: torch.randn(total, generator=generator).tolist()
        for name in ("prev_logprobs", "reference_logprobs", "teacher_logprobs", "values")
    }
    components = {"a": rewards, "b": [reward * reward if index % 2 else 1.0 for index, reward in enumerate(rewards)]}
    return reward_batch(rewards, lengths, groups=groups, components=components, **options, **columns)


def advantages_of(name: str, batch: TrainBatch) -> Tensor:
    return ALL[name](batch)["advantages"]


@pytest.mark.parametrize("name", BY_GROUP)
@settings(max_examples=25, deadline=None)
@given(rewards=st.lists(REWARD, min_size=1, max_size=10), num_groups=st.integers(1, 3))
def test_group_advantages_sum_to_zero_in_each_group(name: str, rewards: list[float], num_groups: int) -> None:
    groups = [index % num_groups for index in range(len(rewards))]
    batch = reward_batch(rewards, lengths=[1] * len(rewards), groups=groups)
    advantages = torch.tensor(by_sequence(advantages_of(name, batch), batch))
    sums = torch.zeros(num_groups).index_add(0, torch.tensor(groups), advantages)
    assert sums.tolist() == pytest.approx([0] * num_groups, abs=1e-3)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=25, deadline=None)
@given(rows=st.lists(st.tuples(REWARD, st.integers(1, 4), st.integers(0, 2)), min_size=1, max_size=8))
def test_advantages_follow_a_permutation_of_the_sequences(name: str, rows: list[tuple[float, int, int]]) -> None:
    rewards, lengths, groups = (list(column) for column in zip(*rows, strict=True))
    batch = build(rewards, lengths, groups)
    plain = batch.with_columns(advantages=advantages_of(name, batch))
    order = list(range(len(rows)))[::-1]
    mirrored = plain.select(order)
    again = advantages_of(name, mirrored)
    assert mirrored.advantages is not None
    assert again.isfinite().all()
    torch.testing.assert_close(again, mirrored.advantages, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ALL)
def test_a_failed_rollout_changes_nobody_and_gets_nothing(name: str) -> None:
    rewards, lengths, groups = [1.0, 0.0, 0.25, 2.0], [2, 3, 1, 2], [0, 0, 1, 1]
    without = build(rewards, lengths, groups)
    failed = build([*rewards, NAN], [*lengths, 2], [*groups, 0])
    # The same columns for the rollouts that both have; the failed one keeps NaN everywhere.
    for column in ("prev_logprobs", "reference_logprobs", "teacher_logprobs", "values"):
        values = torch.full((failed.num_tokens,), NAN)
        values[: without.num_tokens] = without.__dict__[column]
        failed = failed.with_columns(**{column: values})
    assert failed.reward_components is not None
    assert without.reward_components is not None
    components = torch.cat([without.reward_components, torch.full((1, 2), NAN)])
    failed = failed.with_columns(reward_components=components)
    expected, got = advantages_of(name, without), advantages_of(name, failed)
    torch.testing.assert_close(got[: without.num_tokens], expected)
    assert torch.all(got[without.num_tokens :] == 0)


@pytest.mark.parametrize("name", ALL)
def test_what_stands_off_the_sampled_tokens_does_not_matter(name: str) -> None:
    masks = [[1, 0, 1], [1, 1], [0, 1, 0, 1]]
    columns = ("prev_logprobs", "reference_logprobs", "teacher_logprobs", "values")
    results = []
    for noise in (7.0, math.inf, NAN):
        values = [0.5 * place if sampled else noise for place, sampled in enumerate(sum(masks, []))]
        components: dict[str, list[float]] = {"a": [1, 0, 2], "b": [0, 1, 1]}
        batch = reward_batch([1, 0, 2], masks=masks, components=components, **{name: values for name in columns})
        results.append(advantages_of(name, batch))
    assert all(torch.equal(result, results[0]) for result in results)
    assert results[0].isfinite().all()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("rewards", [[NAN, NAN], [NAN, 1.0], [1.0], [0.1, 0.1, 0.1]])
def test_too_few_votes_and_equal_rewards_give_numbers(name: str, rewards: list[float]) -> None:
    batch = build(rewards, [1] * len(rewards), [0] * len(rewards))
    assert advantages_of(name, batch).isfinite().all()


@pytest.mark.parametrize("name", sorted(ALL.keys() - {"gae", "opd", "reinforce_plus_plus_kl"}))
def test_all_sequences_of_a_forked_rollout_share_its_advantage(name: str) -> None:
    batch = build([1, 1, 0, 2], [2, 2, 2, 2], [0, 0, 0, 0], rollouts=[0, 0, 1, 2])
    advantages = by_sequence(advantages_of(name, batch), batch)
    assert advantages[0] == advantages[1] != advantages[2]


def test_groups_of_any_size_are_told_apart_by_id_also_where_their_text_is_the_same() -> None:
    turn = ([1, 2], make_completion([3]))
    rewards = [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]]
    groups = [
        make_group(number, [make_rollout([turn], reward) for reward in row]) for number, row in enumerate(rewards)
    ]
    batch = TrainBatch.from_groups(groups)
    advantages = by_sequence(DrGRPO()(batch)["advantages"], batch)
    assert advantages == pytest.approx(
        [0.75, -0.25, -0.25, -0.25, -2 / 3, 1 / 3, 1 / 3, 0.5, 0.5, -0.5, -0.5], abs=1e-6
    )


def test_every_sampled_token_of_every_turn_carries_the_signal_whatever_the_prompts_lengths() -> None:
    # Three turns whose prompts grow by 1, 3 and 2 tokens of the environment.
    turns = [
        ([1, 2], make_completion([3])),
        ([1, 2, 3, 4], make_completion([5, 6])),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], make_completion([10])),
    ]
    batch = TrainBatch.from_groups([make_group(0, [make_rollout(turns, 1.0), make_rollout(turns[:1], 0.0)])])
    advantages = DrGRPO()(batch)["advantages"]
    assert advantages[batch.loss_mask].tolist() == [0.5, 0.5, 0.5, 0.5, -0.5]
    assert torch.all(advantages[~batch.loss_mask] == 0)
