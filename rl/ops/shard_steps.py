"""The three steps from a shard of logits to log-probabilities and gradients, native or in plain torch.

    stats     a shard's logits -> 4 floats per token (largest, sum, shifted sum, target's)
    finish    the stats of all shards -> log-probability, entropy, log-sum-exp
    gradient  a shard's logits -> its gradient, in their place

The mathematics and the special values are those of csrc/loss/row_stats.h. Nothing here communicates or differentiates:
`rl.ops.vocab_parallel` does.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rl.core.errors import ConfigError
from rl.core.native import require_native
from rl.ops.logprobs import IGNORE_INDEX, LogprobImpl


@dataclass(frozen=True)
class ShardReading:
    """How a shard's logits are read.

    Attributes:
        temperature: Logits are divided by it.
        start: Id of the shard's first column.
        vocab_size: Ids from here on are padding; None = there are none.
        thresholds: [N] float32, a logit below its row's counts as -inf; None = none.
    """

    temperature: float
    start: int = 0
    vocab_size: int | None = None
    thresholds: Tensor | None = None


@dataclass(frozen=True)
class Upstream:
    """What the gradient of a row needs beside its logits; [N] float32 each."""

    lse: Tensor
    entropy: Tensor
    grad_logprobs: Tensor | None
    grad_entropy: Tensor | None

    def rows(self, begin: int, end: int) -> "Upstream":
        """The same, of some rows."""
        return Upstream(
            self.lse[begin:end],
            self.entropy[begin:end],
            None if self.grad_logprobs is None else self.grad_logprobs[begin:end],
            None if self.grad_entropy is None else self.grad_entropy[begin:end],
        )


class ShardSteps(Protocol):
    """An implementation of the steps."""

    def stats(self, logits: Tensor, targets: Tensor, reading: ShardReading) -> Tensor:
        """Return the shard's statistics, [4, N] float32, from logits [N, V of the shard]."""

    def finish(self, stats: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logprobs, entropy and lse, [N] float32 each, from the statistics of all shards, [R, 4, N]."""

    def gradient_into(self, logits: Tensor, targets: Tensor, reading: ShardReading, upstream: Upstream) -> None:
        """Write the gradient over the logits."""


def shard_steps(impl: LogprobImpl, temperature: float) -> ShardSteps:
    """Return the steps of an implementation.

    Raises:
        ConfigError: temperature or impl is not usable.
        FatalError: the native library is missing.
    """
    if not (math.isfinite(temperature) and temperature > 0):
        raise ConfigError(f"temperature={temperature} cannot be trained on: use a finite number > 0")
    if impl == "native":
        require_native()
        return NativeSteps()
    if impl == "torch":
        return TorchSteps()
    raise ConfigError(f"policy.logprob_impl={impl!r} is unknown; use native or torch")


class NativeSteps:
    """The three steps of csrc/loss/row_stats.h, by its operators."""

    def stats(self, logits: Tensor, targets: Tensor, reading: ShardReading) -> Tensor:
        """Return the shard's statistics, [4, N] float32."""
        stats: Tensor = torch.ops.tandem.logits_stats(
            logits, targets, reading.temperature, reading.thresholds, reading.start, reading.vocab_size
        )
        return stats

    def finish(self, stats: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logprobs, entropy and lse from the statistics of all shards, [R, 4, N]."""
        logprobs, entropy, lse = torch.ops.tandem.stats_finish(stats, targets)
        return logprobs, entropy, lse

    def gradient_into(self, logits: Tensor, targets: Tensor, reading: ShardReading, upstream: Upstream) -> None:
        """Write the gradient over the logits."""
        torch.ops.tandem.logits_gradient_(
            logits,
            targets,
            upstream.lse,
            upstream.entropy,
            upstream.grad_logprobs,
            upstream.grad_entropy,
            reading.temperature,
            reading.thresholds,
            reading.start,
            reading.vocab_size,
        )


class TorchSteps:
    """The same in plain torch and float32, as the reference."""

    def stats(self, logits: Tensor, targets: Tensor, reading: ShardReading) -> Tensor:
        """Return the shard's statistics, [4, N] float32."""
        scores = self._scores(logits, reading)
        if scores.shape[1] == 0:
            empty = torch.zeros((4, scores.shape[0]), dtype=torch.float32, device=logits.device)
            empty[0] = empty[3] = -math.inf
            return empty
        largest = scores.amax(dim=1)
        distance = scores - torch.where(largest == -math.inf, 0.0, largest).unsqueeze(1)
        weights = distance.exp()
        shifted = torch.where(weights == 0, 0.0, distance * weights).sum(dim=1)
        is_here, column = self._columns(targets, reading.start, scores.shape[1])
        at_target = scores.gather(1, column.unsqueeze(1)).squeeze(1)
        return torch.stack([largest, weights.sum(dim=1), shifted, torch.where(is_here, at_target, -math.inf)])

    def finish(self, stats: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logprobs, entropy and lse from the statistics of all shards, [R, 4, N]."""
        largest, sums, shifted, at_target = stats.unbind(dim=1)
        top = largest.amax(dim=0)
        distance = torch.where(largest == -math.inf, -math.inf, largest - top)
        scale = distance.exp()
        total = (sums * scale).sum(dim=0)
        moved = torch.where(scale == 0, 0.0, (shifted + sums * torch.where(scale == 0, 0.0, distance)) * scale)
        lse = top + total.log()
        entropy = total.log() - moved.sum(dim=0) / total
        logprobs = torch.where(targets == IGNORE_INDEX, 0.0, at_target.amax(dim=0) - lse)
        return logprobs, entropy, lse

    def gradient_into(self, logits: Tensor, targets: Tensor, reading: ShardReading, upstream: Upstream) -> None:
        """Write the gradient over the logits."""
        scores = self._scores(logits, reading)
        log_p = torch.where(scores == -math.inf, -math.inf, scores - upstream.lse.unsqueeze(1))
        p = log_p.exp()
        is_here, column = self._columns(targets, reading.start, scores.shape[1])
        gradient = torch.zeros_like(scores)
        counts = targets != IGNORE_INDEX
        if upstream.grad_logprobs is not None:
            g = torch.where(counts, upstream.grad_logprobs, 0.0).unsqueeze(1)
            gradient -= torch.where(g == 0, 0.0, g * p)
            hit = torch.zeros_like(scores)
            if scores.shape[1] > 0:
                hit.scatter_(1, column.unsqueeze(1), is_here.to(scores.dtype).unsqueeze(1))
            gradient += torch.where((hit != 0) & (scores > -math.inf), g, 0.0)
        if upstream.grad_entropy is not None:
            h = torch.where(counts, upstream.grad_entropy, 0.0).unsqueeze(1)
            slope = torch.where(p == 0, 0.0, p * (log_p + upstream.entropy.unsqueeze(1)))
            gradient -= torch.where(h == 0, 0.0, h * slope)
        logits.copy_(gradient / reading.temperature)

    def _scores(self, logits: Tensor, reading: ShardReading) -> Tensor:
        scores = logits.float() / reading.temperature
        is_out = torch.zeros_like(scores, dtype=torch.bool)
        if reading.thresholds is not None:
            is_out |= logits < reading.thresholds.unsqueeze(1)
        if reading.vocab_size is not None:
            is_out[:, max(0, reading.vocab_size - reading.start) :] = True
        return torch.where(is_out, -math.inf, scores)

    def _columns(self, targets: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
        """Return which targets are in this shard, and their columns (0 where not)."""
        column = targets - start
        is_here = (column >= 0) & (column < width) & (targets != IGNORE_INDEX)
        return is_here, torch.where(is_here, column, 0)
