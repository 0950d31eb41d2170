"""Log-probabilities where each rank of a group holds some columns of the vocabulary.

Each rank reduces its shard to four floats per token, one all-gather of those 16 bytes exchanges them, and every rank
merges them in the order of the ranks: all ranks get the same bits, whatever algorithm the exchange uses. Gradients of
logits stay on their rank. How a model is sharded, and what else is exchanged for it, is the caller's business.

    logprobs, entropy = vocab_parallel_logprobs(logits_shard, targets, temperature, shard, impl="native")
    logprobs, entropy = linear_vocab_parallel_logprobs(hidden, weight_shard, targets, temperature, shard, impl="native")

Both are collective: all ranks of the group call them with the same targets, and walk the same graph backwards.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl.core.errors import ConfigError
from rl.ops.logprobs import IGNORE_INDEX, LogprobImpl
from rl.ops.native_logprobs import dense_gradient
from rl.ops.shard_steps import ShardReading, ShardSteps, Upstream, shard_steps


class Pending(Protocol):
    """A collective operation under way."""

    def wait(self) -> object:
        """Return when the result can be used (on a GPU: by what is enqueued from here on)."""


class GatherGroup(Protocol):
    """What is wanted of torch's process groups, whether registered with torch.distributed or not."""

    def size(self) -> int:
        """Number of ranks."""

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], /) -> Pending:
        """Fill outputs[0][r] with inputs[0] of rank r."""


@dataclass(frozen=True)
class VocabShard:
    """Which columns this rank holds.

    Attributes:
        start: Id of the first column; the ranks' shards follow each other in any order, and may be empty.
        group: The ranks that hold the vocabulary; None = this process holds all of it.
        vocab_size: Ids from here on are padding and count as -inf; None = there are none.
    """

    start: int = 0
    group: GatherGroup | None = None
    vocab_size: int | None = None


def vocab_parallel_logprobs(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    shard: VocabShard,
    *,
    impl: LogprobImpl,
    thresholds: Tensor | None = None,
    consume_logits: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return log softmax(logits / temperature) over the whole vocabulary at the targets, and the entropies.

    Args:
        logits: [N, V of this rank] float32, bfloat16 or float16, columns adjacent; V may be 0.
        targets: [N] int64 ids of the whole vocabulary, or -100 for rows that give 0 and no gradient.
        temperature: finite and > 0.
        shard: what `logits` is a part of.
        impl: native | torch.
        thresholds: [N] float32, the same on all ranks; a logit below its row's threshold counts as -inf.
        consume_logits: allow the backward to write the gradient over `logits`, once.

    Returns:
        logprobs [N], entropy [N]: float32, equal on all ranks. Their gradient by this rank's logits is local.

    Raises:
        ConfigError: temperature or impl is not usable.
        FatalError: the native library is missing.
        RuntimeError: an argument is unusable; the message names it.
    """
    reading = ShardReading(temperature, shard.start, shard.vocab_size, thresholds)
    plan = _Plan(shard_steps(impl, temperature), reading, shard.group)
    logprobs, entropy = _VocabParallelLogprobs.apply(logits, targets, plan, consume_logits)  # type: ignore[no-untyped-call]  # torch's
    return logprobs, entropy


def linear_vocab_parallel_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    shard: VocabShard,
    *,
    impl: LogprobImpl,
    chunk_rows: int,
) -> tuple[Tensor, Tensor]:
    """Return the same of logits = hidden @ weight.T, of which a rank makes `chunk_rows` rows at a time.

    A chunk's logits are float32 and alone in memory; the backward makes them again: 8 N V H operations, and one
    all-gather of 16 bytes per token. The gradient of `hidden` is summed over the group here, in the order of the ranks
    (an all-gather of it, and so R times its memory for a moment): every rank has that of the whole vocabulary.

    Args:
        hidden: [N, H] float32, bfloat16 or float16, the same on all ranks.
        weight: [V of this rank, H] of the same dtype; its gradient accumulates in float32 over the chunks.
        targets: [N] int64.
        temperature: finite and > 0.
        shard: what `weight` is a part of.
        impl: native | torch.
        chunk_rows: > 0.

    Returns:
        logprobs [N], entropy [N]: float32.

    Raises:
        ConfigError: temperature, impl or chunk_rows is not usable.
        FatalError: the native library is missing.
        RuntimeError: an argument is unusable; the message names it.
    """
    if chunk_rows < 1:
        raise ConfigError(f"chunk_rows={chunk_rows}: rows are made in chunks of at least 1")
    reading = ShardReading(temperature, shard.start, shard.vocab_size)
    plan = _Plan(shard_steps(impl, temperature), reading, shard.group)
    logprobs, entropy = _LinearVocabParallelLogprobs.apply(hidden, weight, targets, plan, chunk_rows)  # type: ignore[no-untyped-call]  # torch's
    return logprobs, entropy


@dataclass(frozen=True)
class _Plan:
    """How a call is computed."""

    steps: ShardSteps
    reading: ShardReading
    group: GatherGroup | None


def _gather(part: Tensor, group: GatherGroup | None) -> Tensor:
    """Return the parts of all ranks in their order, [R, ...]."""
    if group is None:
        return part.unsqueeze(0)
    parts = part.new_empty((group.size(), *part.shape))
    group.allgather([list(parts.unbind())], [part]).wait()
    return parts


def _sum_in_rank_order(part: Tensor, group: GatherGroup | None) -> Tensor:
    """Return the sum over the ranks, the same bits on each."""
    total, *others = _gather(part, group).unbind()
    for other in others:
        total += other
    return total


def _live_rows(weight: Tensor, reading: ShardReading) -> Tensor:
    """Return the rows before the padding, which may hold anything: 0 x NaN is NaN in a product."""
    return weight if reading.vocab_size is None else weight[: max(0, reading.vocab_size - reading.start)]


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    """Return the product in float32. 16-bit products of CPUs are slow where they exist, and round their result."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, plan: _Plan, consume_logits: bool) -> tuple[Tensor, Tensor]:
        stats = _gather(plan.steps.stats(logits, targets, plan.reading), plan.group)
        logprobs, entropy, lse = plan.steps.finish(stats, targets)
        ctx.save_for_backward(logits, targets, lse, entropy)
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.consume_logits = plan, consume_logits
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_logprobs is None and grad_entropy is None:
            return None, None, None, None
        saved, targets, lse, entropy = ctx.saved_tensors
        upstream = Upstream(lse, entropy, dense_gradient(grad_logprobs), dense_gradient(grad_entropy))
        logits = saved.detach() if ctx.consume_logits else saved.detach().clone()
        ctx.plan.steps.gradient_into(logits, targets, ctx.plan.reading, upstream)
        if ctx.consume_logits:
            # Autograd's own check then refuses whoever still wants the logits, a second backward included.
            torch.autograd.graph.increment_version(logits)
        return logits, None, None, None


class _LinearVocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        plan: _Plan,
        chunk_rows: int,
    ) -> tuple[Tensor, Tensor]:
        count = hidden.shape[0]
        stats = torch.empty((4, count), dtype=torch.float32, device=hidden.device)
        live = _live_rows(weight, plan.reading)
        for begin in range(0, count, chunk_rows):
            end = min(begin + chunk_rows, count)
            logits = _multiply(hidden[begin:end], live.t())
            stats[:, begin:end] = plan.steps.stats(logits, targets[begin:end], plan.reading)
        logprobs, entropy, lse = plan.steps.finish(_gather(stats, plan.group), targets)
        ctx.save_for_backward(hidden, weight, targets, lse, entropy)
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.chunk_rows = plan, chunk_rows
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_logprobs is None and grad_entropy is None:
            return None, None, None, None, None
        hidden, weight, targets, lse, entropy = ctx.saved_tensors
        upstream = Upstream(lse, entropy, dense_gradient(grad_logprobs), dense_gradient(grad_entropy))
        grad_hidden = torch.empty(hidden.shape, dtype=torch.float32, device=hidden.device)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        live = _live_rows(weight, ctx.plan.reading)
        is_ignored = (targets == IGNORE_INDEX).unsqueeze(1)
        for begin in range(0, hidden.shape[0], ctx.chunk_rows):
            end = min(begin + ctx.chunk_rows, hidden.shape[0])
            logits = _multiply(hidden[begin:end], live.t())
            ctx.plan.steps.gradient_into(logits, targets[begin:end], ctx.plan.reading, upstream.rows(begin, end))
            grad_logits = logits.to(hidden.dtype)
            grad_hidden[begin:end] = _multiply(grad_logits, live)
            counted = hidden[begin:end].masked_fill(is_ignored[begin:end], 0)
            grad_weight[: live.shape[0]] += _multiply(grad_logits.t(), counted)
        grad_hidden = _sum_in_rank_order(grad_hidden, ctx.plan.group)
        return grad_hidden.to(hidden.dtype), grad_weight.to(weight.dtype), None, None, None
