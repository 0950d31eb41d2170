"""Digests of tensors where they are, against the transport's own."""

import pytest
import torch

from rl.ops.bucket_copy import tensor_digests
from rl.weights.native import digests_of


def test_digests_are_those_that_a_refit_compares() -> None:
    tensors = [torch.randn(size) for size in (1, 255, 256, 257, 70_001)]
    tensors += [torch.randn(4, 5).to(torch.bfloat16), torch.arange(9, dtype=torch.uint8), torch.tensor(2.0)]
    tensors += [torch.empty(0, 3), torch.randn(9)[1:], torch.ones(3, dtype=torch.bool)]
    digests = tensor_digests(tensors)
    assert digests.dtype == torch.int64 and digests.shape == (len(tensors),)
    assert digests.numpy().tobytes() == digests_of(tensors)
    assert digests[8] == 0


def test_one_bit_makes_another_digest() -> None:
    tensor = torch.zeros(5000)
    before = int(tensor_digests([tensor]))
    tensor.view(torch.int32)[4321] ^= 1
    assert int(tensor_digests([tensor])) != before


def test_what_has_no_bytes_in_a_row_is_refused() -> None:
    with pytest.raises(RuntimeError, match="contiguous"):
        tensor_digests([torch.randn(4, 6).t()])
    with pytest.raises(RuntimeError):
        tensor_digests([])


def test_shapes_are_known_without_data() -> None:
    tensor_digests([torch.zeros(1)])
    digests = torch.ops.tandem.tensor_digests([torch.empty(3, device="meta"), torch.empty(2, device="meta")])
    assert digests.shape == (2,) and digests.dtype == torch.int64
