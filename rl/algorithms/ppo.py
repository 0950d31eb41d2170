"""Proximal Policy Optimization's surrogate (Schulman et al. 2017, equation 7), with the extensions of two later papers.

With r = p / p_prev of each token and advantage A, the loss to minimise is

    l = max(-A r, -A clamp(r, 1 - low, 1 + high))

Decoupled bounds (clip-higher) are DAPO's (Yu et al. 2025, equation 10). Dual clip (Ye et al. 2020, equation 5) bounds
the loss of bad tokens whose ratio has run away: for A < 0, l <- min(l, -A c), c > 1.

YAML: the default; `ratio_clip_min`, `ratio_clip_max`, `ratio_clip_c`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rl.algorithms.counted_tokens import CountedTokens


@dataclass(frozen=True)
class TokenRatio:
    """r_t = exp(logprob - prev_logprob), one per token; the log-ratio is kept within bounds that overflow sets."""

    def factor(self, tokens: CountedTokens) -> Tensor:
        """Return what the advantage multiplies, [K] with gradient."""
        return torch.exp(tokens.log_ratios())

    def observed(self, tokens: CountedTokens) -> Tensor:
        """Return the ratio that metrics report, [K] without gradient."""
        return self.factor(tokens).detach()


@dataclass(frozen=True)
class Clip:
    """The clipped surrogate.

    Attributes:
        low: The ratio is clipped to at least 1 - low.
        high: The ratio is clipped to at most 1 + high.
        dual: The constant c, or None for no dual clip.
    """

    low: float
    high: float
    dual: float | None = None

    def clamp(self, ratios: Tensor) -> Tensor:
        """Return the clipped ratios."""
        return ratios.clamp(1 - self.low, 1 + self.high)

    def losses(self, factor: Tensor, tokens: CountedTokens) -> Tensor:
        """Return l of each token, [K]."""
        advantages = tokens.advantages
        losses = torch.maximum(-advantages * factor, -advantages * self.clamp(factor))
        if self.dual is None:
            return losses
        return torch.where(advantages < 0, torch.minimum(losses, -advantages * self.dual), losses)

    def binding(self, ratios: Tensor, advantages: Tensor) -> Mapping[str, Tensor]:
        """Say for each token which bound takes its gradient away, [K] bool by metric name."""
        negative = advantages < 0
        dual = torch.zeros_like(negative) if self.dual is None else negative & (ratios > self.dual)
        return {
            "clipfrac_low": negative & (ratios < 1 - self.low),
            "clipfrac_high": (advantages > 0) & (ratios > 1 + self.high),
            "dual_clipfrac": dual,
        }
