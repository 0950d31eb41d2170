"""Compares the native kernels with plain torch on this machine: on the CPU, and on the GPU where there is one.

for name, test in kernel_tests():
    print(name, test())
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from rl.ops.bucket_copy import bucket_copy
from rl.ops.linear_logprobs import linear_policy_loss, linear_token_logprobs
from rl.ops.logprobs import LogprobImpl, logits_thresholds, token_logprobs
from rl.ops.policy_loss import (
    CorrectionKind,
    PolicyLossParams,
    PolicyLossTokens,
    RatioKind,
    SurrogateKind,
    policy_loss,
)

ROWS = 33
HIDDEN = 48
VOCABULARY = 517
TEMPERATURE = 0.7
CLIP = 0.2
ENTROPY_COEF = 0.01
LOGPROB_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
PARAMS = PolicyLossParams(
    ratio=RatioKind.TOKEN,
    surrogate=SurrogateKind.CLIP,
    clip_low=CLIP,
    clip_high=CLIP,
    dual_clip=None,
    correction=CorrectionKind.OFF,
    correction_low=0.0,
    correction_high=float("inf"),
    kl="k3",
    kl_coef=0.0,
    kl_importance_weight=False,
    kl_input_clamp=None,
    kl_output_clamp=None,
    entropy_coef=ENTROPY_COEF,
)

Test = Callable[[], str]


def kernel_tests() -> list[tuple[str, Test]]:
    """Return what to run here, with its names."""
    tests: list[tuple[str, Test]] = []
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for device in devices:
        place = "" if device == "cpu" else " on the GPU"
        for dtype, tolerance in LOGPROB_TOLERANCES.items():
            name = f"native logprobs, {str(dtype).removeprefix('torch.')}{place}"
            tests.append((name, partial(compare_logprobs, dtype, tolerance, device)))
        tests.append((f"native sampling thresholds{place}", partial(compare_thresholds, 0.0, device)))
        tests.append((f"native policy loss{place}", partial(compare_policy_loss, 1e-5, device)))
        tests.append((f"native linear layer and logprobs{place}", partial(compare_linear_logprobs, 1e-4, device)))
        tests.append((f"native linear layer and loss in one pass{place}", partial(compare_one_pass, 1e-4, device)))
        tests.append((f"native bucket copy{place}", partial(compare_bucket_copy, device)))
    return tests


def compare_logprobs(dtype: torch.dtype, tolerance: float, device: str) -> str:
    """Compare values and gradients of the native operator with plain torch."""
    logits, targets = make_rows(dtype, device)
    native = values_and_gradient(logits, targets, "native")
    plain = values_and_gradient(logits, targets, "torch")
    return judge(native, plain, tolerance)


def compare_thresholds(tolerance: float, device: str) -> str:
    """Compare the logits at which top-k and top-p cut with plain torch: they are some of the logits, bit by bit."""
    logits, _ = make_rows(torch.float32, device)

    def cuts(impl: LogprobImpl) -> tuple[Tensor, ...]:
        found = [
            logits_thresholds(logits, top_k=top_k, top_p=top_p, temperature=TEMPERATURE, impl=impl)
            for top_k, top_p in ((20, 1.0), (None, 0.9), (20, 0.9))
        ]
        return tuple(cut for cut in found if cut is not None)

    return judge(cuts("native"), cuts("torch"), tolerance)


def compare_policy_loss(tolerance: float, device: str) -> str:
    """Compare the loss and its derivatives by log-probability and entropy with plain torch."""
    tokens = make_tokens(device)
    logprobs = (tokens.generation_logprobs + 0.1).requires_grad_()
    entropy = torch.linspace(0, 3, ROWS, device=device).requires_grad_()
    inputs = (logprobs, entropy)
    native = policy_loss(logprobs, entropy, tokens, PARAMS).loss
    plain = plain_loss(logprobs, entropy, tokens)
    return judge((native, *gradients(native, *inputs)), (plain, *gradients(plain, *inputs)), tolerance)


def compare_linear_logprobs(tolerance: float, device: str) -> str:
    """Compare values and gradients of a linear layer's log-probabilities and entropies with plain torch."""
    hidden, weight = inputs = make_layer(device)
    _, targets = make_rows(torch.float32, device)

    def results(logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, ...]:
        return logprobs, entropy, *gradients(logprobs.sum() + 0.1 * entropy.sum(), *inputs)

    native = results(*linear_token_logprobs(hidden, weight, targets, TEMPERATURE))
    plain = results(*token_logprobs(hidden @ weight.t(), targets, TEMPERATURE, impl="torch"))
    return judge(native, plain, tolerance)


def compare_one_pass(tolerance: float, device: str) -> str:
    """Compare loss and gradients of a linear layer, by chunks and in one pass, with plain torch."""
    hidden, weight = inputs = make_layer(device)
    tokens, (_, targets) = make_tokens(device), make_rows(torch.float32, device)
    native = linear_policy_loss(hidden, weight, targets, TEMPERATURE, tokens, PARAMS).loss
    logprobs, entropy = token_logprobs(hidden @ weight.t(), targets, TEMPERATURE, impl="torch")
    plain = plain_loss(logprobs, entropy, tokens)
    return judge((native, *gradients(native, *inputs)), (plain, *gradients(plain, *inputs)), tolerance)


def compare_bucket_copy(device: str) -> str:
    """Copy and cast tensors of odd sizes at once; each must have the bits of torch's own cast."""
    generator = torch.Generator().manual_seed(2)
    sources = [torch.randn(count, generator=generator).to(device) for count in (1, 517, 9001)]
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    targets = [torch.empty_like(source, dtype=dtype) for source, dtype in zip(sources, dtypes, strict=True)]
    bucket_copy(sources, targets)
    for source, target in zip(sources, targets, strict=True):
        if not torch.equal(source.to(target.dtype), target):
            raise RuntimeError(f"the copy to {target.dtype} differs from torch's")
    return f"{len(sources)} tensors copied and cast"


def make_rows(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Return logits [N, V] and targets [N]."""
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(ROWS, VOCABULARY, generator=generator)).to(dtype)
    return logits.to(device), torch.randint(0, VOCABULARY, (ROWS,), generator=generator).to(device)


def make_layer(device: str) -> tuple[Tensor, Tensor]:
    """Return hidden states [N, H] and a matrix [V, H], both with gradient."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator).to(device).requires_grad_()
    return hidden, (0.3 * torch.randn(VOCABULARY, HIDDEN, generator=generator)).to(device).requires_grad_()


def make_tokens(device: str) -> PolicyLossTokens:
    """Return the columns of tokens whose ratios the clip reaches on both sides."""
    generation = torch.linspace(-9, -0.5, ROWS, device=device)
    return PolicyLossTokens(
        generation_logprobs=generation,
        advantages=torch.linspace(-1, 1, ROWS, device=device),
        shares=torch.full((ROWS,), 1 / ROWS, device=device),
        weights=torch.ones(ROWS, device=device),
        prev_logprobs=generation + torch.linspace(-0.4, 0.6, ROWS, device=device),
    )


def plain_loss(logprobs: Tensor, entropy: Tensor, tokens: PolicyLossTokens) -> Tensor:
    """The clipped surrogate with an entropy bonus, in torch."""
    if tokens.prev_logprobs is None:
        raise RuntimeError("the clipped surrogate needs the log-probabilities before the step")
    ratios = (logprobs - tokens.prev_logprobs).clamp(-20, 20).exp()
    clipped = ratios.clamp(1 - CLIP, 1 + CLIP)
    surrogate = torch.maximum(-tokens.advantages * ratios, -tokens.advantages * clipped)
    return (tokens.shares * (surrogate - ENTROPY_COEF * entropy)).sum()


def values_and_gradient(logits: Tensor, targets: Tensor, impl: LogprobImpl) -> tuple[Tensor, Tensor, Tensor]:
    """Return logprobs [N], entropy [N], and the gradient [N, V] of a weighted sum of both."""
    leaf = logits.clone().requires_grad_()
    logprobs, entropy = token_logprobs(leaf, targets, TEMPERATURE, impl=impl)
    (gradient,) = gradients(logprobs.sum() + 0.1 * entropy.sum(), leaf)
    return logprobs, entropy, gradient


def gradients(loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of the loss."""
    return torch.autograd.grad(loss, inputs)


def judge(native: tuple[Tensor, ...], plain: tuple[Tensor, ...], tolerance: float) -> str:
    """Say how far results are apart.

    Raises:
        RuntimeError: they are further apart than is allowed.
    """
    difference = max(
        float((a.detach().float() - b.detach().float()).abs().max()) for a, b in zip(native, plain, strict=True)
    )
    if not difference <= tolerance:
        raise RuntimeError(f"native and plain results differ by {difference:.2e}, allowed {tolerance:.0e}")
    return f"differs from plain torch by {difference:.1e}"
