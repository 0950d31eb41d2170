"""The KL charge of each token, its clamps, and when there is one."""

import pytest

from rl.algorithms.config import LossConfig
from rl.algorithms.kl_in_reward import RewardKl
from tests.support.reward_batches import reward_batch


def test_each_sampled_token_is_charged_beta_times_the_clamped_estimate() -> None:
    batch = reward_batch([1], masks=[[1, 0, 1]], prev_logprobs=[-1, 0, -30], reference_logprobs=[-0.5, 9, -1])
    charges = RewardKl(0.1, "k3", 20.0, 10.0)(batch)
    assert charges.tolist() == pytest.approx([0, 0.01487212707, 0, 1.0])


def test_the_sections_settings_are_taken_over_and_off_is_none() -> None:
    loss = LossConfig(use_kl_in_reward=True, reference_policy_kl_penalty=0.2, reference_policy_kl_type="k1")
    assert RewardKl.from_config(loss) == RewardKl(0.2, "k1", 20.0, 10.0)
    assert RewardKl.from_config(LossConfig(reference_policy_kl_penalty=0.2)) is None


def test_a_missing_column_is_named() -> None:
    with pytest.raises(ValueError, match="prev_logprobs and reference_logprobs"):
        RewardKl(0.1, "k3", 20.0, 10.0)(reward_batch([1]))
