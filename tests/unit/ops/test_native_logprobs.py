"""The row operators as torch sees them: registration, compilation, memory, threads, errors."""

import math
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from rl.core.errors import FatalError
from rl.core.native import require_native
from rl.ops.native_logprobs import native_logits_threshold, native_token_logprobs

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    targets = torch.randint(0, 257, (9,), generator=generator)
    targets[4] = -100
    return torch.randn(9, 257, generator=generator), targets


@pytest.fixture
def thread_count() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def backward(logits: Tensor, targets: Tensor, consume_logits: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    leaf = logits.detach().clone().requires_grad_()
    logprobs, entropy = native_token_logprobs(leaf * 1, targets, 0.7, consume_logits=consume_logits)
    (logprobs.sum() + 0.3 * entropy.sum()).backward()
    assert leaf.grad is not None
    return logprobs.detach(), entropy.detach(), leaf.grad


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck_passes_for_the_forward(rows: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    require_native()
    logits, targets = rows[0].to(dtype), rows[1]
    operator = torch.ops.tandem.token_logprobs_fwd.default
    for options in ((), (torch.zeros(9),), (None, 250)):
        torch.library.opcheck(operator, (logits.clone().requires_grad_(), targets % 250, 0.7, *options))


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck_passes_for_every_gradient(rows: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    require_native()
    operators = torch.ops.tandem
    logits, targets = rows[0].to(dtype), rows[1]
    _, entropy, lse = operators.token_logprobs_fwd(logits, targets, 0.7)
    ones = torch.ones(9)
    for name, options in (
        ("token_logprobs_bwd", (torch.zeros(9), 257)),
        ("token_logprobs_bwd_", (None, None)),
        ("logits_gradient", (torch.zeros(9), 0, 257)),
        ("logits_gradient_", (None, 0, None)),
    ):
        for upstream in ((ones, ones), (ones, None), (None, ones)):
            arguments = (logits.clone(), targets, lse, entropy, *upstream, 0.7, *options)
            torch.library.opcheck(getattr(operators, name).default, arguments)


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck_passes_for_the_steps_of_a_shard(rows: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    require_native()
    operators = torch.ops.tandem
    logits, targets = rows[0].to(dtype), rows[1]
    torch.library.opcheck(operators.logits_stats.default, (logits, targets, 0.7, torch.zeros(9), 100, 300))
    stats = torch.stack([operators.logits_stats(logits, targets, 0.7, None, start) for start in (0, 257)])
    torch.library.opcheck(operators.stats_finish.default, (stats, targets))
    torch.library.opcheck(operators.logits_threshold.default, (logits, 5, 0.9, 0.7))


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_a_whole_graph_compiles_and_gives_the_same_numbers(rows: tuple[Tensor, Tensor], is_dynamic: bool) -> None:
    require_native()
    logits, targets = rows

    def loss(x: Tensor, t: Tensor) -> Tensor:
        logprobs, entropy = native_token_logprobs(x * 1, t, 0.7, consume_logits=True)
        return logprobs.sum() + 0.3 * entropy.sum()

    leaf = logits.clone().requires_grad_()
    torch.compile(loss, fullgraph=True, dynamic=is_dynamic)(leaf, targets).backward()
    torch.testing.assert_close(leaf.grad, backward(logits, targets)[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_whole_graph_with_the_sampler_s_cut_compiles(rows: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    require_native()
    logits, targets = rows[0].to(dtype), rows[0].argmax(dim=1)

    def loss(x: Tensor, t: Tensor) -> Tensor:
        thresholds = native_logits_threshold(x, 40, 0.9, 0.7)
        logprobs, entropy = native_token_logprobs(x * 1, t, 0.7, thresholds=thresholds, vocab_size=257)
        return logprobs.sum() + 0.3 * entropy.sum()

    gradients = []
    for function in (torch.compile(loss, fullgraph=True), loss):
        leaf = logits.clone().requires_grad_()
        function(leaf, targets).backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)
    assert (gradients[0] == 0).sum() > 9 * 200


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_bitwise_equal_on_one_and_two_threads(thread_count: None, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(33, 32001, generator=generator).to(dtype)
    targets = torch.randint(0, 32001, (33,), generator=generator)
    results = []
    for threads in (1, 2, 1):
        torch.set_num_threads(threads)
        results.append(backward(logits, targets))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_the_consuming_backward_writes_the_gradient_over_the_logits(rows: tuple[Tensor, Tensor]) -> None:
    leaf = rows[0].clone().requires_grad_()
    logits = leaf * 1
    address, seen = logits.data_ptr(), []
    logits.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
    logprobs, _ = native_token_logprobs(logits, rows[1], 0.7, consume_logits=True)
    logprobs.sum().backward()
    assert seen == [address]
    expected = rows[0].clone().requires_grad_()
    native_token_logprobs(expected, rows[1], 0.7)[0].sum().backward()
    assert leaf.grad is not None
    assert expected.grad is not None
    assert torch.equal(leaf.grad, expected.grad)


def test_a_second_walk_over_consumed_logits_is_refused_clearly(rows: tuple[Tensor, Tensor]) -> None:
    leaf = rows[0].clone().requires_grad_()
    loss = native_token_logprobs(leaf * 1, rows[1], 0.7, consume_logits=True)[0].sum()
    loss.backward(retain_graph=True)
    with pytest.raises(FatalError, match="consume_logits=False"):
        loss.backward()


def test_another_user_of_consumed_logits_is_caught_by_autograd(rows: tuple[Tensor, Tensor]) -> None:
    leaf = rows[0].clone().requires_grad_()
    logits = leaf * 1
    squares = logits.square().sum()  # saves the logits for its own backward
    native_token_logprobs(logits, rows[1], 0.7, consume_logits=True)[0].sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()


def test_gradients_of_several_uses_of_the_logits_add_up(rows: tuple[Tensor, Tensor]) -> None:
    gradients = []
    for consume_logits in (False, True):
        leaf = rows[0].clone().requires_grad_()
        logits = leaf * 1
        logprobs, entropy = native_token_logprobs(logits, rows[1], 0.7, consume_logits=consume_logits)
        (logprobs.sum() + entropy.sum() + 2 * logits.sum()).backward()
        gradients.append(leaf.grad)
    assert gradients[0] is not None
    assert torch.equal(*gradients)


def test_second_derivatives_are_refused_clearly(rows: tuple[Tensor, Tensor]) -> None:
    leaf = rows[0].clone().requires_grad_()
    logprobs, entropy = native_token_logprobs(leaf, rows[1], 0.7)
    (gradient,) = torch.autograd.grad((logprobs * entropy).sum(), leaf, create_graph=True)
    with pytest.raises(FatalError, match="second derivative"):
        gradient.sum().backward()


def test_no_gradient_is_made_when_none_is_wanted(rows: tuple[Tensor, Tensor]) -> None:
    with torch.no_grad():
        logprobs, _ = native_token_logprobs(rows[0].clone().requires_grad_(), rows[1], 0.7, consume_logits=True)
    assert not logprobs.requires_grad


def test_bad_arguments_are_named(rows: tuple[Tensor, Tensor]) -> None:
    logits, targets = rows
    apart = torch.stack([targets, targets], dim=1)[:, 0]
    cases: list[tuple[Tensor, Tensor, str]] = [
        (logits.double(), targets, "logits: want float32, bfloat16 or float16, got float64"),
        (logits[0], targets, "logits: want 2 dimensions, got 1"),
        (logits.t().contiguous().t(), targets, "logits: want adjacent columns"),
        (logits[:1].expand(9, 257), targets, "logits: want rows that do not overlap"),
        (logits, targets.int(), "targets: want int64, got int32"),
        (logits, targets[:3], r"targets: want \[N\] with N = 9"),
        (logits, apart, "targets: want a contiguous tensor"),
        (logits, targets + 300, "targets: row 0 holds"),
    ]
    for bad_logits, bad_targets, message in cases:
        with pytest.raises(RuntimeError, match=message):
            native_token_logprobs(bad_logits, bad_targets, 1.0)
    for temperature in (math.nan, 0.0, -1.0, math.inf):
        with pytest.raises(RuntimeError, match="temperature: want a finite number > 0"):
            native_token_logprobs(logits, targets, temperature)


def test_bad_options_are_named(rows: tuple[Tensor, Tensor]) -> None:
    logits, targets = rows
    with pytest.raises(RuntimeError, match="thresholds: want float32, got float64"):
        native_token_logprobs(logits, targets, 1.0, thresholds=torch.zeros(9, dtype=torch.float64))
    with pytest.raises(RuntimeError, match=r"thresholds: want \[N\] with N = 9"):
        native_token_logprobs(logits, targets, 1.0, thresholds=torch.zeros(8))
    with pytest.raises(RuntimeError, match="vocab_size: want a number > 0, got 0"):
        native_token_logprobs(logits, targets, 1.0, vocab_size=0)
    with pytest.raises(RuntimeError, match="vocab_start: want a number >= 0, got -1"):
        torch.ops.tandem.logits_stats(logits, targets, 1.0, None, -1)
    with pytest.raises(RuntimeError, match=r"stats: want \[R, 4, N\] with R > 0"):
        torch.ops.tandem.stats_finish(torch.zeros(4, 9), targets)
    for top_k, top_p, message in ((-1, 0.9, "top_k: want"), (0, 0.0, "top_p: want"), (0, 1.5, "top_p: want")):
        with pytest.raises(RuntimeError, match=message):
            native_logits_threshold(logits, top_k, top_p, 1.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("vocab", [257, 1000, 1024, 32001])
def test_any_row_stride_and_alignment_gives_the_bits_of_dense_rows(vocab: int, offset: int, dtype: torch.dtype) -> None:
    """An odd stride and an odd first element: rows start at every address that the dtype allows."""
    generator = torch.Generator().manual_seed(vocab)
    dense = torch.randn(5, vocab, generator=generator).to(dtype)
    targets = torch.randint(0, vocab, (5,), generator=generator)
    wide = torch.full((5, vocab + 7), math.nan, dtype=dtype)
    strided = wide[:, offset : offset + vocab]
    strided.copy_(dense)
    want, got = (torch.ops.tandem.token_logprobs_fwd(x, targets, 0.7) for x in (dense, strided))
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    upstream = (torch.ones(5), torch.full((5,), 0.3))
    for logits in (dense, strided):
        torch.ops.tandem.token_logprobs_bwd_(logits, targets, want[2], want[1], *upstream, 0.7)
    assert torch.equal(dense, strided)
    assert torch.isnan(wide[:, :offset]).all()
    assert torch.isnan(wide[:, offset + vocab :]).all()


def test_float16_logits_may_be_as_large_as_the_dtype(rows: tuple[Tensor, Tensor]) -> None:
    logits = torch.zeros(1, 257, dtype=torch.float16)
    logits[0, 3] = 65504
    logprobs, entropy = native_token_logprobs(logits, torch.tensor([3]), 0.5)
    assert logprobs.tolist() == entropy.tolist() == [0.0]


COMPILED_FIRST = """
import torch
from rl.ops.logprobs import token_logprobs

logits, targets = torch.randn(5, 33, requires_grad=True), torch.arange(5)
logprobs = lambda x: token_logprobs(x, targets, 0.7, impl="native")[0]
want = torch.log_softmax(logits.detach() / 0.7, dim=-1)[torch.arange(5), targets]
compiled = torch.compile(logprobs, fullgraph=True, backend="aot_eager")
torch.testing.assert_close(compiled(logits).detach(), want)
print("compiled")
"""


def test_a_compiled_call_may_be_the_first_one_of_the_process() -> None:
    command = [sys.executable, "-c", COMPILED_FIRST]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout == "compiled\n"
