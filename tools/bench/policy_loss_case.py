"""Who computes a policy loss with its gradients, on random tokens: the fused operator, plain torch, torch.compile.

It needs nothing beside torch and rl.ops, so that a bare GPU machine can run it; bench_policy_loss.py adds the project's
own torch form.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl.ops.policy_loss import (
    CorrectionKind,
    PolicyLossParams,
    PolicyLossTokens,
    PolicyMetric,
    RatioKind,
    SurrogateKind,
    policy_loss,
)
from tools.bench import limits
from tools.bench.rounds import OURS, Case, Contender

EAGER = "minimal torch"
OPERATOR = "ours, the operator"
SEQUENCE_TOKENS = 512
CLIP = 0.2
KL_COEF = 0.01
ENTROPY_COEF = 0.01
TRUNCATION = 2.0
# Seven float32 columns are read and two gradients written.
_BYTES_PER_TOKEN = 9 * 4

PARAMS = PolicyLossParams(
    ratio=RatioKind.TOKEN,
    surrogate=SurrogateKind.CLIP,
    clip_low=CLIP,
    clip_high=CLIP,
    dual_clip=None,
    correction=CorrectionKind.TIS,
    correction_low=0.0,
    correction_high=TRUNCATION,
    kl="k3",
    kl_coef=KL_COEF,
    kl_importance_weight=False,
    kl_input_clamp=20.0,
    kl_output_clamp=10.0,
    entropy_coef=ENTROPY_COEF,
)


@dataclass(frozen=True, eq=False)
class Tokens:
    """Random tokens in sequences whose first token does not count; columns [T]."""

    logprobs: Tensor
    entropy: Tensor
    prev_logprobs: Tensor
    reference_logprobs: Tensor
    generation_logprobs: Tensor
    advantages: Tensor
    weights: Tensor

    @classmethod
    def random(cls, count: int, device: torch.device) -> "Tokens":
        """Return `count` tokens."""
        generator = torch.Generator(device).manual_seed(0)

        def noise(scale: float) -> Tensor:
            return scale * torch.randn(count, generator=generator, device=device)

        logprobs = -noise(1.5).abs()
        prev = logprobs + noise(0.1)
        weights = torch.ones(count, device=device)
        weights[::SEQUENCE_TOKENS] = 0.0
        columns = (noise(1.0).abs(), prev, logprobs + noise(0.1), prev + noise(0.05), 0.5 + noise(1.0))
        return cls(logprobs, *columns, weights)


Loss = Callable[[Tensor, Tensor, Tokens], Tensor]


def fused_loss(logprobs: Tensor, entropy: Tensor, tokens: Tokens) -> Tensor:
    """Return the loss by the operator, which sums up 21 metrics on its way."""
    return policy_loss(logprobs, entropy, _columns(tokens), PARAMS).loss


def _columns(tokens: Tokens) -> PolicyLossTokens:
    return PolicyLossTokens(
        generation_logprobs=tokens.generation_logprobs,
        advantages=tokens.advantages,
        shares=tokens.weights,
        weights=tokens.weights,
        prev_logprobs=tokens.prev_logprobs,
        reference_logprobs=tokens.reference_logprobs,
    )


def minimal_loss(logprobs: Tensor, entropy: Tensor, tokens: Tokens) -> Tensor:
    """Return the loss in as few lines of torch as it takes, without any metric."""
    ratio = (logprobs - tokens.prev_logprobs).clamp(-20, 20).exp()
    advantages = tokens.advantages
    surrogate = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP))
    correction = (tokens.prev_logprobs - tokens.generation_logprobs).exp().clamp(max=TRUNCATION)
    distance = (tokens.reference_logprobs - logprobs).clamp(-20, 20)
    # The weight is 1; its gradient is that of the distribution that is sampled from.
    kl = ((logprobs - logprobs.detach()).exp() * (torch.expm1(distance) - distance)).clamp(-10, 10)
    return (tokens.weights * (correction * surrogate + KL_COEF * kl - ENTROPY_COEF * entropy)).sum()


def policy_loss_case(options: argparse.Namespace, more: dict[str, Loss]) -> Case:
    """Return the table; `more` are other ways to compute the loss, by name."""
    device = options.device
    tokens = Tokens.random(options.tokens, device)
    ways: dict[str, Loss] = {OURS: fused_loss, EAGER: minimal_loss, **more}
    if not options.no_compile:
        torch.compiler.reset()
        ways["torch.compile"] = torch.compile(minimal_loss, dynamic=False)
    copied = limits.memcpy(options.tokens * _BYTES_PER_TOKEN // 2, device)
    return Case(
        f"policy loss of {options.tokens} tokens, forward and backward",
        [*(_contender(name, way, tokens) for name, way in ways.items()), _operator(tokens), copied],
        EAGER,
        {"memory": {copied.name: 1.0}},
    )


def _contender(name: str, way: Loss, tokens: Tokens) -> Contender:
    def run() -> Sequence[Tensor]:
        logprobs = tokens.logprobs.detach().requires_grad_()
        entropy = tokens.entropy.detach().requires_grad_()
        loss = way(logprobs, entropy, tokens)
        loss.backward()
        assert logprobs.grad is not None and entropy.grad is not None
        return loss, logprobs.grad, entropy.grad

    return Contender(name, run, is_optional=name == "torch.compile")


def _operator(tokens: Tokens) -> Contender:
    """The operator without autograd around it: its gradients come with the loss, as a trainer's one pass takes them."""
    arguments = (*_columns(tokens).columns(), PARAMS.kinds(), PARAMS.numbers())

    def run() -> Sequence[Tensor]:
        grad_logprobs, grad_entropy, metrics = torch.ops.tandem.policy_loss(tokens.logprobs, tokens.entropy, *arguments)
        return metrics[PolicyMetric.LOSS.value].float(), grad_logprobs, grad_entropy

    return Contender(OPERATOR, run)
