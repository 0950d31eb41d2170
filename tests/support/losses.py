"""Short ways to evaluate a policy-gradient loss on sampled tokens in tests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl.algorithms.algorithm import LossSums
from rl.algorithms.config import LossConfig
from rl.algorithms.objective import parse_objective
from rl.algorithms.policy_gradient import PolicyGradientLoss
from rl.core.batch import TrainBatch
from rl.core.metrics import Counts, Per, finalize_metrics
from tests.support.rollouts import scatter_sampled

# Every option that changes which formula is computed, each with what it needs beside it.
CORRECTED = {
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_ratio": 2.0,
    "truncated_importance_sampling_ratio_min": 0.5,
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"disable_ppo_ratio": True},
    {"force_on_policy_ratio": True},
    {"sequence_level_importance_ratios": True, "token_level_loss": False},
    {"use_cispo": True},
    {"ratio_clip_c": 3.0},
    {"token_level_loss": False},
    {"token_level_loss": False, "sequence_loss_divisor": 3},
    {"entropy_coef": 0.1},
    {"positive_example_nll_weight": 0.1},
    {"reference_policy_kl_penalty": 1.0, "reference_policy_kl_type": "k1"},
    {"reference_policy_kl_penalty": 1.0, "reference_policy_kl_type": "k2"},
    {"reference_policy_kl_penalty": 1.0, "kl_input_clamp_value": None, "kl_output_clamp_value": None},
    {"reference_policy_kl_penalty": 1.0, "use_on_policy_kl_approximation": True},
    {"reference_policy_kl_penalty": 1.0, "use_kl_in_reward": True},
    {"use_importance_sampling_correction": True},
    CORRECTED | {"truncated_importance_sampling_type": "tis"},
    CORRECTED | {"truncated_importance_sampling_type": "icepop"},
    CORRECTED | {"truncated_importance_sampling_type": "seq-mask-tis"},
    CORRECTED
    | {
        "truncated_importance_sampling_type": "icepop",
        "sequence_level_importance_ratios": True,
        "token_level_loss": False,
    },
]


@dataclass(frozen=True)
class Outcome:
    """What a loss says of one micro-batch.

    Attributes:
        value: The loss, divided by its count.
        gradient: The gradient of the undivided sum by each sampled token.
        metrics: Finished metrics.
    """

    value: float
    gradient: list[float]
    metrics: dict[str, float]


def loss_config(**changes: Any) -> LossConfig:
    """A `loss_fn` section without a KL term."""
    return LossConfig(**({"reference_policy_kl_penalty": 0.0} | changes))


def objective(single_update: bool = False, **changes: Any) -> PolicyGradientLoss:
    """The loss of `loss_config`."""
    config = loss_config(**changes)
    return parse_objective(config, single_update or config.force_on_policy_ratio)


def divided(sums: LossSums, counts: Counts) -> float:
    """Return the loss that a trainer would report."""
    count = counts.tokens if sums.per is Per.TOKENS else counts.sequences
    return sums.loss.item() / count if count else sums.loss.item()


def evaluate(
    loss: PolicyGradientLoss,
    logprobs: Sequence[float],
    batch: TrainBatch,
    entropy: Sequence[float] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Outcome:
    """Call the loss with a value for each sampled token."""
    leaf = torch.tensor(logprobs, dtype=dtype, requires_grad=True)
    full = scatter_sampled(batch.loss_mask, leaf)
    entropies = torch.tensor(entropy if entropy is not None else [0.0] * len(logprobs), dtype=dtype)
    sums = loss(full, scatter_sampled(batch.loss_mask, entropies), batch)
    gradient = gradient_of(sums.loss, leaf)
    counts = batch.count()
    metrics = finalize_metrics(sums.metrics, counts.tokens, counts.sequences)
    return Outcome(divided(sums, counts), gradient.tolist(), metrics)


def gradient_of(value: Tensor, leaf: Tensor) -> Tensor:
    """Return d value / d leaf."""
    (gradient,) = torch.autograd.grad(value, leaf)
    return gradient
