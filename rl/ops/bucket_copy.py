"""Copy many tensors at once, casting on the way, quantise a matrix to float8, and digest tensors where they are.

A bucket of weights is packed before it goes over the wire and unpacked after it, with one launch however many tensors
it holds. Which tensors make a bucket, and when it is sent, is decided elsewhere.

    bucket_copy(parameters, slices_of_the_buffer)

    plan = BucketPlan(parameters, slices_of_the_buffer)    # the same tensors, step after step
    plan.run()

    codes, scales = quantize_fp8(weight)                   # weight ~ codes.float() * scales of its 128 x 128 block
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rl.core.native import on_load, require_native
from rl.ops.native_logprobs import mark_written

FP8_BLOCK = 128


def bucket_copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy every source into its target.

    Equal dtypes copy bits; narrowing rounds to nearest even. On CUDA the table of addresses crosses to the device in
    this call: where the same tensors are copied again and again, a `BucketPlan` saves that.

    Args:
        sources: contiguous float32, bfloat16 or float16 tensors on one device.
        targets: one per source with as many elements, likewise; they share no memory with each other or the sources.

    Raises:
        FatalError: the native library is missing.
        RuntimeError: a tensor is unusable; the message names the list.
    """
    require_native()
    if len(sources) == 0 and len(targets) == 0:
        return
    torch.ops.tandem.bucket_copy_([source.detach() for source in sources], [target.detach() for target in targets])
    mark_written(targets)


class BucketPlan:
    """A bucket's copy, prepared: its table of addresses lies where the tensors do.

    It keeps the tensors. Their memory must stay in place: a parameter may be updated, not replaced (`p.data = ...`).

    Args:
        sources: as of `bucket_copy`, at least one.
        targets: as of `bucket_copy`.

    Raises:
        FatalError: the native library is missing.
        RuntimeError: a tensor is unusable; the message names the list.
    """

    def __init__(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        require_native()
        self._tensors = ([source.detach() for source in sources], [target.detach() for target in targets])
        table: Tensor = torch.ops.tandem.bucket_table(*self._tensors)
        self._num_items = len(sources)
        self._num_tiles = int(table.view(torch.int64)[-1])
        device = self._tensors[0][0].device
        # From pinned memory: the copy is then ordered on the stream like the launches that read it.
        self._table = table if device.type == "cpu" else table.pin_memory().to(device, non_blocking=True)

    @property
    def sources(self) -> Sequence[Tensor]:
        """What is copied, without gradient."""
        return self._tensors[0]

    @property
    def bytes_moved(self) -> int:
        """Bytes that one run reads and writes."""
        return sum(tensor.nbytes for tensors in self._tensors for tensor in tensors)

    def run(self) -> None:
        """Copy; on CUDA on the current stream, without waiting for it."""
        torch.ops.tandem.bucket_copy_table(self._table, self._num_items, self._num_tiles)
        mark_written(self._tensors[1])


def quantize_fp8(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix as float8 e4m3 with one scale per block of 128 x 128.

    Codes times scale give the matrix back, to half a step of 3 bits. A block's scale is its largest magnitude / 448,
    held in [1e-12, 3.4e38] / 448, so that a block of zeros gives zeros; infinities become 448 times the scale; NaNs
    stay NaNs and leave their block alone. No gradient.

    Args:
        tensor: [rows, cols] float32, bfloat16 or float16; adjacent columns, any row stride.

    Returns:
        codes [rows, cols] float8_e4m3fn, scales [ceil(rows / 128), ceil(cols / 128)] float32.

    Raises:
        FatalError: the native library is missing.
        RuntimeError: the tensor is unusable.
    """
    require_native()
    codes, scales = torch.ops.tandem.quantize_fp8(tensor.detach())
    return codes, scales


def tensor_digests(tensors: Sequence[Tensor]) -> Tensor:
    """Return the digest of every tensor's bytes, the number that a refit compares (csrc/refit/digest.h).

    On CUDA the numbers are made on the device and stay there; the same bytes give the same number on a host.

    Args:
        tensors: contiguous tensors of any dtype on one device, at least one.

    Returns:
        [N] int64, on the tensors' device.

    Raises:
        FatalError: the native library is missing.
        RuntimeError: a tensor is unusable.
    """
    require_native()
    digests: Tensor = torch.ops.tandem.tensor_digests([tensor.detach() for tensor in tensors])
    return digests


def _register_formulas() -> None:
    torch.library.register_fake("tandem::bucket_copy_", _fake_bucket_copy)
    torch.library.register_fake("tandem::quantize_fp8", _fake_quantize_fp8)
    torch.library.register_fake("tandem::tensor_digests", _fake_tensor_digests)


def _fake_bucket_copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    """Nothing to infer: the result is in the second argument."""


def _fake_quantize_fp8(source: Tensor) -> tuple[Tensor, Tensor]:
    rows, cols = source.shape
    blocks = ((rows + FP8_BLOCK - 1) // FP8_BLOCK, (cols + FP8_BLOCK - 1) // FP8_BLOCK)
    return source.new_empty((rows, cols), dtype=torch.float8_e4m3fn), source.new_empty(blocks, dtype=torch.float32)


def _fake_tensor_digests(tensors: list[Tensor]) -> Tensor:
    return tensors[0].new_empty(len(tensors), dtype=torch.int64)


on_load(_register_formulas)
