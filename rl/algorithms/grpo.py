"""Group Relative Policy Optimization (Shao et al. 2024, "DeepSeekMath", section 4), assembled from its parts.

A prompt is answered several times; each answer's advantage is its reward relative to its siblings; the policy maximises
the clipped surrogate of those advantages, with an optional KL penalty against a frozen reference.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from rl.algorithms.advantages import broadcast_to_tokens, group_advantages
from rl.algorithms.algorithm import Algorithm, LossFunction, Need
from rl.algorithms.config import GRPOConfig, LossConfig
from rl.algorithms.losses import ClippedPolicyLoss
from rl.core.batch import TrainBatch
from rl.core.errors import ConfigError


class GRPO:
    """The algorithm; see `build_grpo`."""

    def __init__(self, config: GRPOConfig, loss: ClippedPolicyLoss) -> None:
        self._config = config
        self._loss = loss

    @property
    def needs(self) -> frozenset[Need]:
        """PREV when several optimizer steps share a batch, REFERENCE when the loss has a KL term."""
        needs = {Need.PREV} if self._loss.uses_prev else set()
        return frozenset(needs | ({Need.REFERENCE} if self._loss.uses_reference else set()))

    @property
    def losses(self) -> Mapping[str, LossFunction]:
        """One model is trained: the policy."""
        return {"policy": self._loss}

    def advantages(self, batch: TrainBatch) -> dict[str, Tensor]:
        """Return {"advantages": [T]}."""
        by_sequence = group_advantages(
            batch.rewards,
            batch.valid,
            batch.group_ids,
            leave_one_out=self._config.use_leave_one_out_baseline,
            normalize=self._config.normalize_rewards,
        )
        if self._config.shuffle_advantages:
            by_sequence = shuffle(by_sequence, batch, self._config.seed)
        return {"advantages": broadcast_to_tokens(by_sequence, batch)}


def shuffle(by_sequence: Tensor, batch: TrainBatch, seed: int) -> Tensor:
    """Permute advantages over the valid sequences of the step: a control in which nothing can be learned.

    The permutation follows from the seed and the step's first group, so a resumed run draws the same one.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + int(batch.group_ids.min()))
    rows = batch.valid.nonzero().squeeze(1)
    shuffled = by_sequence.clone()
    shuffled[rows] = by_sequence[rows[torch.randperm(rows.numel(), generator=generator)]]
    return shuffled


def build_grpo(grpo: GRPOConfig, loss: LossConfig, single_update: bool) -> Algorithm:
    """Build the algorithm.

    Args:
        grpo: The `grpo` section.
        loss: The `loss_fn` section.
        single_update: Whether one optimizer step consumes the whole batch. Then the policy at the start of the step is
            the one in the loss, and its log-probabilities need no pass of their own.

    Raises:
        ConfigError: the loss forces an on-policy ratio but the batch is used for several optimizer steps.
    """
    if loss.force_on_policy_ratio and not single_update:
        raise ConfigError(
            "loss_fn.force_on_policy_ratio=true needs one optimizer step per RL step: set "
            "policy.train_global_batch_size to grpo.num_prompts_per_step x grpo.num_generations_per_prompt, or null"
        )
    return GRPO(grpo, ClippedPolicyLoss(loss, uses_prev=not single_update))
