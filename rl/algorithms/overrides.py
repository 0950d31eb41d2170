"""What is done to advantages after the estimator: overrides of flagged turns, then the clip.

In YAML:
    grpo: {invalid_tool_call_advantage: -5.0, malformed_thinking_advantage: -2.0, advantage_clip_low: -5.0}

A turn whose form is at fault is told so itself, whatever the rest of its rollout earned.
"""

import torch
from torch import Tensor

from rl.algorithms.advantages import voting_tokens
from rl.core.batch import FLAG_BITS, TrainBatch
from rl.core.types import TurnFlag


def override_turns(
    advantages: Tensor, batch: TrainBatch, *, invalid_tool_call: float | None, malformed_thinking: float | None
) -> Tensor:
    """Return [T] float32 with the given value on all tokens of flagged turns of valid rollouts.

    A malformed tool call goes before malformed thinking, where a turn has both.
    """
    values = {TurnFlag.MALFORMED_THINKING: malformed_thinking, TurnFlag.INVALID_TOOL_CALL: invalid_tool_call}
    for flag, value in values.items():
        if value is not None and batch.turn_flags is not None:
            flagged = ((batch.turn_flags & FLAG_BITS[flag]) != 0) & voting_tokens(batch)
            advantages = torch.where(flagged, value, advantages)
    return advantages


def clip_advantages(advantages: Tensor, low: float | None, high: float | None) -> Tensor:
    """Return [T] float32 within [low, high]; None bounds nothing. low <= 0 <= high, so that 0 stays 0."""
    return advantages if low is None and high is None else advantages.clamp(low, high)
