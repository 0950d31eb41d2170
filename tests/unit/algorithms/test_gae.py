"""GAE equals its recurrence, over the sampled tokens alone, and does not loop over tokens."""

import pytest
import torch

from rl.algorithms.algorithm import Need
from rl.algorithms.gae import GAE, adaptive_lambda, discounted_sums
from rl.algorithms.kl_in_reward import RewardKl
from rl.core.batch import TrainBatch
from tests.support.reward_batches import NAN, reward_batch

V = [0.5, 0.6, 0.7]


def run(estimator: GAE, batch: TrainBatch) -> tuple[list[float], list[float]]:
    columns = estimator(batch)
    return columns["advantages"].tolist(), columns["returns"].tolist()


@pytest.mark.parametrize(
    ("gamma", "lambda_", "expected"),
    [
        (1.0, 1.0, [0.5, 0.4, 0.3]),
        (1.0, 0.95, [0.46575, 0.385, 0.3]),
        (0.99, 0.95, [0.446828575, 0.37515, 0.3]),
    ],
)
def test_vectors(gamma: float, lambda_: float, expected: list[float]) -> None:
    batch = reward_batch([1], [3], values=V)
    advantages, returns = run(GAE(gamma, lambda_, normalize=False), batch)
    assert advantages == pytest.approx([0, *expected])
    assert returns == pytest.approx([0, *[a + v for a, v in zip(expected, V, strict=True)]])


@pytest.mark.parametrize("masked_value", [9.0, NAN, -1e9])
def test_a_gap_is_stepped_over_whatever_the_critic_says_there(masked_value: float) -> None:
    batch = reward_batch([1], masks=[[1, 0, 1, 1]], values=[0.5, masked_value, 0.6, 0.7])
    advantages, returns = run(GAE(1.0, 0.95, normalize=False), batch)
    assert advantages == pytest.approx([0, 0.46575, 0, 0.385, 0.3])
    assert returns == pytest.approx([0, 0.96575, 0, 0.985, 1.0])


def test_values_after_the_response_do_not_bootstrap_into_it() -> None:
    batch = reward_batch([1], masks=[[1, 1, 0]], values=[0, 0, 100])
    assert run(GAE(1.0, 0.95, normalize=False), batch)[0] == pytest.approx([0, 0.95, 1.0, 0])


def test_with_both_lambdas_one_the_advantage_is_the_return_minus_the_value() -> None:
    batch = reward_batch([2, -1], [3, 2], values=[*V, 0.1, 0.2])
    advantages, returns = run(GAE(1.0, 1.0, normalize=False), batch)
    assert returns == pytest.approx([0, 2, 2, 2, 0, -1, -1])
    assert advantages == pytest.approx([0, 1.5, 1.4, 1.3, 0, -1.1, -1.2])


def test_whitening_is_over_the_sampled_tokens_of_the_step() -> None:
    advantages, returns = run(GAE(1.0, 0.95), reward_batch([1, NAN], [3, 2], values=[*V, NAN, NAN]))
    assert advantages == pytest.approx([0, 0.9913436, 0.0170921, -1.0084358, 0, 0, 0], abs=1e-5)
    assert returns == pytest.approx([0, 0.96575, 0.985, 1.0, 0, 0, 0])


def test_one_token_in_the_whole_batch_gets_zero() -> None:
    assert run(GAE(), reward_batch([1], [1], values=[0.3]))[0] == [0, 0]


@pytest.mark.parametrize(("length", "expected"), [(5, 0), (20, 0), (100, 0.8), (1000, 0.98)])
def test_lambda_grows_with_the_length(length: int, expected: float) -> None:
    assert adaptive_lambda(torch.tensor([length], dtype=torch.float64), 0.05).item() == pytest.approx(expected)


def test_returns_and_advantages_have_their_own_lambdas() -> None:
    batch = reward_batch([1], [3], values=V)
    advantages, returns = run(GAE(1.0, 0.5, lambda_value=1.0, lambda_policy=0.95, normalize=False), batch)
    assert advantages == pytest.approx([0, 0.46575, 0.385, 0.3])
    assert returns == pytest.approx([0, 1, 1, 1])


def test_a_short_response_has_lambda_zero_where_it_depends_on_the_length() -> None:
    batch = reward_batch([1, 1], [3, 3], values=[*V, *V])
    advantages, _ = run(GAE(1.0, 0.95, lambda_policy=0.9, length_alpha=0.05, normalize=False), batch)
    assert advantages[1:4] == pytest.approx([0.1, 0.1, 0.3])


def test_the_kl_is_charged_where_it_arises() -> None:
    batch = reward_batch([1], [2], values=[0, 0], prev_logprobs=[-1, -1], reference_logprobs=[-2, -1])
    estimator = GAE(1.0, 1.0, normalize=False, kl=RewardKl(0.1, "k2", 20.0, 10.0))
    assert run(estimator, batch)[0] == pytest.approx([0, 0.95, 1.0])
    assert estimator.needs == {Need.VALUES, Need.PREV, Need.REFERENCE}


def test_each_sequence_of_a_forked_rollout_is_paid() -> None:
    batch = reward_batch([1, 1], [2, 2], rollouts=[0, 0], values=[0, 0, 0, 0])
    assert run(GAE(1.0, 1.0, normalize=False), batch)[1] == pytest.approx([0, 1, 1, 0, 1, 1])


def test_sixteen_thousand_tokens_equal_the_plain_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [16384, 1, 7, 4097, 2]
    owners = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    terms = torch.randn(owners.numel(), generator=generator, dtype=torch.float64)
    factors = 0.9 + 0.1 * torch.rand(owners.numel(), generator=generator, dtype=torch.float64)
    expected, carried = torch.zeros_like(terms), 0.0
    for place in reversed(range(owners.numel())):
        last = place + 1 == owners.numel() or owners[place + 1] != owners[place]
        carried = float(terms[place]) + (0.0 if last else float(factors[place]) * carried)
        expected[place] = carried
    torch.testing.assert_close(discounted_sums(terms, factors, owners), expected, rtol=1e-9, atol=1e-9)


def test_undiscounted_sums_of_many_tokens_are_exact() -> None:
    ones = torch.ones(16384, dtype=torch.float64)
    sums = discounted_sums(ones, ones, torch.zeros(16384, dtype=torch.int64))
    assert torch.equal(sums, torch.arange(16384, 0, -1, dtype=torch.float64))


def test_no_token_at_all_is_no_error() -> None:
    nothing = torch.zeros(0, dtype=torch.float64)
    assert discounted_sums(nothing, nothing, torch.zeros(0, dtype=torch.int64)).numel() == 0
