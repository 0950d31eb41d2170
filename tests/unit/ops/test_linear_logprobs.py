"""Log-probabilities and policy loss of a linear layer: the native chunks against plain torch, in value and memory."""

import json
import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rl.core.errors import ConfigError, FatalError
from rl.core.native import require_native
from rl.ops.linear_logprobs import (
    LinearPlan,
    _exact_bfloat16_products,
    default_chunk_rows,
    linear_policy_loss,
    linear_policy_loss_,
    linear_token_logprobs,
)
from rl.ops.policy_loss import (
    CorrectionKind,
    PolicyLossParams,
    PolicyLossTokens,
    PolicyMetric,
    RatioKind,
    SurrogateKind,
    policy_loss,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of gradients, relative to the largest element: their own rounding, and that of the logits' gradient before it.
GRADIENT_ERROR = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
# The same where the logits are rounded to 16 bits too; of log-probabilities and entropies, absolute.
COARSE_GRADIENT_ERROR = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
COARSE_VALUE_ERROR = {torch.bfloat16: 5e-2, torch.float16: 6e-3}

PARAMS = PolicyLossParams(
    ratio=RatioKind.TOKEN,
    surrogate=SurrogateKind.CLIP,
    clip_low=0.2,
    clip_high=0.3,
    dual_clip=3.0,
    correction=CorrectionKind.TIS,
    correction_low=0.0,
    correction_high=2.0,
    kl="k3",
    kl_coef=0.1,
    kl_importance_weight=False,
    kl_input_clamp=20.0,
    kl_output_clamp=10.0,
    entropy_coef=0.02,
)


def make_layer(dtype: torch.dtype, rows: int = 37, vocab: int = 257, width: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + vocab)
    hidden = torch.randn(rows, width, generator=generator).to(dtype)
    weight = (0.5 * torch.randn(vocab, width, generator=generator)).to(dtype)
    targets = torch.randint(0, vocab - 5, (rows,), generator=generator)
    targets[3] = -100
    return hidden, weight, targets


def make_tokens(rows: int, *, is_shared: bool = False) -> PolicyLossTokens:
    """One token per row, or 0, 1, 2, 0, 1, 2, ... tokens; some of weight 0, which hold NaN."""
    generator = torch.Generator().manual_seed(rows)
    counts = torch.arange(rows) % 3 if is_shared else torch.ones(rows, dtype=torch.int64)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    total = int(offsets[-1])
    is_masked = torch.arange(total) % 5 == 4

    def column(center: float, masked: float = torch.nan) -> Tensor:
        return (center + torch.randn(total, generator=generator)).masked_fill(is_masked, masked)

    return PolicyLossTokens(
        generation_logprobs=column(-5),
        advantages=column(0),
        shares=torch.full((total,), 0.03).masked_fill(is_masked, 0),
        weights=torch.ones(total).masked_fill(is_masked, 0),
        prev_logprobs=column(-5),
        reference_logprobs=column(-5),
        row_offsets=offsets if is_shared else None,
    )


def gradients_of(layer: tuple[Tensor, Tensor, Tensor], impl: Any, plan: LinearPlan) -> tuple[Tensor, ...]:
    """Values, and gradients of one weighted sum of them."""
    hidden, weight, targets = layer
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    logprobs, entropy = linear_token_logprobs(hidden, weight, targets, 0.8, impl=impl, plan=plan)
    factors = torch.linspace(-1, 1, hidden.shape[0])
    loss = (factors * logprobs).sum() + 0.3 * (factors.flip(0) * entropy).sum()
    return logprobs.detach(), entropy.detach(), *torch.autograd.grad(loss, (hidden, weight))


def exact_gradients_of(layer: tuple[Tensor, Tensor, Tensor], plan: LinearPlan) -> tuple[Tensor, ...]:
    hidden, weight, targets = layer
    return gradients_of((hidden.double(), weight.double(), targets), "torch", plan)


def assert_near(got: Tensor, want: Tensor, relative: float) -> None:
    """Errors are measured by the largest element."""
    error = (got.double() - want.double()).abs().max() / want.double().abs().max()
    assert error <= relative, f"relative error {error:.2e} > {relative:.2e}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_rows", [1, 7, 64, None])
def test_values_and_gradients_equal_plain_torch_in_float64(dtype: torch.dtype, chunk_rows: int | None) -> None:
    layer = make_layer(dtype)
    plan = LinearPlan(chunk_rows=chunk_rows, vocab_size=252)
    logprobs, entropy, grad_hidden, grad_weight = gradients_of(layer, "native", plan)
    want = exact_gradients_of(layer, plan)
    torch.testing.assert_close(logprobs.double(), want[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy.double(), want[1], atol=1e-5, rtol=0)
    assert grad_hidden.dtype == grad_weight.dtype == dtype
    assert_near(grad_hidden, want[2], GRADIENT_ERROR[dtype])
    assert_near(grad_weight, want[3], GRADIENT_ERROR[dtype])
    assert grad_weight[252:].count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_stay_within_their_rounding(dtype: torch.dtype) -> None:
    layer = make_layer(dtype)
    plan = LinearPlan(chunk_rows=16, float32_logits=False)
    got = gradients_of(layer, "native", plan)
    want = exact_gradients_of(layer, LinearPlan())
    for value, exact in zip(got[:2], want[:2], strict=True):
        torch.testing.assert_close(value.double(), exact, atol=COARSE_VALUE_ERROR[dtype], rtol=0)
    for gradient, exact in zip(got[2:], want[2:], strict=True):
        assert_near(gradient, exact, COARSE_GRADIENT_ERROR[dtype])


def test_logprobs_do_not_depend_on_the_chunks_beyond_the_product() -> None:
    # The product may block its sums by the number of rows: not bitwise, as it is with the plain loop of the C++ tests.
    layer = make_layer(torch.float32, rows=64, vocab=1000)
    whole = gradients_of(layer, "native", LinearPlan(chunk_rows=64))
    for chunk_rows in (1, 7, 33):
        for got, want in zip(gradients_of(layer, "native", LinearPlan(chunk_rows=chunk_rows)), whole, strict=True):
            assert_near(got, want, 2e-6)


def test_calls_repeat_to_the_bit() -> None:
    layer = make_layer(torch.float32, rows=64, vocab=1000)
    first, *others = [gradients_of(layer, "native", LinearPlan(chunk_rows=20)) for _ in range(3)]
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_float32_weight_beside_bfloat16_states_is_cast_and_its_gradient_is_not() -> None:
    hidden, weight, targets = make_layer(torch.float32)
    hidden = hidden.bfloat16()
    got = gradients_of((hidden, weight, targets), "native", LinearPlan())
    want = gradients_of((hidden, weight.bfloat16(), targets), "native", LinearPlan())
    assert got[3].dtype == torch.float32
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[2], want[2])
    assert torch.equal(got[3].bfloat16(), want[3])
    assert not torch.equal(got[3].bfloat16().float(), got[3])


def test_bfloat16_equals_the_head_under_autocast() -> None:
    hidden, weight, targets = make_layer(torch.float32, vocab=1000)
    weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        logits = torch.nn.functional.linear(hidden, weight)
    want = torch.log_softmax(logits.float() / 0.8, -1).gather(1, targets.clamp_min(0)[:, None])[:, 0]
    want = want.masked_fill(targets == -100, 0)
    plan = LinearPlan(float32_logits=False)
    got, _ = linear_token_logprobs(hidden.bfloat16(), weight, targets, 0.8, plan=plan)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    (grad,) = torch.autograd.grad(got.sum(), weight)
    (autocast_grad,) = torch.autograd.grad(want.sum(), weight)
    assert_near(grad, autocast_grad, 1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_shared", [False, True])
def test_one_pass_equals_two_passes(dtype: torch.dtype, is_shared: bool) -> None:
    hidden, weight, targets = make_layer(dtype)
    tokens = make_tokens(hidden.shape[0], is_shared=is_shared)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    logprobs, entropy = linear_token_logprobs(hidden, weight, targets, 0.8)
    two = policy_loss(logprobs, entropy, tokens, PARAMS)
    want = torch.autograd.grad(3.0 * two.loss, leaves)
    for chunk_rows in (5, 64):
        one = linear_policy_loss(hidden, weight, targets, 0.8, tokens, PARAMS, plan=LinearPlan(chunk_rows=chunk_rows))
        assert_near(one.loss, two.loss, 1e-5)
        assert_near(one.logprobs, logprobs, 1e-5)
        assert_near(one.entropy, entropy, 1e-5)
        torch.testing.assert_close(one.metrics, two.metrics, atol=1e-5, rtol=1e-5)
        assert one.named_metrics()[PolicyMetric.LOSS] == pytest.approx(one.loss.item(), rel=1e-6)
        for got, exact in zip(torch.autograd.grad(3.0 * one.loss, leaves), want, strict=True):
            assert got.dtype == dtype
            assert_near(got, exact, GRADIENT_ERROR[dtype])


@pytest.mark.parametrize("is_body_frozen", [False, True])
def test_a_backward_may_add_the_weights_gradient_to_a_buffer(is_body_frozen: bool) -> None:
    hidden, weight, targets = make_layer(torch.float32)
    hidden.requires_grad_()
    weight.requires_grad_()
    want_values = linear_token_logprobs(hidden, weight, targets, 0.8)
    want = torch.autograd.grad(want_values[0].sum(), (hidden, weight))
    weight.grad = torch.full_like(weight, 0.5)
    states = hidden.detach() if is_body_frozen else hidden
    logprobs, entropy = linear_token_logprobs(states, weight, targets, 0.8, grad_weight=weight.grad)
    assert torch.equal(logprobs, want_values[0])
    assert torch.equal(entropy, want_values[1])
    torch.autograd.backward(logprobs.sum())
    torch.testing.assert_close(weight.grad - 0.5, want[1], atol=1e-6, rtol=1e-6)
    if not is_body_frozen:
        assert hidden.grad is not None
        assert torch.equal(hidden.grad, want[0])
    with pytest.raises(ConfigError, match="grad_weight"):
        linear_token_logprobs(hidden, weight, targets, 0.8, impl="torch", grad_weight=weight.grad)


def test_one_pass_adds_to_the_weights_gradient() -> None:
    hidden, weight, targets = make_layer(torch.float32)
    tokens = make_tokens(hidden.shape[0])
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    result = linear_policy_loss(hidden, weight, targets, 0.8, tokens, PARAMS)
    grad_hidden, grad_weight = torch.autograd.grad(result.loss, leaves)
    buffer = torch.full_like(grad_weight, 0.5)
    raw = linear_policy_loss_(hidden, weight, targets, 0.8, tokens, PARAMS, grad_weight=buffer)
    assert torch.equal(raw.grad_hidden, grad_hidden)
    assert not raw.loss.requires_grad
    torch.testing.assert_close(buffer - 0.5, grad_weight, atol=1e-6, rtol=1e-6)


def test_a_graph_of_one_pass_is_walked_once() -> None:
    hidden, weight, targets = make_layer(torch.float32)
    hidden.requires_grad_()
    result = linear_policy_loss(hidden, weight, targets, 0.8, make_tokens(hidden.shape[0]), PARAMS)
    torch.autograd.backward(result.loss, retain_graph=True)
    with pytest.raises(FatalError, match="has been walked"):
        torch.autograd.backward(result.loss)


def test_all_masked_gives_zero_gradients() -> None:
    hidden, weight, targets = make_layer(torch.float32)
    grads = gradients_of((hidden, weight, targets.fill_(-100)), "native", LinearPlan(chunk_rows=5))
    assert all(grad.count_nonzero() == 0 for grad in (grads[0], *grads[2:]))
    tokens = make_tokens(37)
    tokens = replace(tokens, weights=torch.zeros(37), shares=torch.zeros(37))
    buffer = torch.zeros_like(weight)
    result = linear_policy_loss_(hidden, weight, targets, 0.8, tokens, PARAMS, grad_weight=buffer)
    assert result.loss == 0
    assert result.grad_hidden.count_nonzero() == buffer.count_nonzero() == 0


def test_a_call_leaves_the_processes_precision_as_it_was() -> None:
    settings: Any = torch.backends.mkldnn
    before = settings.matmul.fp32_precision
    gradients_of(make_layer(torch.bfloat16), "native", LinearPlan())
    hidden, weight, targets = make_layer(torch.bfloat16)
    with pytest.raises(RuntimeError, match="targets"):
        linear_token_logprobs(hidden, weight, targets[1:], 0.8)
    assert settings.matmul.fp32_precision == before


def test_calls_of_several_threads_leave_the_processes_precision_as_it_was() -> None:
    settings: Any = torch.backends.mkldnn
    before = settings.matmul.fp32_precision
    layer = make_layer(torch.bfloat16)
    seen = []
    both_are_inside, first_has_left = threading.Barrier(2), threading.Event()

    def call(leaves_first: bool) -> None:
        with _exact_bfloat16_products(layer[0]):
            both_are_inside.wait(timeout=60)
            if not leaves_first:
                first_has_left.wait(timeout=60)
                seen.append(settings.matmul.fp32_precision)
        first_has_left.set()

    threads = [threading.Thread(target=call, args=(leaves_first,)) for leaves_first in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == ["bf16"]
    assert settings.matmul.fp32_precision == before


def test_the_gradient_of_the_weight_is_not_added_to_what_is_read() -> None:
    hidden, weight, targets = make_layer(torch.float32)
    memory = torch.zeros(257 * 24 + 100)
    shifted = memory[100:].view(257, 24).copy_(weight)
    arguments = targets, 0.8, make_tokens(37), PARAMS
    for read, written in ((weight, weight), (shifted, memory[: 257 * 24].view(257, 24))):
        with pytest.raises(RuntimeError, match="grad_weight: want memory apart from weight"):
            linear_policy_loss_(hidden, read, *arguments, grad_weight=written)
    both = torch.zeros(257, 48)
    both[:, :24] = weight
    linear_policy_loss_(hidden, both[:, :24], *arguments, grad_weight=both[:, 24:])
    want = torch.zeros_like(weight)
    linear_policy_loss_(hidden, weight, *arguments, grad_weight=want)
    torch.testing.assert_close(both[:, 24:], want, atol=1e-6, rtol=1e-5)


def test_memory_that_has_been_given_back_is_an_error() -> None:
    hidden, weight, targets = make_layer(torch.bfloat16)
    weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="weight: its storage has been freed"):
        linear_token_logprobs(hidden, weight, targets, 0.8)


def test_unusable_arguments_are_named() -> None:
    hidden, weight, targets = make_layer(torch.float32)
    tokens = make_tokens(37, is_shared=True)
    buffer = torch.zeros_like(weight)
    with pytest.raises(RuntimeError, match="weight"):
        linear_token_logprobs(hidden, weight[:, 1:], targets, 0.8)
    with pytest.raises(RuntimeError, match="temperature"):
        linear_token_logprobs(hidden, weight, targets, 0.0)
    with pytest.raises(RuntimeError, match="chunk_rows"):
        linear_token_logprobs(hidden, weight, targets, 0.8, plan=LinearPlan(chunk_rows=0))
    with pytest.raises(RuntimeError, match="vocab_size"):
        linear_token_logprobs(hidden, weight, targets, 0.8, plan=LinearPlan(vocab_size=0))
    with pytest.raises(ConfigError, match="logprob_impl"):
        linear_token_logprobs(hidden, weight, targets, 0.8, impl="other")  # type: ignore[arg-type]  # what is tested
    with pytest.raises(RuntimeError, match="grad_weight"):
        linear_policy_loss_(hidden, weight, targets, 0.8, tokens, PARAMS, grad_weight=buffer.double())
    by_sequence = replace(PARAMS, ratio=RatioKind.SEQUENCE)
    with pytest.raises(RuntimeError, match="two passes"):
        linear_policy_loss_(hidden, weight, targets, 0.8, tokens, by_sequence, grad_weight=buffer)
    with pytest.raises(RuntimeError, match="targets"):
        linear_token_logprobs(hidden, weight, targets + 257, 0.8)
    with pytest.raises(RuntimeError, match="host_row_offsets"):
        plan = LinearPlan(host_row_offsets=torch.empty(0, dtype=torch.int64))
        linear_policy_loss(hidden, weight, targets, 0.8, make_tokens(37), PARAMS, plan=plan)
    assert tokens.row_offsets is not None
    broken = replace(tokens, row_offsets=tokens.row_offsets + 1)
    with pytest.raises(RuntimeError, match="row_offsets"):
        linear_policy_loss_(hidden, weight, targets, 0.8, broken, PARAMS, grad_weight=buffer)


def test_the_torch_path_has_the_derivatives_of_its_values() -> None:
    hidden, weight, targets = make_layer(torch.float64, rows=5, vocab=11, width=3)
    targets[3] = 7  # an ignored row's entropy has a value and, by decree, no derivative
    leaves = hidden.requires_grad_(), weight.requires_grad_()

    def values(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return linear_token_logprobs(hidden, weight, targets, 0.8, impl="torch", plan=LinearPlan(chunk_rows=2))

    assert torch.autograd.gradcheck(values, leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_pass_torchs_own_checks(dtype: torch.dtype) -> None:
    require_native()
    hidden, weight, targets = make_layer(dtype, rows=9, vocab=33, width=8)
    hidden.requires_grad_()
    weight.requires_grad_()
    tokens = make_tokens(9)
    operators = torch.ops.tandem
    plan = (0.8, None, 4, True)
    torch.library.opcheck(operators.linear_logprobs_fwd.default, (hidden, weight, targets, *plan))
    columns = (*tokens.columns()[:8], None)
    loss = (targets, 0.8, None, *columns, PARAMS.kinds(), PARAMS.numbers(), 4, True)
    torch.library.opcheck(operators.linear_policy_loss.default, (hidden, weight, *loss))
    leaves = hidden.detach(), weight.detach()
    torch.library.opcheck(operators.linear_policy_loss_.default, (*leaves, *loss, torch.zeros(33, 8), True))
    _, entropy, lse = operators.linear_logprobs_fwd(*leaves, targets, *plan)
    upstream = (targets, lse, entropy, torch.ones(9), None, *plan)
    torch.library.opcheck(operators.linear_logprobs_bwd.default, (*leaves, *upstream))
    torch.library.opcheck(operators.linear_logprobs_bwd_.default, (*leaves, *upstream, torch.zeros(33, 8), True))


def test_both_forms_compile_into_one_graph() -> None:
    require_native()
    hidden, weight, targets = make_layer(torch.float32)
    tokens = make_tokens(hidden.shape[0])
    leaves = hidden.requires_grad_(), weight.requires_grad_()

    def values(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_token_logprobs(hidden, weight, targets, 0.8, plan=LinearPlan(chunk_rows=8))[0].sum()

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        plan = LinearPlan(chunk_rows=8)
        return linear_policy_loss(hidden, weight, targets, 0.8, tokens, PARAMS, plan=plan).loss

    for function in (values, loss):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        want, got = function(*leaves), compiled(*leaves)
        torch.testing.assert_close(got, want)
        for a, b in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(want, leaves), strict=True):
            torch.testing.assert_close(a, b)


def test_chunks_fit_a_cpus_caches_and_a_devices_traffic() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert default_chunk_rows(49152, torch.float32, cpu) == 256
    assert default_chunk_rows(151_936, torch.float32, cpu) == 82
    assert default_chunk_rows(10**7, torch.float32, cpu) == 64
    assert default_chunk_rows(151_936, torch.bfloat16, cuda) == 7067
    assert default_chunk_rows(32_000, torch.bfloat16, cuda) == 8192
    assert default_chunk_rows(10**6, torch.float32, cuda) == 4096


_MEASURE = """
import json, sys, torch
from rl.ops.linear_logprobs import linear_token_logprobs

def kilobytes(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1])

torch.manual_seed(0)
torch.set_num_threads(1)
hidden = torch.randn(4096, 16, requires_grad=True)
weight = torch.randn(32768, 16, requires_grad=True)
targets = torch.randint(0, 32768, (4096,))
linear_token_logprobs(hidden[:8], weight, targets[:8], 1.0)[0].sum().backward()
before = kilobytes("VmRSS")
with open("/proc/self/clear_refs", "w") as refs:
    refs.write("5")
if sys.argv[1] == "chunked":
    logprobs, entropy = linear_token_logprobs(hidden, weight, targets, 1.0)
else:
    log_p = torch.log_softmax(hidden @ weight.t(), -1)
    logprobs, entropy = log_p.gather(1, targets[:, None]), -(log_p.exp() * log_p).sum(-1)
(logprobs.sum() + entropy.sum()).backward()
print(json.dumps({"extra": kilobytes("VmHWM") - before, "sum": logprobs.double().sum().item()}))
"""


def test_chunks_need_less_than_a_quarter_of_the_memory_of_dense_logits() -> None:
    results = {}
    for way in ("chunked", "dense"):
        command = [sys.executable, "-c", _MEASURE, way]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        results[way] = json.loads(done.stdout)
    assert results["dense"]["extra"] > 4096 * 32768 * 4 / 1024
    assert results["chunked"]["extra"] < results["dense"]["extra"] / 4
