"""Importance weights for tokens that another engine, or an older policy, sampled.

w = p_prev / p_generation, without gradient; a weight that is no finite number counts as 0. Per token, or per sequence
as the product over its tokens (with sequence ratios). Truncations of w in [low, high]:

    Raw            none
    Tis            clamp(w, low, high): truncated importance sampling (Ionides 2008; for two engines, Yao et al. 2025)
    IcePop         w where low <= w <= high, else 0 (Ling team 2025, "Every Step Evolves", section 3.3)
    SequenceMask   w where low <= g <= high, else 0, with g = exp(mean_t log w_t) of the token's sequence: the geometric
                   mean as the criterion, weights stay as they are

Tokens that a truncation drops still count in the denominators.

YAML: `use_importance_sampling_correction`, `truncated_importance_sampling_type` (tis | icepop | seq-mask-tis),
`truncated_importance_sampling_ratio` (high), `truncated_importance_sampling_ratio_min` (low).
"""

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

from rl.algorithms.counted_tokens import CountedTokens
from rl.core.metrics import Metric


class Level(enum.Enum):
    """What has one weight."""

    TOKEN = "token"
    SEQUENCE = "sequence"


@dataclass(frozen=True)
class Truncated:
    """Weights after truncation.

    Attributes:
        weights: [K] or [N] as the level says.
        is_outside: Weighted sum of what lay out of bounds; None where nothing is bounded.
    """

    weights: Tensor
    is_outside: Metric | None = None


def generator_weights(tokens: CountedTokens, level: Level) -> Tensor:
    """Return w without truncation, [K] for tokens or [N] for sequences."""
    log_weights = tokens.prev_logprobs.detach() - tokens.generation_logprobs
    if level is Level.SEQUENCE:
        log_weights = tokens.sequence_sum(log_weights)
    return torch.nan_to_num(torch.exp(log_weights), nan=0.0, posinf=0.0, neginf=0.0)


@dataclass(frozen=True)
class Off:
    """No correction. The weights are still computed, as a metric of the two engines' distance."""

    level: Level = Level.TOKEN
    applies = False

    def truncate(self, weights: Tensor, tokens: CountedTokens) -> Truncated:
        """Return the weights as they are."""
        return Truncated(weights)


@dataclass(frozen=True)
class Raw:
    """The whole weight."""

    level: Level = Level.TOKEN
    applies = True

    def truncate(self, weights: Tensor, tokens: CountedTokens) -> Truncated:
        """Return the weights as they are."""
        return Truncated(weights)


@dataclass(frozen=True)
class Tis:
    """Weights clamped to [low, high]."""

    low: float
    high: float
    level: Level = Level.TOKEN
    applies = True

    def truncate(self, weights: Tensor, tokens: CountedTokens) -> Truncated:
        """Clamp the weights."""
        outside = (weights < self.low) | (weights > self.high)
        return Truncated(weights.clamp(self.low, self.high), _outside_tokens(outside, tokens, self.level))


@dataclass(frozen=True)
class IcePop:
    """Weights out of [low, high] are 0; both ends belong to it."""

    low: float
    high: float
    level: Level = Level.TOKEN
    applies = True

    def truncate(self, weights: Tensor, tokens: CountedTokens) -> Truncated:
        """Drop the weights that are out of bounds."""
        outside = (weights < self.low) | (weights > self.high)
        kept = torch.where(outside, torch.zeros_like(weights), weights)
        return Truncated(kept, _outside_tokens(outside, tokens, self.level))


@dataclass(frozen=True)
class SequenceMask:
    """Token weights, 0 in sequences whose geometric mean is out of [low, high]; both ends belong to it."""

    low: float
    high: float
    level = Level.TOKEN
    applies = True

    def truncate(self, weights: Tensor, tokens: CountedTokens) -> Truncated:
        """Drop the weights ([K]) of whole sequences."""
        means = torch.exp(tokens.sequence_mean(tokens.prev_logprobs.detach() - tokens.generation_logprobs))
        inside = (means >= self.low) & (means <= self.high)
        kept = torch.where(inside[tokens.owners], weights, torch.zeros_like(weights))
        return Truncated(kept, tokens.per_sequence((~inside).to(weights.dtype)))


def _outside_tokens(outside: Tensor, tokens: CountedTokens, level: Level) -> Metric:
    by_token = outside if level is Level.TOKEN else outside[tokens.owners]
    return tokens.per_token(by_token.to(tokens.weights.dtype))
