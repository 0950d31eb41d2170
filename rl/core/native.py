"""Find and load csrc's operator library, and give its operators their autograd formulas.

This module is the only one that looks for native libraries. It decides nothing: whether the native operator or the
plain torch one is used is the caller's choice (`rl.ops.logprobs`).

    logprobs, entropy = native_token_logprobs(logits, targets, temperature=1.0)
"""

import functools
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl.core.errors import FatalError

LIBRARY_DIR_VARIABLE = "RL_NATIVE_DIR"
_LOSS_LIBRARY = "libtandem_loss.so"


def require_native() -> None:
    """Load the native operators.

    Raises:
        FatalError: no library was found, or it does not load; the message lists the places and the remedy.
    """
    failure = _load_failure()
    if failure is not None:
        raise FatalError(failure)


def library_candidates() -> list[Path]:
    """Return the places where the library may be, in the order in which they are tried."""
    here = Path(__file__).absolute()
    candidates = [
        here.parents[1] / "_native" / _LOSS_LIBRARY,  # an installed wheel
        here.parents[2] / "csrc" / "bindings" / _LOSS_LIBRARY,  # a Bazel runfiles tree
        here.resolve().parents[2] / "bazel-bin" / "csrc" / "bindings" / _LOSS_LIBRARY,  # a checkout after a build
    ]
    chosen = os.environ.get(LIBRARY_DIR_VARIABLE)
    return [Path(chosen) / _LOSS_LIBRARY] if chosen else candidates


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


@functools.cache
def _load_failure() -> str | None:
    """Load once; return None, or why the operators cannot be used."""
    candidates = library_candidates()
    library = next((path for path in candidates if path.is_file()), None)
    if library is None:
        places = ", ".join(str(path) for path in candidates)
        return (
            f"the native library {_LOSS_LIBRARY} is in none of: {places}. Build it with "
            f"`bazel build //csrc/bindings:loss_ops`, install the wheel, set {LIBRARY_DIR_VARIABLE} to its folder, or "
            "choose policy.logprob_impl=torch"
        )
    try:
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]  # torch leaves it untyped
    except OSError as error:
        return f"the native library {library} does not load with torch {torch.__version__}: {error}; build it again"
    _register_formulas()
    return None


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
