"""What an environment says in the middle of a rollout has no part in any loss, whatever stands at its places."""

from typing import Any

import pytest
import torch

from rl.algorithms.config import LossConfig
from rl.algorithms.objective import parse_objective
from rl.core.batch import TrainBatch
from tests.support.rollouts import make_completion, make_group, make_rollout

VOCABULARY = 12
IS = {"use_importance_sampling_correction": True}
TRUNCATED = {**IS, "truncated_importance_sampling_ratio": 2.0}
LOSSES: list[dict[str, Any]] = [
    {},
    {"token_level_loss": False},
    {"sequence_level_importance_ratios": True, "token_level_loss": False},
    {"use_cispo": True},
    {"disable_ppo_ratio": True},
    {"ratio_clip_c": 3.0},
    {"entropy_coef": 0.1},
    {"positive_example_nll_weight": 0.5},
    {"use_on_policy_kl_approximation": True},
    IS,
    {**TRUNCATED, "truncated_importance_sampling_type": "tis"},
    {**TRUNCATED, "truncated_importance_sampling_type": "icepop", "truncated_importance_sampling_ratio_min": 0.1},
    {**TRUNCATED, "truncated_importance_sampling_type": "seq-mask-tis", "truncated_importance_sampling_ratio_min": 0.1},
]


def two_turns() -> TrainBatch:
    """Two rollouts of two turns; what the columns hold off the sampled tokens is spoiled."""
    turns = [((1, 2), make_completion([3, 4])), ((1, 2, 3, 4, 5, 6, 7), make_completion([8, 9, 10]))]
    other = [((1, 2), make_completion([5])), ((1, 2, 5, 6), make_completion([7]))]
    rollouts = [make_rollout(turns, 1.0, rollout_id="0/0"), make_rollout(other, 0.0, rollout_id="0/1")]
    batch = TrainBatch.from_groups([make_group(0, rollouts)])
    draw = torch.Generator().manual_seed(0)
    columns = {
        name: torch.where(batch.loss_mask, values(batch, draw), torch.nan)
        for name in ("advantages", "prev_logprobs", "reference_logprobs", "generation_logprobs")
    }
    batch = batch.with_columns(**columns)
    return batch.with_counts(batch.count())


def values(batch: TrainBatch, draw: torch.Generator) -> torch.Tensor:
    return -1.0 - torch.rand(batch.num_tokens, generator=draw)


@pytest.mark.parametrize("changes", LOSSES, ids=str)
def test_the_gradient_at_observed_tokens_is_exactly_zero(changes: dict[str, Any]) -> None:
    batch = two_turns()
    loss = parse_objective(LossConfig(force_on_policy_ratio=False, **changes), single_update=False)
    draw = torch.Generator().manual_seed(1)
    # Row t holds the logits that predict token t.
    logits = torch.randn(batch.num_tokens, VOCABULARY, generator=draw, requires_grad=True)
    distribution = torch.log_softmax(logits, dim=-1)
    logprobs = distribution.gather(1, batch.tokens[:, None]).squeeze(1)
    entropy = -(distribution.exp() * distribution).sum(-1)
    loss(logprobs, entropy, batch).loss.backward()
    assert logits.grad is not None and bool(torch.isfinite(logits.grad).all())
    assert bool((logits.grad[~batch.loss_mask] == 0.0).all())
    assert bool(logits.grad[batch.loss_mask].any())
