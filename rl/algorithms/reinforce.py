"""The plain policy gradient (Williams 1992; Sutton and Barto 2018, equation 13.8): no ratio, nothing is clipped.

Two ways to write a loss whose gradient is -A grad(logprob):

    no ratio     l = -A logprob
    on-policy    l = -A exp(logprob - stop_gradient(logprob)), the ratio 1 by definition; its value is -A

With the advantage of a teacher's log-probability over the policy's, and ICE-POP for the generator's distance, the first
is on-policy distillation.

YAML: `disable_ppo_ratio: true`; `force_on_policy_ratio: true`, which needs one optimizer step per RL step.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rl.algorithms.counted_tokens import CountedTokens
from rl.algorithms.ppo import TokenRatio


@dataclass(frozen=True)
class NoRatio:
    """The log-probability in place of the ratio."""

    def factor(self, tokens: CountedTokens) -> Tensor:
        """Return what the advantage multiplies, [K] with gradient."""
        return tokens.logprobs

    def observed(self, tokens: CountedTokens) -> Tensor:
        """Return the ratio that metrics report, [K]: the true one, although the loss does not use it."""
        return TokenRatio().observed(tokens)


@dataclass(frozen=True)
class OnPolicyRatio:
    """1, with the gradient of the log-probability."""

    def factor(self, tokens: CountedTokens) -> Tensor:
        """Return what the advantage multiplies, [K] with gradient."""
        return torch.exp(tokens.logprobs - tokens.logprobs.detach())

    def observed(self, tokens: CountedTokens) -> Tensor:
        """Return the ratio that metrics report, [K]: the true one."""
        return TokenRatio().observed(tokens)


@dataclass(frozen=True)
class Unclipped:
    """l = -A factor."""

    def clamp(self, ratios: Tensor) -> Tensor:
        """Return the ratios as they are."""
        return ratios

    def losses(self, factor: Tensor, tokens: CountedTokens) -> Tensor:
        """Return l of each token, [K]."""
        return -tokens.advantages * factor

    def binding(self, ratios: Tensor, advantages: Tensor) -> Mapping[str, Tensor]:
        """Say that no token is clipped, [K] bool by metric name."""
        never = torch.zeros_like(ratios, dtype=torch.bool)
        return {"clipfrac_low": never, "clipfrac_high": never, "dual_clipfrac": never}
