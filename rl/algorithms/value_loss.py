"""The critic's loss (Schulman et al. 2017, equation 9, with the clipping of their code), and how well it predicts.

With value v, value at the start of the step v_old and return R, per counted token:

    l = scale / 2 max((v - R)^2, (clamp(v, v_old - clip, v_old + clip) - R)^2)

Position t of every column is the value of the state before token t.

    loss = ValueLoss(scale=1.0, clip=0.2)
    sums = loss(values, batch)
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rl.algorithms.algorithm import LossSums
from rl.core.batch import TrainBatch
from rl.core.metrics import Metric, Per

_LEAST_VARIANCE = 1e-8


@dataclass(frozen=True)
class ValueLoss:
    """The loss.

    Attributes:
        scale: Factor of the loss.
        clip: How far a value may move from the one at the start of the step; None and 0 = any distance.
    """

    scale: float = 1.0
    clip: float | None = None

    def __call__(self, values: Tensor, batch: TrainBatch) -> LossSums:
        """Return the sums of one micro-batch.

        Args:
            values: [T] float with gradient, of the trained critic.
            batch: With `returns`, and with `values` when `clip` bounds something.

        Raises:
            ValueError: a needed column is missing.
        """
        if batch.returns is None:
            raise ValueError("the value loss needs the column returns")
        index = (batch.token_weights > 0).nonzero().squeeze(1)
        taken, returns = values[index], batch.returns[index].to(values.dtype)
        weights = batch.token_weights[index].to(values.dtype)
        losses = plain = (taken - returns).square()
        if self.clip:
            if batch.values is None:
                raise ValueError("the clipped value loss needs the column values")
            old = batch.values[index].to(values.dtype)
            losses = torch.maximum(plain, (taken.clamp(old - self.clip, old + self.clip) - returns).square())
        loss = self.scale / 2 * (weights * losses).sum()
        metrics = {"loss": Metric(loss.item(), Per.TOKENS)}
        with torch.no_grad():
            sums = {
                "vf_clipfrac": losses > plain,
                "returns_mean": returns,
                "values_mean": taken,
                "returns_sq_mean": returns.square(),
                "residual_sq_mean": plain,
            }
            for name, column in sums.items():
                metrics[name] = Metric((weights * column).sum(dtype=torch.float64).item(), Per.TOKENS)
            if taken.numel():
                metrics["values_min"] = Metric(taken.min().item(), Per.MIN)
                metrics["values_max"] = Metric(taken.max().item(), Per.MAX)
        metrics["num_valid_samples"] = Metric(batch.sample_weights.sum().item(), Per.NONE)
        return LossSums(loss, Per.TOKENS, metrics)


def explained_variance(means: Mapping[str, float]) -> float:
    """Return 1 - Var(R - v) / Var(R) from the finished metrics of `ValueLoss`; 1 is a perfect critic.

    Returns that are all equal have no variance to be explained: NaN.
    """
    residual = means["residual_sq_mean"] - (means["returns_mean"] - means["values_mean"]) ** 2
    total = means["returns_sq_mean"] - means["returns_mean"] ** 2
    return 1 - residual / total if total > _LEAST_VARIANCE else math.nan
