"""The last layer with the policy loss behind it: one pass with both gradients against the ways that recompute or keep.

    tools/python tools/bench/bench_linear_loss.py        N=2048, V=49152, H=576, two threads; about 6 minutes
    tools/python tools/bench/bench_linear_loss.py --device cuda --rows 16384 --vocab 151936 --hidden 4096

The limit is what the work comes to at the speed of this machine's matrix products: the three of one pass (logits,
gradient of the hidden states, gradient of the weight). They are measured on their own: with all rows at once, and in
the chunks of our one pass, which keep the logits in the caches and add to the weight's gradient once per chunk.
"""

import argparse
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rl.ops.linear_logprobs import default_chunk_rows, linear_policy_loss_, linear_token_logprobs
from rl.ops.policy_loss import PolicyLossTokens
from tools.bench import limits, report
from tools.bench.policy_loss_case import PARAMS, Tokens, fused_loss, minimal_loss
from tools.bench.rounds import OURS, Case, Contender

EAGER = "torch eager"
CHUNKED = "torch, chunks computed twice"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Twelve rounds of float32 take 170 s on two cores with AVX-512.
_SECONDS = 180.0
# CHUNKED is twice as slow as the slowest of the others.
_EVERY = 4
# Of the chunks that plain torch computes twice.
_CHUNK_ROWS = 256
_DEVICE_CHUNK_ROWS = 4096


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and report."""
    options = report.parse(__doc__, "linear_loss", arguments, seconds=_SECONDS, rows=2048, vocab=49152, hidden=576)
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
            Contender(CHUNKED, lambda: self.differentiate(self.chunked), every=_EVERY),
        ]
        if self.with_compile:
            torch.compiler.reset()
            compiled = torch.compile(self.eager, dynamic=False)
            contenders.append(Contender("torch.compile", lambda: self.differentiate(compiled), is_optional=True))
        rows, (vocab, hidden) = self.hidden.shape[0], self.weight.shape
        products, chunks = self.products(), ChunkProducts(self.hidden, self.weight)
        chunk_products = Contender("three products in our chunks", chunks.run, is_limit=True)
        return Case(
            f"{str(self.dtype).removeprefix('torch.')} linear layer and loss, N={rows} V={vocab} H={hidden}",
            [*contenders, *products, chunk_products],
            EAGER,
            {"products": {each.name: 1.0 for each in products}, "chunk products": {chunk_products.name: 1.0}},
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


class ChunkProducts:
    """The products of one pass as it makes them: chunk by chunk in memory that is there, adding to the weight's.

    Logits and the gradient of the weight are float32, the gradients of logits and hidden states are of the dtype of
    the operands. A CPU has no product of bfloat16 into float32: there operands that are widened before are taken, and
    the time that our pass takes to widen them is not in here.
    """

    def __init__(self, hidden: Tensor, weight: Tensor) -> None:
        (vocab, width), device, dtype = weight.shape, weight.device, weight.dtype
        self.rows = min(default_chunk_rows(vocab, torch.float32, device), hidden.shape[0])
        self.hidden, self.weight = hidden, weight
        is_widened = device.type == "cpu" and dtype != torch.float32
        self.has_exact_bfloat16 = device.type == "cpu" and dtype == torch.bfloat16
        self.wide_hidden, self.wide_weight = (x.float() if is_widened else x for x in (hidden, weight))
        slab = self.rows, -(-vocab // 64) * 64
        self.logits = torch.empty(slab, device=device)[:, :vocab]
        is_shared = dtype == torch.float32
        self.grad_logits = self.logits if is_shared else torch.randn(slab, dtype=dtype, device=device)[:, :vocab]
        # Of the third product: what the second one has, or that widened.
        self.wide_grad_logits = self.logits if is_widened else self.grad_logits
        self.grad_hidden = torch.empty_like(hidden)
        self.grad_weight = torch.zeros(vocab, width, device=device)

    def run(self) -> Sequence[Tensor]:
        """Make them all."""
        with _bfloat16_units() if self.has_exact_bfloat16 else contextlib.nullcontext():
            for begin in range(0, self.hidden.shape[0], self.rows):
                chunk = slice(begin, begin + self.rows)
                rows = slice(0, self.hidden[chunk].shape[0])
                _multiply(self.wide_hidden[chunk], self.wide_weight.t(), self.logits[rows])
                torch.mm(self.grad_logits[rows], self.weight, out=self.grad_hidden[chunk])
                grad_logits = self.wide_grad_logits[rows]
                _multiply(grad_logits.t(), self.wide_hidden[chunk], self.grad_weight, adds=True)
        return ()


def _multiply(a: Tensor, b: Tensor, out: Tensor, *, adds: bool = False) -> None:
    if a.dtype != out.dtype and adds:  # devices alone
        torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, out=out)
    elif a.dtype != out.dtype:
        torch.ops.aten.mm.dtype_out(a, b, out.dtype, out=out)
    elif adds:
        out.addmm_(a, b)
    else:
        torch.mm(a, b, out=out)


@contextlib.contextmanager
def _bfloat16_units() -> Iterator[None]:
    """Let float32 products run on bfloat16 units, as our operators do for operands that lose nothing by it."""
    backend: Any = torch.backends.mkldnn
    before, backend.matmul.fp32_precision = backend.matmul.fp32_precision, "bf16"
    try:
        yield
    finally:
        backend.matmul.fp32_precision = before


def _logprobs_and_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax((hidden @ weight.t()).float(), dim=-1)
    logprobs = log_p.gather(1, targets.unsqueeze(1)).squeeze(1)
    return logprobs, -(log_p.exp() * log_p).sum(dim=-1)


if __name__ == "__main__":
    main()
