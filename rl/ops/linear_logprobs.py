"""Log-probabilities and policy loss of a linear layer's outputs without its [N, V] logits.

Hidden states are multiplied by the head in chunks of rows; a chunk's logits are made, used and overwritten. Two forms:

    logprobs, entropy = linear_token_logprobs(hidden, weight, targets, temperature, impl="native")

keeps nothing but its arguments and computes the logits again in the backward (8 N V H operations in all).

    result = linear_policy_loss(hidden, weight, targets, temperature, tokens, params)
    result.loss.backward()

knows the loss, so it has both gradients at the end of its forward (6 N V H). `linear_policy_loss_` is the same without
autograd, for trainers that let the weight's gradient run straight into their own buffer. A loss with ratios of whole
sequences takes the first form: see csrc/loss/linear_loss.h.

The gradient of the weight is summed in float32 whatever the dtypes. A float32 weight beside bfloat16 or float16 hidden
states is cast once per call, as autocast does, while its gradient keeps its float32 digits, which autocast rounds away.
"""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from rl.core.errors import ConfigError, FatalError
from rl.core.native import on_load, require_native
from rl.ops.logprobs import LogprobImpl, token_logprobs
from rl.ops.native_logprobs import dense_gradient, mark_written
from rl.ops.policy_loss import PolicyLossParams, PolicyLossTokens, PolicyMetric, hand_out_gradients, name_metrics

# Bytes of logits that a CPU's chunk may have: 256 rows of a vocabulary of 49152 in float32.
_CPU_SLAB_BYTES = 50_331_648
_MIN_CHUNK_ROWS = 64
# Of a device's: between these numbers of rows, the float32 gradient of the weight costs less than 5% of the products.
_DEVICE_SLAB_BYTES = 2**31
_DEVICE_CHUNK_ROWS = (4096, 8192)


@dataclass(frozen=True, eq=False)
class LinearPlan:
    """How the native operators walk the rows.

    Attributes:
        chunk_rows: Rows whose logits exist at a time; None: `default_chunk_rows`.
        float32_logits: Whether 16-bit hidden states give float32 logits, which keeps the digits that bfloat16 rounds
            away before the softmax (2^-9 of a logit); otherwise they have the dtype of the hidden states. Float32
            hidden states give float32 logits anyway.
        vocab_size: Rows of the weight from here on are padding and count as logits of -inf; None: there are none.
        host_row_offsets: PolicyLossTokens.row_offsets on the CPU, where chunks are cut; None: they are on the CPU, or
            are copied from the device.
    """

    chunk_rows: int | None = None
    float32_logits: bool = True
    vocab_size: int | None = None
    host_row_offsets: Tensor | None = None

    def arguments(self, hidden: Tensor, weight: Tensor) -> tuple[int, bool]:
        """Return the operators' last two arguments."""
        float32_logits = self.float32_logits or hidden.dtype == torch.float32
        rows = self.chunk_rows
        if rows is None:
            dtype = torch.float32 if float32_logits else hidden.dtype
            rows = default_chunk_rows(weight.shape[0], dtype, hidden.device)
        return rows, float32_logits


_DEFAULT_PLAN = LinearPlan()


@dataclass(frozen=True, eq=False)
class LinearPolicyLoss:
    """What one pass gives.

    Attributes:
        loss: Scalar float32; with gradient by the hidden states and the weight where it comes of `linear_policy_loss`.
        logprobs: [N] float32, without gradient.
        entropy: [N] float32, without gradient.
        metrics: [len(PolicyMetric)] float64 without gradient, in the order of `PolicyMetric`.
    """

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor
    metrics: Tensor

    def named_metrics(self) -> dict[PolicyMetric, float]:
        """Return the metrics by name; reads the device once."""
        return name_metrics(self.metrics)


@dataclass(frozen=True, eq=False)
class OnePassGradients(LinearPolicyLoss):
    """What one pass without a graph gives.

    Attributes:
        grad_hidden: [N, H], the gradient of the hidden states, in their dtype.
    """

    grad_hidden: Tensor


def default_chunk_rows(vocab_size: int, logits_dtype: torch.dtype, device: torch.device) -> int:
    """Return how many rows of logits should exist at a time.

    On the CPU the logits should not leave the caches for long; on devices the gradient of the weight, which crosses
    memory once per chunk, decides.
    """
    row_bytes = max(1, vocab_size) * logits_dtype.itemsize
    if device.type == "cpu":
        return max(_MIN_CHUNK_ROWS, _CPU_SLAB_BYTES // row_bytes)
    smallest, largest = _DEVICE_CHUNK_ROWS
    return min(largest, max(smallest, _DEVICE_SLAB_BYTES // row_bytes))


def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    impl: LogprobImpl = "native",
    plan: LinearPlan = _DEFAULT_PLAN,
    grad_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log softmax(hidden weight^T / temperature) at the targets, and the entropies of the rows.

    Rows whose target is -100 give log-probability 0 and no gradient; their entropy is that of the row.

    Args:
        hidden: [N, H]. native: float32, bfloat16 or float16 with adjacent columns; torch: any float.
        weight: [V, H] of the dtype of `hidden`, or float32.
        targets: [N] int64.
        temperature: the sampling temperature; finite and > 0.
        impl: native | torch. The torch path is the plain reference; it takes chunks too, and makes their logits again
            in the backward.
        plan: how rows are walked.
        grad_weight: [V, H] float32 to which the backward adds the gradient of the weight, for instance the weight's own
            `grad`; autograd then has none for it, and no second [V, H] exists. Native alone; under torch.compile it is
            left alone, and autograd has the gradient.

    Returns:
        logprobs [N], entropy [N]: float32 (float64 when the torch path gets float64).

    Raises:
        ConfigError: impl is not known, or cannot take grad_weight.
        FatalError: the native library is missing.
        RuntimeError: an argument has the wrong shape, dtype, device or layout; the message names it.
    """
    if impl == "torch" and grad_weight is None:
        return _torch_linear_logprobs(hidden, weight, targets, temperature, plan)
    if impl == "torch":
        raise ConfigError("policy.logprob_impl='torch' cannot add to grad_weight; use native, or leave it out")
    if impl != "native":
        raise ConfigError(f"policy.logprob_impl={impl!r} is unknown; use native or torch")
    numbers = (temperature, plan.vocab_size, *plan.arguments(hidden, weight))
    require_native()
    if grad_weight is not None and not torch.compiler.is_compiling():
        logprobs, entropy = _IntoBuffer.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
            hidden, weight, targets, numbers, (grad_weight,)
        )
        return logprobs, entropy
    with _exact_bfloat16_products(hidden):
        logprobs, entropy, _ = torch.ops.tandem.linear_logprobs_fwd(hidden, weight, targets, *numbers)
    return logprobs, entropy


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    tokens: PolicyLossTokens,
    params: PolicyLossParams,
    *,
    plan: LinearPlan = _DEFAULT_PLAN,
) -> LinearPolicyLoss:
    """Return the policy loss of a linear layer's rows; its backward hands out gradients that are there already.

    Outside torch.compile the graph can be walked once, because the gradients are scaled in place.

    Args:
        hidden: [N, H] float32, bfloat16 or float16; columns adjacent.
        weight: [V, H] of the dtype of `hidden`, or float32.
        targets: [N] int64; -100 for rows without gradient.
        temperature: the sampling temperature; > 0.
        tokens: the T tokens; not of sequences.
        params: the objective; not with ratios of sequences.
        plan: how rows are walked.

    Raises:
        FatalError: the native library is missing; or, in the backward, the graph has already been walked.
        RuntimeError: an argument is unusable; the message names it.
    """
    arguments = _policy_arguments(targets, temperature, tokens, params, (hidden, weight, plan))
    require_native()
    if torch.compiler.is_compiling():
        outputs = torch.ops.tandem.linear_policy_loss(hidden, weight, *arguments)
        _, _, logprobs, entropy, metrics = outputs
        return LinearPolicyLoss(metrics[PolicyMetric.LOSS.value].float(), logprobs, entropy, metrics.detach())
    loss, logprobs, entropy, metrics = _OnePass.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        hidden, weight, arguments
    )
    return LinearPolicyLoss(loss, logprobs, entropy, metrics)


def linear_policy_loss_(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    tokens: PolicyLossTokens,
    params: PolicyLossParams,
    *,
    grad_weight: Tensor,
    plan: LinearPlan = _DEFAULT_PLAN,
) -> OnePassGradients:
    """Compute the loss without a graph, and add the weight's gradient to a buffer.

    The memory of this call is a chunk of logits and the gradient of the hidden states.

    Args:
        hidden: as in `linear_policy_loss`, and so are the others that are not named here.
        weight: likewise.
        targets: likewise.
        temperature: likewise.
        tokens: likewise.
        params: likewise.
        grad_weight: [V, H] float32 to add to, for instance the `grad` of a float32 weight.
        plan: likewise.

    Raises:
        FatalError: the native library is missing.
        RuntimeError: an argument is unusable; the message names it.
    """
    require_native()
    with torch.no_grad(), _exact_bfloat16_products(hidden):
        arguments = _policy_arguments(targets, temperature, tokens, params, (hidden, weight, plan))
        outputs = torch.ops.tandem.linear_policy_loss_(hidden, weight, *arguments, grad_weight, True)
        mark_written([grad_weight])
        grad_hidden, logprobs, entropy, metrics = outputs
        loss = metrics[PolicyMetric.LOSS.value].float()
    return OnePassGradients(loss, logprobs, entropy, metrics, grad_hidden)


def _policy_arguments(
    targets: Tensor,
    temperature: float,
    tokens: PolicyLossTokens,
    params: PolicyLossParams,
    walk: tuple[Tensor, Tensor, LinearPlan],
) -> tuple[Any, ...]:
    """Return what the operators take behind hidden and weight."""
    hidden, weight, plan = walk
    *columns, row_offsets, _, _ = tokens.columns()
    host_row_offsets = plan.host_row_offsets
    if row_offsets is not None and host_row_offsets is None and row_offsets.device.type != "cpu":
        host_row_offsets = row_offsets.cpu()
    offsets = (row_offsets, host_row_offsets)
    numbers = (params.kinds(), params.numbers())
    return targets, temperature, plan.vocab_size, *columns, *offsets, *numbers, *plan.arguments(hidden, weight)


class _IntoBuffer(torch.autograd.Function):
    """Log-probabilities whose backward adds the weight's gradient to a buffer instead of handing it out."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        numbers: tuple[Any, ...],
        buffer: tuple[Tensor],
    ) -> tuple[Tensor, Tensor]:
        with _exact_bfloat16_products(hidden):
            logprobs, entropy, lse = torch.ops.tandem.linear_logprobs_fwd(hidden, weight, targets, *numbers)
        ctx.save_for_backward(hidden, weight, targets, lse, entropy)
        ctx.set_materialize_grads(False)
        ctx.numbers, ctx.buffer = numbers, buffer
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_logprobs is None and grad_entropy is None:
            return None, None, None, None, None
        hidden, *saved = ctx.saved_tensors
        upstream = dense_gradient(grad_logprobs), dense_gradient(grad_entropy)
        with _exact_bfloat16_products(hidden):
            grad_hidden = torch.ops.tandem.linear_logprobs_bwd_(
                hidden, *saved, *upstream, *ctx.numbers, *ctx.buffer, True
            )
        mark_written(ctx.buffer)
        return grad_hidden, None, None, None, None


class _OnePass(torch.autograd.Function):
    """The operator whose gradients wait in the graph, and are scaled where they stand."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, arguments: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with _exact_bfloat16_products(hidden):
            outputs = torch.ops.tandem.linear_policy_loss(hidden, weight, *arguments)
        grad_hidden, grad_weight, logprobs, entropy, metrics = outputs
        ctx.gradients = (grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(logprobs, entropy, metrics)
        ctx.set_materialize_grads(False)
        return metrics[PolicyMetric.LOSS.value].float(), logprobs, entropy, metrics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = hand_out_gradients(ctx, grad_loss, "linear_policy_loss")
        return grad_hidden, None if grad_weight is None else grad_weight.to(ctx.weight_dtype), None


@contextlib.contextmanager
def _exact_bfloat16_products(hidden: Tensor) -> Iterator[None]:
    """Let float32 products of widened bfloat16 operands run on bfloat16 units, which loses none of their digits.

    The CPU's operators widen where torch has no product of bfloat16 into float32. The setting is the process's, so the
    last of the calls that run at the same time puts it back; float32 products that other threads make meanwhile run
    under it too. Under torch.compile it is left alone, and the products are plain float32.
    """
    if torch.compiler.is_compiling() or hidden.dtype != torch.bfloat16 or hidden.device.type != "cpu":
        yield
        return
    _bfloat16_products.enter()
    try:
        yield
    finally:
        _bfloat16_products.leave()


class _Bfloat16Products:
    """The process's setting while any thread is inside."""

    def __init__(self) -> None:
        backend: Any = torch.backends.mkldnn
        self._settings = backend.matmul
        self._lock = threading.Lock()
        self._num_inside = 0
        self._before = "none"

    def enter(self) -> None:
        with self._lock:
            if self._num_inside == 0:
                self._before = self._settings.fp32_precision
                self._settings.fp32_precision = "bf16"
            self._num_inside += 1

    def leave(self) -> None:
        with self._lock:
            self._num_inside -= 1
            if self._num_inside == 0:
                self._settings.fp32_precision = self._before


_bfloat16_products = _Bfloat16Products()


def _torch_linear_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, plan: LinearPlan
) -> tuple[Tensor, Tensor]:
    rows, float32_logits = plan.arguments(hidden, weight)
    weight = weight[: plan.vocab_size].to(hidden.dtype)
    outputs = []
    for chunk, chunk_targets in zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True):
        arguments = (chunk, weight, chunk_targets, temperature, float32_logits)
        outputs.append(checkpoint(_torch_chunk, *arguments, use_reentrant=False, preserve_rng_state=False))
    logprobs, entropies = zip(*outputs, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _torch_chunk(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, float32_logits: bool
) -> tuple[Tensor, Tensor]:
    if float32_logits and hidden.dtype != torch.float64:
        hidden, weight = hidden.float(), weight.float()
    return token_logprobs(hidden @ weight.t(), targets, temperature, impl="torch")


def _register_formulas() -> None:
    for name, kernel in (
        ("linear_logprobs_fwd", _fake_logprobs),
        ("linear_logprobs_bwd", _fake_gradients),
        ("linear_logprobs_bwd_", _fake_grad_hidden),
        ("linear_policy_loss", _fake_policy_loss),
        ("linear_policy_loss_", _fake_policy_loss_in_place),
    ):
        torch.library.register_fake(f"tandem::{name}", kernel)
    torch.library.register_autograd("tandem::linear_logprobs_fwd", _logprobs_formula, setup_context=_save_for_logprobs)
    torch.library.register_autograd("tandem::linear_policy_loss", _loss_formula, setup_context=_save_for_loss)
    torch.library.register_autograd("tandem::linear_logprobs_bwd", _refuse_second_derivative)


def _new_rows(hidden: Tensor) -> Tensor:
    return hidden.new_empty((hidden.shape[0],), dtype=torch.float32)


def _fake_logprobs(hidden: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return _new_rows(hidden), _new_rows(hidden), _new_rows(hidden)


def _fake_grad_hidden(hidden: Tensor, *_: object) -> Tensor:
    return hidden.new_empty(hidden.shape)


def _fake_gradients(hidden: Tensor, weight: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(hidden.shape), weight.new_empty(weight.shape, dtype=torch.float32)


def _fake_policy_loss_in_place(hidden: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    metrics = hidden.new_empty((len(PolicyMetric),), dtype=torch.float64)
    return hidden.new_empty(hidden.shape), _new_rows(hidden), _new_rows(hidden), metrics


def _fake_policy_loss(hidden: Tensor, weight: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    grad_hidden, logprobs, entropy, metrics = _fake_policy_loss_in_place(hidden)
    return grad_hidden, weight.new_empty(weight.shape, dtype=torch.float32), logprobs, entropy, metrics


def _save_for_logprobs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden, weight, targets, *ctx.numbers = inputs
    _, entropy, lse = output
    ctx.save_for_backward(hidden, weight, targets, lse, entropy)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)


def _logprobs_formula(
    ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    constants = [None] * (1 + len(ctx.numbers))
    if grad_logprobs is None and grad_entropy is None:
        return None, None, *constants
    hidden, weight, targets, lse, entropy = ctx.saved_tensors
    upstream = dense_gradient(grad_logprobs), dense_gradient(grad_entropy)
    with _exact_bfloat16_products(hidden):
        grad_hidden, grad_weight = torch.ops.tandem.linear_logprobs_bwd(
            hidden, weight, targets, lse, entropy, *upstream, *ctx.numbers
        )
    return grad_hidden, grad_weight.to(weight.dtype), *constants


def _save_for_loss(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    grad_hidden, grad_weight, logprobs, entropy, _ = output
    ctx.save_for_backward(grad_hidden, grad_weight)
    ctx.mark_non_differentiable(grad_hidden, grad_weight, logprobs, entropy)
    ctx.weight_dtype = inputs[1].dtype
    ctx.num_constants = len(inputs) - 2


@once_differentiable
def _loss_formula(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    """The loss alone is differentiated: the gradients were computed with it."""
    grad_metrics = upstream[-1]
    constants = [None] * ctx.num_constants
    if grad_metrics is None:
        return None, None, *constants
    grad_hidden, grad_weight = ctx.saved_tensors
    scale = grad_metrics[PolicyMetric.LOSS.value].float()
    return (grad_hidden * scale).to(grad_hidden.dtype), (grad_weight * scale).to(ctx.weight_dtype), *constants


def _refuse_second_derivative(ctx: Any, *_: Tensor) -> None:
    raise FatalError("linear_token_logprobs has no second derivative in native code; use impl='torch' for it")


on_load(_register_formulas)
