"""The last layer with the policy loss behind it: one pass with both gradients against the ways that recompute or keep.

    tools/python tools/bench/bench_linear_loss.py        N=2048, V=49152, H=576, two threads; about 3 minutes
    tools/python tools/bench/bench_linear_loss.py --device cuda --rows 16384 --vocab 151936 --hidden 4096

The limit is what the work comes to at the speed of this machine's matrix products: the three of one pass (logits,
gradient of the hidden states, gradient of the weight), which are measured on their own with all rows at once.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rl.ops.linear_logprobs import linear_policy_loss_, linear_token_logprobs
from rl.ops.policy_loss import PolicyLossTokens
from tools.bench import limits, report
from tools.bench.policy_loss_case import PARAMS, Tokens, fused_loss, minimal_loss
from tools.bench.rounds import OURS, Case, Contender

EAGER = "torch eager"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Of the chunks that plain torch computes twice.
_CHUNK_ROWS = 256
_DEVICE_CHUNK_ROWS = 4096


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and report."""
    options = report.parse(__doc__, "linear_loss", arguments, rows=2048, vocab=49152, hidden=576)
    report.run(options, build_cases)


def build_cases(options: argparse.Namespace) -> Mapping[str, Callable[[], Case]]:
    """Return the tables: one per dtype."""
    return {name: lambda dtype=dtype: Bench(options, dtype).case() for name, dtype in DTYPES.items()}


class Bench:
    """Hidden states, a head and tokens, and who computes loss and gradients."""

    def __init__(self, options: argparse.Namespace, dtype: torch.dtype) -> None:
        self.device, self.dtype, self.with_compile = options.device, dtype, not options.no_compile
        generator = torch.Generator(self.device).manual_seed(0)

        def noise(rows: int, scale: float) -> Tensor:
            values = torch.randn(rows, options.hidden, generator=generator, device=self.device)
            return (scale * values).to(dtype)

        self.hidden, self.weight = noise(options.rows, 1.0), noise(options.vocab, 2.0 / options.hidden**0.5)
        self.targets = torch.randint(options.vocab, (options.rows,), generator=generator, device=self.device)
        self.tokens = Tokens.random(options.rows, self.device)
        self.columns = PolicyLossTokens(
            generation_logprobs=self.tokens.generation_logprobs,
            advantages=self.tokens.advantages,
            shares=self.tokens.weights,
            weights=self.tokens.weights,
            prev_logprobs=self.tokens.prev_logprobs,
            reference_logprobs=self.tokens.reference_logprobs,
        )

    def case(self) -> Case:
        """Return the table."""
        contenders = [
            Contender(OURS, self.one_pass),
            Contender("ours, two passes", lambda: self.differentiate(self.two_passes)),
            Contender(EAGER, lambda: self.differentiate(self.eager), is_optional=True),  # memory may not suffice
            Contender("torch, chunks computed twice", lambda: self.differentiate(self.chunked)),
        ]
        if self.with_compile:
            torch.compiler.reset()
            compiled = torch.compile(self.eager, dynamic=False)
            contenders.append(Contender("torch.compile", lambda: self.differentiate(compiled), is_optional=True))
        rows, (vocab, hidden) = self.hidden.shape[0], self.weight.shape
        products = self.products()
        return Case(
            f"{str(self.dtype).removeprefix('torch.')} linear layer and loss, N={rows} V={vocab} H={hidden}",
            [*contenders, *products],
            EAGER,
            {"products": {product.name: 1.0 for product in products}},
        )

    def one_pass(self) -> Sequence[Tensor]:
        """Return loss and gradients of our one pass; the weight's gradient is float32."""
        grad_weight = torch.zeros(self.weight.shape, device=self.device)
        result = linear_policy_loss_(
            self.hidden, self.weight, self.targets, 1.0, self.columns, PARAMS, grad_weight=grad_weight
        )
        return result.loss, result.grad_hidden, grad_weight

    def two_passes(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return the loss of our log-probabilities, whose logits the backward computes again."""
        return fused_loss(*linear_token_logprobs(hidden, weight, self.targets, 1.0), self.tokens)

    def eager(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return the loss the plain way, all logits at once."""
        return minimal_loss(*_logprobs_and_entropy(hidden, weight, self.targets), self.tokens)

    def chunked(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return the loss in chunks of rows that plain torch computes again in the backward."""
        size = _CHUNK_ROWS if self.device.type == "cpu" else _DEVICE_CHUNK_ROWS
        parts = [
            checkpoint(_logprobs_and_entropy, rows, weight, targets, use_reentrant=False)
            for rows, targets in zip(hidden.split(size), self.targets.split(size), strict=True)
        ]
        logprobs, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
        return minimal_loss(logprobs, entropy, self.tokens)

    def differentiate(self, way: Callable[[Tensor, Tensor], Tensor]) -> Sequence[Tensor]:
        """Return loss and gradients by autograd."""
        hidden, weight = (tensor.detach().requires_grad_() for tensor in (self.hidden, self.weight))
        loss = way(hidden, weight)
        loss.backward()
        assert hidden.grad is not None and weight.grad is not None
        return loss, hidden.grad, weight.grad

    def products(self) -> list[Contender]:
        """Return the three matrix products of one pass."""
        logits = torch.randn(self.hidden.shape[0], self.weight.shape[0], device=self.device).to(self.dtype)
        return [
            limits.gemm(self.hidden, self.weight.t(), "product of logits"),
            limits.gemm(logits, self.weight, "product of hidden gradient"),
            limits.gemm(logits.t(), self.hidden, "product of weight gradient"),
        ]


def _logprobs_and_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax((hidden @ weight.t()).float(), dim=-1)
    logprobs = log_p.gather(1, targets.unsqueeze(1)).squeeze(1)
    return logprobs, -(log_p.exp() * log_p).sum(dim=-1)


if __name__ == "__main__":
    main()
