"""Sends tensors through the native transfer to a thread of this process, and compares what arrives bit for bit.

for name, test in refit_tests():
    print(name, test())
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

import torch
from torch import Tensor

from rl.core.resources import RunResources
from rl.weights.native import Finished, LinkOptions, NativeReceiver, NativeSender, Plan, digests_of
from rl.weights.transport import RefitStart, TensorSpec, TransportName

TIMEOUT_S: Final = 20.0
NUM_SLOTS: Final = 2
BUCKET_BYTES: Final = 64 << 10
# Larger than a bucket, of several dtypes, empty, without a dimension.
SPECS: Final = (
    TensorSpec("embed", "float32", (300, 77)),
    TensorSpec("norm", "bfloat16", (515,)),
    TensorSpec("none", "float16", (0, 4)),
    TensorSpec("scale", "float32", ()),
    TensorSpec("codes", "int8", (129,)),
)

Test = Callable[[], str]


def refit_tests() -> list[tuple[str, Test]]:
    """Return what to run here, with its names."""
    return [("refit, shared memory", partial(send_tensors, "shm")), ("refit, TCP", partial(send_tensors, "tcp"))]


def send_tensors(transport: TransportName) -> str:
    """Send tensors from one end to the other.

    Raises:
        RuntimeError: something else arrived.
    """
    generator = torch.Generator().manual_seed(0)
    source = [torch.randint(-100, 100, spec.shape, generator=generator).to(vars(torch)[spec.dtype]) for spec in SPECS]
    target = [torch.zeros_like(tensor) for tensor in source]
    plan = Plan.build(SPECS, BUCKET_BYTES)
    host = "127.0.0.1" if transport == "tcp" else ""
    options = LinkOptions(transport, NUM_SLOTS, num_readers=1, silence_s=TIMEOUT_S, host=host)
    with RunResources.create() as run:
        sender = NativeSender(plan, 0, run.shm_name("selftest-refit"), options)
        try:
            with ThreadPoolExecutor(1) as pool:
                receiving = pool.submit(_receive, plan, sender.address, options, target)
                sent = _send(sender, _per_bucket(plan, source))
                received = receiving.result(TIMEOUT_S)
        finally:
            sender.close()
    if not all(map(torch.equal, source, target)):
        names = [spec.name for spec, a, b in zip(SPECS, source, target, strict=True) if not torch.equal(a, b)]
        raise RuntimeError(f"other bytes arrived in {', '.join(names)}")
    if not sent.digests == received.digests == digests_of(source):
        raise RuntimeError("the digests of both ends differ although the tensors are equal")
    return f"{len(SPECS)} tensors in {len(plan.buckets)} buckets arrived, digests agree"


def _send(sender: NativeSender, tensors: list[list[Tensor]]) -> Finished:
    sender.join(TIMEOUT_S)
    sender.begin(RefitStart(1, 1, TIMEOUT_S))
    sender.send(0, tensors)
    return sender.finish()


def _receive(plan: Plan, address: str, options: LinkOptions, target: list[Tensor]) -> Finished:
    receiver = NativeReceiver(plan, 0, [address], options)
    try:
        receiver.join(TIMEOUT_S)
        receiver.begin(RefitStart(1, 1, TIMEOUT_S))
        receiver.receive(0, _per_bucket(plan, target))
        return receiver.finish()
    finally:
        receiver.close()


def _per_bucket(plan: Plan, tensors: list[Tensor]) -> list[list[Tensor]]:
    return [[tensors[piece.tensor] for piece in bucket.pieces] for bucket in plan.buckets]
