"""On-policy distillation (Agarwal et al. 2024, "GKD"; one sampled token per position), the estimator.

    A_t = lp_teacher,t - lp_prev,t

The student samples, the teacher scores: its log-probability relative to the student's own is the advantage of each
token, which is minus the k1 estimate of KL(student || teacher). Rewards are not used. The loss is that of policy
gradients without a ratio (`loss_fn.disable_ppo_ratio`), weighted with `icepop`. The teacher's column comes from a
training loop that has one; no estimator of the `grpo` section is this one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rl.algorithms.advantages import voting_tokens
from rl.algorithms.algorithm import Need
from rl.core.batch import TrainBatch


@dataclass(frozen=True)
class OnPolicyDistillation:
    """The estimator."""

    needs: frozenset[Need] = frozenset({Need.PREV, Need.TEACHER})

    def __call__(self, batch: TrainBatch) -> dict[str, Tensor]:
        """Return {"advantages": [T] float32}.

        Raises:
            ValueError: the batch lacks one of the two columns.
        """
        if batch.teacher_logprobs is None or batch.prev_logprobs is None:
            raise ValueError("on-policy distillation needs the columns teacher_logprobs and prev_logprobs")
        gap = (batch.teacher_logprobs - batch.prev_logprobs).detach()
        return {"advantages": torch.where(voting_tokens(batch), gap, 0.0)}
