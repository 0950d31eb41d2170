"""DAPO (Yu et al. 2025): GRPO's advantages with four changes; this file holds the one that touches the reward.

Soft overlong punishment (section 3.4, equation 13), for a response of l generated tokens:

    p(l) = 0                                        l <= L_max - L_buffer
         = -penalty (l - (L_max - L_buffer)) / L_buffer
         = -penalty                                 l >= L_max

The other three are parts of their own: clip-higher (`rl.algorithms.ppo`), dynamic sampling (`keep_group` in
`rl.algorithms.filters`), and the mean over tokens.

In YAML:
    grpo:
      use_dynamic_sampling: true
      reward_shaping:
        {enabled: true, max_response_length: 512, overlong_buffer_length: 128, overlong_buffer_penalty: 1.0}
    loss_fn: {ratio_clip_min: 0.2, ratio_clip_max: 0.28, token_level_loss: true, reference_policy_kl_penalty: 0}
    policy: {train_global_batch_size: 32}    # several optimizer steps per RL step: in the first one every ratio is 1
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rl.algorithms.advantages import by_rollout
from rl.algorithms.algorithm import Staged
from rl.core.batch import TrainBatch


@dataclass(frozen=True)
class OverlongPunishment:
    """The transform.

    Attributes:
        max_length: L_max, in generated tokens.
        buffer_length: L_buffer, in generated tokens; at least 1.
        penalty: Its largest size.
    """

    max_length: int
    buffer_length: int
    penalty: float

    def of_lengths(self, lengths: Tensor) -> Tensor:
        """Return p(l), <= 0, for lengths ([...] int64, generated tokens)."""
        overlong = (lengths - (self.max_length - self.buffer_length)).to(torch.float64) / self.buffer_length
        return -self.penalty * overlong.clamp(0, 1)

    def __call__(self, batch: TrainBatch) -> Staged:
        """Add p(l) to the rewards. l counts what the policy sampled: over all turns, prompts and answers left out."""
        rollouts = by_rollout(batch)
        owners = rollouts.of_sequence[batch.sequence_ids[batch.loss_mask]]
        penalties = self.of_lengths(torch.bincount(owners, minlength=rollouts.rows.numel()))
        rewards = batch.rewards + penalties[rollouts.of_sequence].to(torch.float32)
        hit = float(((penalties < 0) & rollouts.valid).sum())
        return batch.with_columns(rewards=rewards), {"reward_penalties/overlong": hit}
