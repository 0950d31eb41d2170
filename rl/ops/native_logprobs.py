"""The row operators of csrc (log-probabilities, their shards, sampling thresholds): wrappers, autograd, fake kernels.

    logprobs, entropy = native_token_logprobs(logits, targets, temperature=1.0)

`logits_stats`, `stats_finish` and `logits_gradient_` are the same in three steps, for a vocabulary in shards; they have
no autograd formula of their own (see `rl.ops.vocab_parallel`).
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl.core.errors import FatalError
from rl.core.native import on_load, require_native


def native_token_logprobs(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    thresholds: Tensor | None = None,
    vocab_size: int | None = None,
    consume_logits: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of the targets and entropies, by the fused operator.

    Args:
        logits: [N, V] float32, bfloat16 or float16 on the CPU or a GPU; columns adjacent, any row stride.
        targets: [N] int64 in [0, V), or -100 for rows that give log-probability 0 and no gradient.
        temperature: logits are divided by it; > 0.
        thresholds: [N] float32; a logit below its row's counts as -inf.
        vocab_size: columns from here on are padding and count as -inf.
        consume_logits: let the backward write the gradient over `logits`, which saves an [N, V] tensor. The graph can
            then be walked once, and nobody may read `logits` after the backward. Under torch.compile it is ignored.

    Returns:
        logprobs and entropy, [N] float32.

    Raises:
        FatalError: the library is missing; or, in the backward, the logits have already been consumed.
        RuntimeError: an argument has the wrong shape, dtype, device or layout; the message names it.
    """
    arguments = (logits, targets, temperature, thresholds, vocab_size)
    require_native()
    if consume_logits and not torch.compiler.is_compiling() and torch.is_grad_enabled() and logits.requires_grad:
        logprobs, entropy = _ConsumingTokenLogprobs.apply(*arguments)  # type: ignore[no-untyped-call]  # torch's
        return logprobs, entropy
    logprobs, entropy, _ = torch.ops.tandem.token_logprobs_fwd(*arguments)
    return logprobs, entropy


def native_logits_threshold(logits: Tensor, top_k: int, top_p: float, temperature: float) -> Tensor:
    """Return the smallest logit of each row that top-k / top-p sampling keeps, [N] float32; no gradient.

    Args:
        logits: [N, V] float32, bfloat16 or float16; columns adjacent.
        top_k: keep the k largest; 0 = off.
        top_p: of those, keep the fewest largest whose probabilities reach it; in (0, 1], 1 = off.
        temperature: of the probabilities; > 0.

    Raises:
        FatalError: the library is missing.
        RuntimeError: an argument is unusable; the message names it.
    """
    require_native()
    thresholds: Tensor = torch.ops.tandem.logits_threshold(logits.detach(), top_k, top_p, temperature)
    return thresholds


class _ConsumingTokenLogprobs(torch.autograd.Function):
    """The operator with a backward that reuses the memory of the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        thresholds: Tensor | None,
        vocab_size: int | None,
    ) -> tuple[Tensor, Tensor]:
        output = torch.ops.tandem.token_logprobs_fwd(logits, targets, temperature, thresholds, vocab_size)
        _save_for_backward(ctx, (logits, targets, temperature, thresholds, vocab_size), output)
        ctx.is_consumed = False
        logprobs, entropy, _ = output
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.is_consumed:
            raise FatalError(
                "token_logprobs: this backward has run and has written the gradient over the logits; "
                "call it with consume_logits=False to walk the graph more than once"
            )
        if grad_logprobs is None and grad_entropy is None:
            return None, None, None, None, None
        saved, *arguments = _gradient_arguments(ctx, grad_logprobs, grad_entropy)
        ctx.is_consumed = True
        logits = saved.detach()
        torch.ops.tandem.token_logprobs_bwd_(logits, *arguments)
        mark_written([logits])
        return logits, None, None, None, None


def dense_gradient(gradient: Tensor | None) -> Tensor | None:
    """Return an upstream gradient, which may be an expanded scalar, as the contiguous float32 that operators want."""
    return None if gradient is None else gradient.to(torch.float32).contiguous()


def mark_written(tensors: Iterable[Tensor]) -> None:
    """Tell autograd that an operator has written these: a backward that wanted what they held then raises."""
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def _register_formulas() -> None:
    for name, kernel in (
        ("token_logprobs_fwd", _fake_forward),
        ("token_logprobs_bwd", _fake_gradient),
        ("token_logprobs_bwd_", _fake_in_place),
        ("logits_stats", _fake_stats),
        ("stats_finish", _fake_finish),
        ("logits_gradient", _fake_gradient),
        ("logits_gradient_", _fake_in_place),
        ("logits_threshold", _fake_threshold),
    ):
        torch.library.register_fake(f"tandem::{name}", kernel)
    torch.library.register_autograd("tandem::token_logprobs_fwd", _backward_formula, setup_context=_set_up_context)
    torch.library.register_autograd("tandem::token_logprobs_bwd", _refuse_second_derivative)


def _fake_forward(logits: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return _new_rows(logits, logits.shape[0]), _new_rows(logits, logits.shape[0]), _new_rows(logits, logits.shape[0])


def _fake_gradient(logits: Tensor, *_: object) -> Tensor:
    return logits.new_empty(logits.shape)


def _fake_in_place(logits: Tensor, *_: object) -> None:
    """Nothing to infer: the result is the first argument."""


def _fake_stats(logits: Tensor, *_: object) -> Tensor:
    return logits.new_empty((4, logits.shape[0]), dtype=torch.float32)


def _fake_finish(stats: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _new_rows(stats, stats.shape[2]), _new_rows(stats, stats.shape[2]), _new_rows(stats, stats.shape[2])


def _fake_threshold(logits: Tensor, *_: object) -> Tensor:
    return _new_rows(logits, logits.shape[0])


def _new_rows(like: Tensor, count: int) -> Tensor:
    return like.new_empty((count,), dtype=torch.float32)


def _set_up_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[2])
    _save_for_backward(ctx, inputs, output)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, targets, temperature, thresholds, vocab_size = inputs
    _, entropy, lse = output
    ctx.save_for_backward(logits, targets, lse, entropy, thresholds)
    ctx.set_materialize_grads(False)
    ctx.temperature, ctx.vocab_size = temperature, vocab_size


def _gradient_arguments(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Any, ...]:
    logits, targets, lse, entropy, thresholds = ctx.saved_tensors
    upstream = dense_gradient(grad_logprobs), dense_gradient(grad_entropy)
    return logits, targets, lse, entropy, *upstream, ctx.temperature, thresholds, ctx.vocab_size


def _backward_formula(
    ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, None, None, None, None]:
    if grad_logprobs is None and grad_entropy is None:
        return None, None, None, None, None
    arguments = _gradient_arguments(ctx, grad_logprobs, grad_entropy)
    return torch.ops.tandem.token_logprobs_bwd(*arguments), None, None, None, None


def _refuse_second_derivative(ctx: Any, *_: Tensor) -> None:
    raise FatalError("token_logprobs has no second derivative in native code; use impl='torch' for it")


on_load(_register_formulas)
