"""Packing a bucket of weights with a cast, and float8 quantisation: one launch against a loop of torch's copies.

    tools/python tools/bench/bench_pack.py        two buckets and one matrix, two threads; about a minute

The buckets: 300 tensors of a transformer's sizes, and ten thousand tiny ones. Limit: a copy of as many bytes.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from rl.ops.bucket_copy import FP8_BLOCK, BucketPlan, bucket_copy, quantize_fp8
from tools.bench import limits, report
from tools.bench.rounds import OURS, Case, Contender

LOOP = "torch copy_ loop"
_FP8_MAX = 448.0
_TINY_ELEMENTS = 1000


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and report."""
    options = report.parse(__doc__, "pack", arguments, tensors=300, tiny=10000, hidden=576)
    report.run(options, build_cases)


def build_cases(options: argparse.Namespace) -> Mapping[str, Callable[[], Case]]:
    """Return the tables: float32 to bfloat16 and bfloat16 as it is, of large and of tiny tensors; float8."""
    hidden = options.hidden
    shapes = [(hidden, hidden), (4 * hidden, hidden), (hidden,)]
    large = [shapes[i % len(shapes)] for i in range(options.tensors)]
    tiny = [(_TINY_ELEMENTS,)] * options.tiny
    return {
        "cast": lambda: bucket_case("float32 to bfloat16", large, torch.float32, options.device),
        "copy": lambda: bucket_case("bfloat16", large, torch.bfloat16, options.device),
        "tiny": lambda: bucket_case("float32 to bfloat16", tiny, torch.float32, options.device),
        "fp8": lambda: fp8_case(options.tensors, hidden, options.device),
    }


def bucket_case(title: str, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> Case:
    """Return the table of a bucket that is packed into bfloat16."""
    generator = torch.Generator(device).manual_seed(0)
    sources = [torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes]
    sizes = [source.numel() for source in sources]
    buffer = torch.empty(sum(sizes), dtype=torch.bfloat16, device=device)
    targets = list(buffer.split(sizes))
    plan = BucketPlan(sources, targets)

    def planned() -> Sequence[Tensor]:
        plan.run()
        return (buffer,)

    def unplanned() -> Sequence[Tensor]:
        bucket_copy(sources, targets)
        return (buffer,)

    def loop() -> Sequence[Tensor]:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source.view(-1))
        return (buffer,)

    def concatenate() -> Sequence[Tensor]:
        return (torch.cat([source.view(-1) for source in sources]).to(torch.bfloat16),)

    copied = limits.memcpy(plan.bytes_moved // 2, device)
    return Case(
        f"{title}, {len(sources)} tensors, {plan.bytes_moved / 1e6:.0f} MB moved",
        [
            Contender(OURS, planned, buffer.zero_),
            Contender("ours, without a plan", unplanned, buffer.zero_),
            Contender(LOOP, loop, buffer.zero_),
            Contender("torch.cat", concatenate),
            copied,
        ],
        LOOP,
        {"memory": {copied.name: 1.0}},
    )


def fp8_case(tensors: int, hidden: int, device: torch.device) -> Case:
    """Return the table of a bfloat16 matrix that becomes float8 with a scale per block."""
    rows = -(-tensors * hidden // FP8_BLOCK) * FP8_BLOCK
    cols = -(-hidden // FP8_BLOCK) * FP8_BLOCK
    generator = torch.Generator(device).manual_seed(0)
    matrix = torch.randn(rows, cols, generator=generator, device=device).to(torch.bfloat16)

    def ours() -> Sequence[Tensor]:
        codes, scales = quantize_fp8(matrix)
        return codes.view(torch.uint8), scales

    def eager() -> Sequence[Tensor]:
        blocks = matrix.float().view(rows // FP8_BLOCK, FP8_BLOCK, cols // FP8_BLOCK, FP8_BLOCK)
        amax = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12)
        inverse = torch.full_like(amax, _FP8_MAX) / amax  # number / tensor would be a product with 1 / tensor
        codes = (blocks * inverse[:, None, :, None]).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
        return codes.view(rows, cols).view(torch.uint8), amax / _FP8_MAX

    copied = limits.memcpy(matrix.numel() * 3 // 2, device)
    return Case(
        f"bfloat16 [{rows}, {cols}] to float8, blocks of {FP8_BLOCK} x {FP8_BLOCK}",
        [Contender(OURS, ours), Contender("torch eager", eager), copied],
        "torch eager",
        {"memory": {copied.name: 1.0}},
    )


if __name__ == "__main__":
    main()
