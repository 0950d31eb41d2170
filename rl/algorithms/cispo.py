"""CISPO (MiniMax 2025, "MiniMax-M1", equations 4 and 5): clip the weight, not the update.

The clipped ratio is a constant weight of the policy gradient, so a token outside the bounds still learns:

    l = -A stop_gradient(clamp(r, 1 - low, 1 + high)) logprob

YAML: `use_cispo: true`; the paper tunes the upper bound alone, for example `ratio_clip_min: 1.0`,
`ratio_clip_max: 5.0`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rl.algorithms.counted_tokens import CountedTokens


@dataclass(frozen=True)
class Cispo:
    """The surrogate.

    Attributes:
        low: The weight is at least 1 - low.
        high: The weight is at most 1 + high.
    """

    low: float
    high: float

    def clamp(self, ratios: Tensor) -> Tensor:
        """Return the clipped ratios."""
        return ratios.clamp(1 - self.low, 1 + self.high)

    def losses(self, factor: Tensor, tokens: CountedTokens) -> Tensor:
        """Return l of each token, [K]."""
        return -tokens.advantages * self.clamp(factor.detach()) * tokens.logprobs

    def binding(self, ratios: Tensor, advantages: Tensor) -> Mapping[str, Tensor]:
        """Say for each token which bound changes its weight, whatever its advantage, [K] bool by metric name."""
        return {
            "clipfrac_low": ratios < 1 - self.low,
            "clipfrac_high": ratios > 1 + self.high,
            "dual_clipfrac": torch.zeros_like(ratios, dtype=torch.bool),
        }
