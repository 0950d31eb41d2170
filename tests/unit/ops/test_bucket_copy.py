"""The bucket copy and the float8 quantisation as torch operators."""

import itertools
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl.core.native import require_native
from rl.ops.bucket_copy import FP8_BLOCK, BucketPlan, bucket_copy, quantize_fp8

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FP8_MAX = 448.0


def bits(tensor: Tensor) -> Tensor:
    """Return the elements as integers, so that signs of zeros count."""
    return tensor.contiguous().view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[tensor.element_size()])


@pytest.mark.parametrize(("source_dtype", "target_dtype"), list(itertools.product(DTYPES, DTYPES)))
def test_casts_as_torch_does(source_dtype: torch.dtype, target_dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 1e-41, 6e-8, 65519.0, 65520.0, 3.4e38])
    sources = [torch.cat([special, torch.randn(size) * 100]).to(source_dtype) for size in (0, 1, 8183, 30000)]
    targets = [torch.empty_like(source, dtype=target_dtype) for source in sources]
    bucket_copy(sources, targets)
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(bits(target), bits(source.to(target_dtype)))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 70), st.sampled_from(DTYPES), st.integers(0, 3)), min_size=1, max_size=12))
def test_packs_into_slices_of_one_buffer_and_back(pieces: list[tuple[int, torch.dtype, int]]) -> None:
    sources = [torch.randn(numel + shift).to(dtype)[shift:] for numel, dtype, shift in pieces]
    buffer = torch.full((sum(source.numel() for source in sources) + 1,), 7.0, dtype=torch.bfloat16)
    packed = list(buffer[:-1].split([source.numel() for source in sources]))
    bucket_copy(sources, packed)
    unpacked = [torch.empty_like(source) for source in sources]
    bucket_copy(packed, unpacked)
    for source, result in zip(sources, unpacked, strict=True):
        assert torch.equal(result, source.to(torch.bfloat16).to(source.dtype))
    assert buffer[-1] == 7.0


def test_keeps_the_payload_of_nans() -> None:
    source = torch.tensor([0x7F81, 0xFFC3 - 0x10000], dtype=torch.int16).view(torch.bfloat16)
    target = torch.empty_like(source)
    bucket_copy([source], [target])
    assert torch.equal(bits(target), bits(source))


def test_a_plan_copies_what_the_sources_hold_when_it_runs() -> None:
    parameter = torch.nn.Parameter(torch.ones(3, 5))
    target = torch.zeros(15, dtype=torch.bfloat16)
    plan = BucketPlan([parameter], [target])
    for value in (2.0, 3.0):
        with torch.no_grad():
            parameter.fill_(value)
        plan.run()
        assert torch.equal(target, torch.full((15,), value, dtype=torch.bfloat16))
    assert plan.bytes_moved == 15 * 4 + 15 * 2


@pytest.mark.parametrize("is_planned", [False, True])
def test_a_backward_that_wanted_the_old_values_raises(is_planned: bool) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    loss = parameter.square().sum()
    sources = [torch.zeros(3)]
    if is_planned:
        BucketPlan(sources, [parameter]).run()
    else:
        bucket_copy(sources, [parameter])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(loss)


def test_copies_ten_thousand_tiny_tensors() -> None:
    sources = list(torch.arange(20000, dtype=torch.float32).view(10000, 2))
    target = torch.empty(20000)
    bucket_copy(sources, list(target.view(10000, 2)))
    assert torch.equal(target, torch.arange(20000, dtype=torch.float32))


def test_tensors_without_elements_are_nothing_to_do() -> None:
    bucket_copy([], [])
    around = torch.ones(2)
    bucket_copy([torch.zeros(0)], [around[1:1]])
    assert around.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (torch.zeros(3), torch.zeros(4), "targets: want 3 elements"),
        (torch.zeros(4, 4).t(), torch.zeros(16), "sources: want contiguous tensors"),
        (torch.zeros(16), torch.zeros(4, 4).t(), "targets: want contiguous tensors"),
        (torch.zeros(3, dtype=torch.int64), torch.zeros(3), "sources: want float32, bfloat16 or float16, got int64"),
    ],
)
def test_refuses_tensors_that_it_cannot_copy(source: Tensor, target: Tensor, message: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(message)):
        bucket_copy([source], [target])
    with pytest.raises(RuntimeError, match=re.escape(message)):
        BucketPlan([source], [target])


def test_refuses_lists_of_different_lengths() -> None:
    with pytest.raises(RuntimeError, match="targets: want 2 tensors, one per source, got 1"):
        bucket_copy([torch.zeros(1), torch.zeros(1)], [torch.zeros(1)])


def reference_fp8(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise with torch's own float8, block by block."""
    rows, cols = tensor.shape
    codes = torch.empty(rows, cols, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // FP8_BLOCK), -(-cols // FP8_BLOCK))
    for i, j in itertools.product(range(scales.shape[0]), range(scales.shape[1])):
        place = (slice(i * FP8_BLOCK, (i + 1) * FP8_BLOCK), slice(j * FP8_BLOCK, (j + 1) * FP8_BLOCK))
        block = tensor[place].float()
        amax = block.abs().amax().clamp(min=1e-12)
        scales[i, j] = amax / FP8_MAX
        inverse = torch.full_like(amax, FP8_MAX) / amax  # number / tensor would be a product with 1 / tensor
        codes[place] = (block * inverse).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes, scales


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "cols"), [(128, 128), (1, 1), (129, 257), (300, 40)])
def test_quantises_as_torch_does(dtype: torch.dtype, rows: int, cols: int) -> None:
    torch.manual_seed(2)
    matrix = (torch.randn(rows, cols) * torch.logspace(-4, 2, cols)).to(dtype)
    codes, scales = quantize_fp8(matrix)
    want_codes, want_scales = reference_fp8(matrix)
    assert torch.equal(scales, want_scales)
    assert torch.equal(bits(codes), bits(want_codes))


def test_reads_rows_that_lie_apart() -> None:
    wide = torch.full((130, 20), float("nan"))
    wide[:, :12] = torch.randn(130, 12)
    codes, scales = quantize_fp8(wide[:, :12])
    want_codes, want_scales = reference_fp8(wide[:, :12])
    assert torch.equal(scales, want_scales) and torch.equal(bits(codes), bits(want_codes))


def test_a_block_of_zeros_gives_zeros_and_a_finite_scale() -> None:
    codes, scales = quantize_fp8(torch.zeros(128, 128))
    assert torch.equal(codes.float() * scales, torch.zeros(128, 128))
    assert torch.isfinite(scales).all() and (scales > 0).all()


def test_infinities_saturate_and_nans_stay() -> None:
    matrix = torch.tensor([[1.0, float("inf"), float("nan"), -float("inf")]])
    codes, scales = quantize_fp8(matrix)
    assert torch.isfinite(scales).all()
    assert codes.float()[0, 1] == FP8_MAX and codes.float()[0, 3] == -FP8_MAX and codes.float()[0, 2].isnan()


def test_opcheck() -> None:
    require_native()
    sources, targets = [torch.randn(5), torch.randn(2, 3)], [torch.zeros(5), torch.zeros(6, dtype=torch.bfloat16)]
    torch.library.opcheck(torch.ops.tandem.bucket_copy_.default, (sources, targets))
    torch.library.opcheck(torch.ops.tandem.quantize_fp8.default, (torch.randn(5, 200),))


def test_compiles_into_one_graph() -> None:
    require_native()

    def pack_and_quantise(source: Tensor) -> tuple[Tensor, Tensor]:
        target = torch.zeros(source.numel(), dtype=torch.bfloat16)
        bucket_copy([source], [target])
        return quantize_fp8(target.view(source.shape))

    source = torch.randn(4, 8)
    compiled = torch.compile(pack_and_quantise, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(source), pack_and_quantise(source), strict=True):
        assert torch.equal(bits(got), bits(want))
