"""Group Sequence Policy Optimization (Zheng et al. 2025): what the paper adds, the ratio of a whole sequence.

Equation 7: s_b = (p(y_b) / p_prev(y_b))^(1 / |y_b|) = exp(mean_t(logprob_t - prev_logprob_t)), the same for all tokens
of sequence b; the gradient flows through it, 1 / |y_b| of it to each token. It takes the token ratio's place in the
clipped surrogate (`rl.algorithms.ppo`; equation 5), whose bounds are some hundred times tighter in the paper
(3e-4 / 4e-4). A correction for the generator is then per sequence too.

YAML: `sequence_level_importance_ratios: true`, `token_level_loss: false`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rl.algorithms.counted_tokens import CountedTokens


@dataclass(frozen=True)
class SequenceRatio:
    """s_b on each token of sequence b."""

    def factor(self, tokens: CountedTokens) -> Tensor:
        """Return what the advantage multiplies, [K] with gradient."""
        by_sequence = torch.exp(tokens.sequence_mean(tokens.log_ratios()))
        return by_sequence[tokens.owners]

    def observed(self, tokens: CountedTokens) -> Tensor:
        """Return the ratio that metrics report, [K] without gradient."""
        return self.factor(tokens).detach()
