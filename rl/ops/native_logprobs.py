"""The fused log-probability operators of csrc: their wrapper, autograd formulas and fake kernels.

logprobs, entropy = native_token_logprobs(logits, targets, temperature=1.0)
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl.core.errors import FatalError
from rl.core.native import on_load, require_native


def native_token_logprobs(
    logits: Tensor, targets: Tensor, temperature: float, *, consume_logits: bool = False
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of the targets and entropies, by the fused operator.

    Args:
        logits: [N, V] float32 or bfloat16 on the CPU; columns adjacent, any row stride.
        targets: [N] int64 in [0, V), or -100 for rows that give log-probability 0 and no gradient.
        temperature: logits are divided by it; > 0.
        consume_logits: let the backward write the gradient over `logits`, which saves an [N, V] tensor. The graph can
            then be walked once, and nobody may read `logits` after the backward. Under torch.compile it is ignored.

    Returns:
        logprobs and entropy, [N] float32.

    Raises:
        FatalError: the library is missing; or, in the backward, the logits have already been consumed.
        RuntimeError: an argument has the wrong shape, dtype, device or layout; the message names it.
    """
    if torch.compiler.is_compiling():
        logprobs, entropy, _ = torch.ops.tandem.token_logprobs_fwd(logits, targets, temperature)
        return logprobs, entropy
    require_native()
    if consume_logits and torch.is_grad_enabled() and logits.requires_grad:
        logprobs, entropy = _ConsumingTokenLogprobs.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
            logits, targets, temperature
        )
        return logprobs, entropy
    logprobs, entropy, _ = torch.ops.tandem.token_logprobs_fwd(logits, targets, temperature)
    return logprobs, entropy


class _ConsumingTokenLogprobs(torch.autograd.Function):
    """The operator with a backward that reuses the memory of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logprobs, entropy, lse = torch.ops.tandem.token_logprobs_fwd(logits, targets, temperature)
        ctx.save_for_backward(logits, targets, lse, entropy)
        ctx.set_materialize_grads(False)
        ctx.temperature = temperature
        ctx.is_consumed = False
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
            return None, None, None
        saved, targets, lse, entropy = ctx.saved_tensors
        ctx.is_consumed = True
        logits = saved.detach()
        torch.ops.tandem.token_logprobs_bwd_(
            logits, targets, lse, entropy, _dense(grad_logprobs), _dense(grad_entropy), ctx.temperature
        )
        # Autograd's own check then catches any other node that still wanted the logits.
        torch.autograd.graph.increment_version(logits)
        return logits, None, None


def _dense(gradient: Tensor | None) -> Tensor | None:
    """Upstream gradients may be expanded scalars; the operator wants contiguous float32."""
    return None if gradient is None else gradient.to(torch.float32).contiguous()


def _register_formulas() -> None:
    torch.library.register_fake("tandem::token_logprobs_fwd", _fake_forward)
    torch.library.register_fake("tandem::token_logprobs_bwd", _fake_backward)
    torch.library.register_fake("tandem::token_logprobs_bwd_", _fake_backward_in_place)
    torch.library.register_autograd("tandem::token_logprobs_fwd", _backward_formula, setup_context=_save_for_backward)
    torch.library.register_autograd("tandem::token_logprobs_bwd", _refuse_second_derivative)


def _fake_forward(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    logprobs, entropy, lse = (logits.new_empty((logits.shape[0],), dtype=torch.float32) for _ in range(3))
    return logprobs, entropy, lse


def _fake_backward(logits: Tensor, *_: object) -> Tensor:
    return logits.new_empty(logits.shape)


def _fake_backward_in_place(logits: Tensor, *_: object) -> None:
    """Nothing to infer: the result is the first argument."""


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, targets, temperature = inputs
    _, entropy, lse = output
    ctx.save_for_backward(logits, targets, lse, entropy)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.temperature = temperature


def _backward_formula(
    ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, None, None]:
    if grad_logprobs is None and grad_entropy is None:
        return None, None, None
    logits, targets, lse, entropy = ctx.saved_tensors
    grad_logits = torch.ops.tandem.token_logprobs_bwd(
        logits, targets, lse, entropy, _dense(grad_logprobs), _dense(grad_entropy), ctx.temperature
    )
    return grad_logits, None, None


def _refuse_second_derivative(ctx: Any, *_: Tensor) -> None:
    raise FatalError("token_logprobs has no second derivative in native code; use impl='torch' for it")


on_load(_register_formulas)
