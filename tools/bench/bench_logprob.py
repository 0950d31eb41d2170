"""Log-probabilities from logits, forward and forward with backward: the fused operator against torch's ways.

    tools/python tools/bench/bench_logprob.py                          N=2048, V=49152, two threads; about 3 minutes
    tools/python tools/bench/bench_logprob.py --device cuda --rows 16384 --vocab 151936

Ours gives entropies too, in the same pass; the others do not. Its backward writes over the logits. Limits: memory (one
read forward; one more read and a write backward) and, on the CPU, one exponential per element and pass: torch's own
in the cache, and ours as the forward of a few rows that never leave the cache.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from rl.ops.logprobs import token_logprobs
from tools.bench import liger, limits, report
from tools.bench.rounds import OURS, Case, Contender

EAGER = "torch eager"
LIGER = "Liger-Kernel"
IN_CACHE = "our passes in the cache"
_CACHE_BYTES = 2**19  # of a core's second cache
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and report."""
    options = report.parse(__doc__, "logprob", arguments, rows=2048, vocab=49152)
    report.run(options, build_cases)


def build_cases(options: argparse.Namespace) -> Mapping[str, Callable[[], Case]]:
    """Return the tables: dtype by direction."""
    return {
        f"{name} {direction}": lambda dtype=dtype, direct=direction: Bench(options, dtype).case(direct)
        for name, dtype in DTYPES.items()
        for direction in ("forward", "forward and backward")
    }


def eager_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """Return log-probabilities the plain way."""
    return torch.log_softmax(logits.float(), dim=-1).gather(1, targets.unsqueeze(1)).squeeze(1)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return log-probabilities by torch's fused loss."""
    return -torch.nn.functional.cross_entropy(logits, targets, reduction="none").float()


def fused(logits: Tensor, targets: Tensor) -> Tensor:
    """Return log-probabilities by the operator of csrc/loss."""
    return token_logprobs(logits, targets, 1.0, impl="native", consume_logits=True)[0]


class Bench:
    """Logits and targets, and who works on them."""

    def __init__(self, options: argparse.Namespace, dtype: torch.dtype) -> None:
        self.device, self.dtype, self.with_compile = options.device, dtype, not options.no_compile
        generator = torch.Generator(self.device).manual_seed(0)
        shape = (options.rows, options.vocab)
        self.original = torch.empty(shape, dtype=dtype, device=self.device).normal_(0, 4, generator=generator)
        self.targets = torch.randint(options.vocab, shape[:1], generator=generator, device=self.device)
        self.upstream = torch.randn(shape[:1], generator=generator, device=self.device)
        self.scratch = self.original

    def case(self, direction: str) -> Case:
        """Return one table."""
        is_backward = direction != "forward"
        if is_backward:
            self.scratch = self.original.clone()  # what our backward writes over
        make = self.forward_backward if is_backward else self.forward
        ways = {OURS: fused, EAGER: eager_logprobs, "F.cross_entropy": cross_entropy}
        if self.with_compile:
            torch.compiler.reset()
            ways["torch.compile"] = torch.compile(eager_logprobs, dynamic=False)
        found = liger.cross_entropy() if is_backward and self.device.type == "cuda" else None
        if found is not None:
            ways[LIGER] = found
        contenders = [make(name, way) for name, way in ways.items()]
        rows, vocab = self.original.shape
        return Case(
            f"{str(self.dtype).removeprefix('torch.')} logits [{rows}, {vocab}], {direction}",
            [*contenders, *self.bounds(is_backward)],
            EAGER,
            self.limits(is_backward),
        )

    def forward(self, name: str, way: Callable[[Tensor, Tensor], Tensor]) -> Contender:
        """Return a contender without gradients."""

        def run() -> Sequence[Tensor]:
            with torch.no_grad():
                return (way(self.original, self.targets),)

        return Contender(name, run, is_optional=name == "torch.compile")

    def forward_backward(self, name: str, way: Callable[[Tensor, Tensor], Tensor]) -> Contender:
        """Return a contender that gives the gradient of the logits too; ours and Liger's write it over them."""
        is_in_place = name in (OURS, LIGER)
        logits = self.scratch if is_in_place else self.original

        def run() -> Sequence[Tensor]:
            leaf = logits.detach().requires_grad_()
            logprobs = way(leaf, self.targets)
            logprobs.backward(self.upstream)
            assert leaf.grad is not None
            return logprobs, leaf.grad

        def restore() -> None:
            self.scratch.copy_(self.original)

        prepare = restore if is_in_place else (lambda: None)
        return Contender(name, run, prepare, is_optional=name in ("torch.compile", LIGER))

    def bounds(self, is_backward: bool) -> list[Contender]:
        """Return the machine's limits."""
        found = [limits.read(self.original.nbytes, self.device), limits.memcpy(self.original.nbytes, self.device)]
        if is_backward:
            found.append(limits.scale(self.original.nbytes, self.device))
        if self.device.type == "cpu":
            found += [limits.exp(self.original.numel()), self.in_cache()]
        return found

    def in_cache(self) -> Contender:
        """Return our forward without memory: as many rows as fit a core's second cache, again and again."""
        rows = self.original.shape[0]
        count = max(1, min(rows, _CACHE_BYTES // self.original[0].nbytes))
        cached, targets = self.original[:count].clone(), self.targets[:count]
        times = max(1, rows // torch.get_num_threads() // count)

        def share() -> None:
            with torch.no_grad():
                for _ in range(times):
                    fused(cached, targets)

        return limits.on_one_core(share, IN_CACHE)

    def limits(self, is_backward: bool) -> dict[str, dict[str, float]]:
        """Return what the limits add up to."""
        memory = {"read": 1.0, "scale in place": 1.0} if is_backward else {"read": 1.0}
        found = {"memory": memory}
        if self.device.type == "cpu":
            passes = 2.0 if is_backward else 1.0
            found |= {"exp": {"exp": passes}, IN_CACHE: {IN_CACHE: passes}}
        return found


if __name__ == "__main__":
    main()
