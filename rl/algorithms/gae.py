"""Generalised advantage estimation (Schulman et al. 2016, equation 16), with VAPO's two lambdas (Yue et al. 2025).

Over the tokens that the policy sampled, of each sequence by itself, with V = 0 after the last of them:

    delta_t = R_t + gamma V_{t+1} - V_t
    A_t     = delta_t + gamma lambda A_{t+1}
    return_t = A_t + V_t

"t + 1" is the next *sampled* token: what a tool or a user said in between neither bootstraps nor decays (A and V are
carried over it). R is the terminal reward at the last sampled token, less the KL charge of each. VAPO:
returns with lambda_value (1: unbiased), advantages with lambda_policy, which for a response of l tokens is
1 - 1 / (alpha l), so that long responses are not decayed to nothing.

The recurrence is linear, hence an associative scan: log2(T) passes over all tokens of all sequences at once.
The values come from a training loop that has a critic; no estimator of the `grpo` section is this one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rl.algorithms.advantages import voting_tokens
from rl.algorithms.algorithm import Need
from rl.algorithms.kl_in_reward import KL_NEEDS, RewardKl
from rl.algorithms.whitening import whiten_unbiased
from rl.core.batch import TrainBatch

_WHITENING_EPSILON = 1e-8


@dataclass(frozen=True)
class GAE:
    """The estimator.

    Attributes:
        gamma: Discount per token.
        lambda_: Decay of the estimate, where neither of the next two says otherwise.
        lambda_value: Decay for the returns that the critic learns.
        lambda_policy: Decay for the advantages.
        length_alpha: VAPO's alpha; above 0 it makes the advantages' decay depend on the response's length.
        normalize: Whether advantages are whitened over the step's tokens.
        kl: What each token is charged, or None.
    """

    gamma: float = 1.0
    lambda_: float = 0.95
    lambda_value: float | None = None
    lambda_policy: float | None = None
    length_alpha: float = 0.0
    normalize: bool = True
    kl: RewardKl | None = None

    @property
    def needs(self) -> frozenset[Need]:
        """Values, and both sides of the KL where there is one."""
        return frozenset({Need.VALUES}) | (frozenset() if self.kl is None else KL_NEEDS)

    def __call__(self, batch: TrainBatch) -> dict[str, Tensor]:
        """Return {"advantages": [T] float32, "returns": [T] float32}; both 0 off the valid sampled tokens.

        Raises:
            ValueError: the batch lacks a needed column.
        """
        if batch.values is None:
            raise ValueError("generalised advantage estimation needs the column values")
        votes = voting_tokens(batch)
        index = votes.nonzero().squeeze(1)
        owners = batch.sequence_ids[index]
        rewards = self._token_rewards(batch, index, owners)
        values = batch.values[index].to(torch.float64)
        errors = td_errors(rewards, values, owners, self.gamma)
        lambda_value = self.lambda_ if self.lambda_value is None else self.lambda_value
        returns = discounted_sums(errors, torch.full_like(errors, self.gamma * lambda_value), owners) + values
        advantages = discounted_sums(errors, self.gamma * self._policy_lambdas(owners), owners)
        columns = {"advantages": _scatter(advantages, index, votes), "returns": _scatter(returns, index, votes)}
        if self.normalize:
            columns["advantages"] = whiten_unbiased(columns["advantages"], votes, _WHITENING_EPSILON)
        return columns

    def _token_rewards(self, batch: TrainBatch, index: Tensor, owners: Tensor) -> Tensor:
        """Return R of the tokens at `index`, [K] float64. Each sequence of a forked rollout is paid."""
        rewards = torch.zeros(index.numel(), dtype=torch.float64)
        if self.kl is not None:
            rewards -= self.kl(batch)[index].to(torch.float64)
        return rewards + torch.where(_has_next(owners), 0.0, batch.rewards.to(torch.float64)[owners])

    def _policy_lambdas(self, owners: Tensor) -> Tensor:
        """Return the decay of each token's advantage, [K] float64."""
        if self.length_alpha > 0:
            lengths = torch.bincount(owners)[owners].to(torch.float64)
            return adaptive_lambda(lengths, self.length_alpha)
        fixed = self.lambda_ if self.lambda_policy is None else self.lambda_policy
        return torch.full((owners.numel(),), fixed, dtype=torch.float64)


def adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """Return clamp(1 - 1 / max(alpha l, 1), 0, 1) for response lengths l in tokens (VAPO: Yue et al. 2025)."""
    return (1 - 1 / (alpha * lengths).clamp(min=1)).clamp(0, 1)


def td_errors(rewards: Tensor, values: Tensor, owners: Tensor, gamma: float) -> Tensor:
    """Return R_t + gamma V_{t+1} - V_t ([K]); V is 0 after the last token of each owner.

    Args:
        rewards: [K] float64.
        values: [K] float64, of the state before the token.
        owners: [K] int64, ascending: the sequence of each token.
        gamma: Discount.
    """
    following = torch.cat([values[1:], values.new_zeros(1)])[: values.numel()]
    return rewards + gamma * torch.where(_has_next(owners), following, 0.0) - values


def discounted_sums(terms: Tensor, factors: Tensor, owners: Tensor) -> Tensor:
    """Return x with x_t = terms_t + factors_t x_{t+1}, x = 0 after the last token of each owner.

    Doubling: after pass p, x_t holds the terms of 2^p tokens and the factor is the product over as many, so a sequence
    of n tokens takes log2(n) passes over flat tensors, whatever number of sequences there is.

    Args:
        terms: [K] float64.
        factors: [K] float64.
        owners: [K] int64, ascending.
    """
    sums, reach = terms.clone(), torch.where(_has_next(owners), factors, 0.0)
    longest = int(torch.bincount(owners).max()) if owners.numel() else 0
    step = 1
    while step < longest:
        # A factor that reaches beyond its sequence is 0, so what stands there does not matter.
        sums[:-step] += reach[:-step] * sums[step:]
        reach[:-step] = reach[:-step] * reach[step:]
        step *= 2
    return sums


def _has_next(owners: Tensor) -> Tensor:
    """Return [K] bool: whether the next token belongs to the same owner."""
    if owners.numel() == 0:
        return torch.zeros(0, dtype=torch.bool)
    return torch.cat([owners[1:] == owners[:-1], torch.zeros(1, dtype=torch.bool)])


def _scatter(values: Tensor, index: Tensor, votes: Tensor) -> Tensor:
    return torch.zeros(votes.numel()).index_put((index,), values.to(torch.float32))
