"""What bounds a kernel on the machine at hand, as contenders that are measured in the same rounds.

read, scale and memcpy move memory; exp computes in the cache; gemm multiplies matrices.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tools.bench.rounds import Contender

# Source and target stay in a core's first two caches.
_CACHED_ELEMENTS = 2**14


def read(num_bytes: int, device: torch.device, name: str = "read") -> Contender:
    """Return a contender that reads memory once."""
    buffer = torch.ones(num_bytes // 4, device=device)

    def run() -> Sequence[Tensor]:
        buffer.sum()
        return ()

    return Contender(name, run, is_limit=True)


def scale(num_bytes: int, device: torch.device, name: str = "scale in place") -> Contender:
    """Return a contender that reads memory and writes it back."""
    buffer = torch.ones(num_bytes // 4, device=device)

    def run() -> Sequence[Tensor]:
        buffer.mul_(1.0)
        return ()

    return Contender(name, run, is_limit=True)


def memcpy(num_bytes: int, device: torch.device, name: str = "memcpy") -> Contender:
    """Return a contender that copies: `num_bytes` are read and as many written."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)

    def run() -> Sequence[Tensor]:
        target.copy_(source)
        return ()

    return Contender(name, run, is_limit=True)


def on_one_core(share: Callable[[], object], name: str) -> Contender:
    """Return a contender that does one thread's share of a computation, as if the others ran beside it undisturbed.

    Many short parallel calls would measure how threads wait for each other.
    """

    def run() -> Sequence[Tensor]:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            share()
        finally:
            torch.set_num_threads(threads)
        return ()

    return Contender(name, run, is_limit=True)


def exp(num_elements: int, name: str = "exp") -> Contender:
    """Return a contender that computes exponentials of float32 on the CPU without leaving a core's caches."""
    source = torch.linspace(-20.0, 0.0, _CACHED_ELEMENTS)
    target = torch.empty_like(source)
    times = max(1, num_elements // torch.get_num_threads() // _CACHED_ELEMENTS)

    def share() -> None:
        for _ in range(times):
            torch.exp(source, out=target)

    return on_one_core(share, name)


def gemm(a: Tensor, b: Tensor, name: str) -> Contender:
    """Return a contender that multiplies two matrices into one that is there."""
    out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)

    def run() -> Sequence[Tensor]:
        torch.mm(a, b, out=out)
        return ()

    return Contender(name, run, is_limit=True)
