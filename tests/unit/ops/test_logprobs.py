"""token_logprobs: both implementations against float64, and the special values they agree on."""

import json
import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from rl.core.errors import ConfigError
from rl.ops.logprobs import IGNORE_INDEX, LogprobImpl, token_logprobs

IMPLS: tuple[LogprobImpl, ...] = ("native", "torch")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
VOCABULARIES = (1, 7, 257, 1000, 1024, 32001, 49152, 151936)


def exact(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The definition in float64."""
    log_p = torch.log_softmax(logits.double() / temperature, dim=-1)
    ignored = targets == IGNORE_INDEX
    at_target = log_p.gather(1, targets.masked_fill(ignored, 0)[:, None])[:, 0]
    return torch.where(ignored, 0.0, at_target), -(log_p.exp() * log_p).sum(-1)


def make_rows(vocab: int, dtype: torch.dtype, rows: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(rows, vocab, generator=generator) * 4).to(dtype)
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    targets[3] = IGNORE_INDEX
    return logits, targets


def gradient_of(
    impl: LogprobImpl, logits: Tensor, targets: Tensor, temperature: float, consume_logits: bool = False
) -> Tensor:
    leaf = logits.detach().clone().requires_grad_()
    product = leaf * 1  # what is consumed is the output of another operation, as behind a linear layer
    logprobs, entropy = token_logprobs(product, targets, temperature, impl=impl, consume_logits=consume_logits)
    weights = torch.linspace(-1, 1, logits.shape[0])
    ((weights * logprobs).sum() + 0.1 * (weights * entropy).sum()).backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_values_equal_the_definition(impl: LogprobImpl, dtype: torch.dtype, vocab: int) -> None:
    logits, targets = make_rows(vocab, dtype)
    # torch sums p log p in float32 without a shift: fewer digits than the fused operator's.
    entropy_error = {"native": 1e-6, "torch": 4e-5} if vocab < 100_000 else {"native": 8e-6, "torch": 1e-4}
    for temperature in (1.0, 0.7):
        logprobs, entropy = token_logprobs(logits, targets, temperature, impl=impl)
        want_logprobs, want_entropy = exact(logits, targets, temperature)
        assert logprobs.dtype == entropy.dtype == torch.float32
        torch.testing.assert_close(logprobs.double(), want_logprobs, atol=8e-6, rtol=1e-6)
        torch.testing.assert_close(entropy.double(), want_entropy, atol=entropy_error[impl], rtol=1e-6)


@pytest.mark.parametrize("consume_logits", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 6e-6), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_native_gradients_equal_those_of_the_torch_path(
    vocab: int, dtype: torch.dtype, tolerance: float, consume_logits: bool
) -> None:
    logits, targets = make_rows(vocab, dtype)
    native = gradient_of("native", logits, targets, 0.7, consume_logits)
    plain = gradient_of("torch", logits, targets, 0.7)
    torch.testing.assert_close(native, plain, atol=tolerance, rtol=0)
    assert native.dtype == dtype
    assert (native[3] == 0).all()


@pytest.mark.parametrize("options", [{}, {"vocab_size": 9}, {"thresholds": torch.tensor([-2.0, -1.0, -50.0, 0.0])}])
def test_the_torch_path_passes_gradcheck_in_float64(options: dict[str, Any]) -> None:
    logits, targets = make_rows(11, torch.float64, rows=4)
    targets[:] = logits[:, :9].argmax(dim=1)  # by contract, the entropy of an ignored row has a value but no gradient
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x, targets, 0.7, impl="torch", **options), (logits,))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("peak", [50.0, -50.0])
@pytest.mark.parametrize("vocab", [257, 1000, 1024])
def test_peaked_logits_of_a_vocabulary_that_fills_no_whole_block(impl: LogprobImpl, vocab: int, peak: float) -> None:
    """What lies behind the last column of a block must not enter the sum, which a low peak would show at once."""
    logits = torch.full((4, vocab), peak - 60.0)
    places = torch.tensor([0, 127, 128, vocab - 1])
    logits[torch.arange(4), places] = peak
    logprobs, entropy = token_logprobs(logits, places, 1.0, impl=impl)
    want_logprobs, want_entropy = exact(logits, places, 1.0)
    torch.testing.assert_close(logprobs.double(), want_logprobs, atol=1e-6, rtol=0)
    torch.testing.assert_close(entropy.double(), want_entropy, atol=1e-6, rtol=0)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_padded_columns_count_as_absent_whatever_they_hold(impl: LogprobImpl, dtype: torch.dtype) -> None:
    logits, targets = make_rows(257, dtype)
    padded = torch.full((7, 320), math.nan, dtype=dtype)
    padded[:, :257] = logits
    padded[:, 300:] = 100.0
    leaf = padded.clone().requires_grad_()
    logprobs, entropy = token_logprobs(leaf * 1, targets, 0.7, impl=impl, vocab_size=257)
    want_logprobs, want_entropy = token_logprobs(logits, targets, 0.7, impl=impl)
    torch.testing.assert_close(logprobs, want_logprobs, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(entropy, want_entropy, atol=2e-6, rtol=1e-6)
    (logprobs.sum() + entropy.sum()).backward()
    assert leaf.grad is not None
    assert torch.isfinite(leaf.grad[:, :257]).all()
    assert (leaf.grad[:, 257:] == 0).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_both_sides_of_training_divide_by_the_temperature(impl: LogprobImpl) -> None:
    logits, targets = torch.tensor([[2.0, 0.0]]), torch.tensor([1])
    for temperature, want in ((1.0, -2.1269), (0.5, -4.0181)):
        logprobs, _ = token_logprobs(logits, targets, temperature, impl=impl)
        assert logprobs.item() == pytest.approx(want, abs=5e-5)
    for temperature in (0.5, 1.0, 2.0):
        first, _ = token_logprobs(logits, targets, temperature, impl=impl)
        second, _ = token_logprobs(logits, targets, temperature, impl=impl)
        assert torch.exp(first - second).item() == 1.0


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_a_temperature_that_cannot_be_trained_on_is_refused(temperature: float) -> None:
    with pytest.raises(ConfigError, match="temperature"):
        token_logprobs(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), temperature, impl="torch")


def test_an_unknown_implementation_is_refused_by_name() -> None:
    unknown: Any = "triton"
    with pytest.raises(ConfigError, match="triton"):
        token_logprobs(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), 1.0, impl=unknown)


@pytest.mark.parametrize("impl", IMPLS)
def test_masked_out_vocabulary_has_no_probability_and_no_gradient(impl: LogprobImpl) -> None:
    logits = torch.tensor([[1.0, -math.inf, 2.0, 0.5], [1.0, -math.inf, 2.0, 0.5]])
    targets = torch.tensor([2, 1])
    logprobs, entropy = token_logprobs(logits, targets, 1.0, impl=impl)
    kept = torch.log_softmax(logits[0, [0, 2, 3]], dim=0)
    torch.testing.assert_close(logprobs, torch.stack([kept[1], torch.tensor(-math.inf)]))
    torch.testing.assert_close(entropy, (-(kept.exp() * kept).sum()).repeat(2))
    gradient = gradient_of(impl, logits, targets, 1.0)
    assert torch.isfinite(gradient).all()
    assert (gradient[:, 1] == 0).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_a_nan_logit_is_not_hidden(impl: LogprobImpl) -> None:
    logits = torch.zeros(2, 5000)
    logits[1, 4321] = math.nan
    logprobs, entropy = token_logprobs(logits, torch.tensor([0, 0]), 1.0, impl=impl)
    assert torch.isnan(logprobs).tolist() == torch.isnan(entropy).tolist() == [False, True]


def test_a_token_without_upstream_gradient_gets_an_exact_zero_row_even_from_nan_logits() -> None:
    logits = torch.full((2, 9), math.nan)
    logits[0] = 0.0
    logits.requires_grad_()
    logprobs, _ = token_logprobs(logits, torch.tensor([1, 1]), 1.0, impl="native")
    logprobs[0].backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad[0]).all()
    assert (logits.grad[1] == 0).all()


def test_the_gradient_of_observation_tokens_is_exactly_zero_on_both_paths() -> None:
    logits, targets = make_rows(257, torch.float32)
    targets[[0, 2, 5]] = IGNORE_INDEX
    for impl in IMPLS:
        gradient = gradient_of(impl, logits, targets, 1.0)
        assert (gradient[[0, 2, 3, 5]] == 0).all()
        assert (gradient[[1, 4, 6]] != 0).any(dim=1).all()


def test_rows_of_a_wider_buffer_work_without_a_copy() -> None:
    logits, targets = make_rows(257, torch.float32)
    wide = torch.full((7, 300), math.nan)
    wide[:, :257] = logits
    for native, plain in zip(
        token_logprobs(wide[:, :257], targets, 1.0, impl="native"),
        token_logprobs(logits, targets, 1.0, impl="native"),
        strict=True,
    ):
        assert torch.equal(native, plain)


@pytest.mark.parametrize("impl", IMPLS)
def test_no_rows_give_no_results(impl: LogprobImpl) -> None:
    logprobs, entropy = token_logprobs(torch.zeros(0, 8), torch.zeros(0, dtype=torch.int64), 1.0, impl=impl)
    assert logprobs.shape == entropy.shape == (0,)


def test_the_torch_path_gives_the_same_numbers_in_one_chunk_or_many() -> None:
    logits, targets = make_rows(49152, torch.bfloat16, rows=45)
    many = token_logprobs(logits, targets, 1.0, impl="torch")
    for row in (0, 20, 21, 44):
        one = token_logprobs(logits[row : row + 1], targets[row : row + 1], 1.0, impl="torch")
        for alone, among in zip(one, many, strict=True):
            # Several threads add up a lone row in another order.
            torch.testing.assert_close(alone[0], among[row], atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
def test_without_an_entropy_bonus_the_entropy_has_no_graph_and_the_gradient_is_the_same(impl: LogprobImpl) -> None:
    logits, targets = make_rows(1000, torch.float32)
    results = []
    for entropy_gradient in (True, False):
        leaf = logits.clone().requires_grad_()
        logprobs, entropy = token_logprobs(leaf, targets, 0.7, impl=impl, entropy_gradient=entropy_gradient)
        assert entropy.requires_grad is entropy_gradient
        logprobs.sum().backward()
        results.append((logprobs, entropy, leaf.grad))
    for left, right in zip(*results, strict=True):
        assert left is not None and right is not None
        assert torch.equal(left, right)


_PEAK = """
import json, resource, sys, torch
from rl.ops.logprobs import token_logprobs

def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

torch.set_num_threads(1)
hidden, head = torch.randn(4096, 8), torch.randn(8, 32000).requires_grad_()
targets = torch.randint(0, 32000, (4096,))
token_logprobs(torch.randn(2, 8, requires_grad=True) @ head, targets[:2], 1.0, impl="native")[0].sum().backward()
before = peak_mib()
if sys.argv[1] == "dense":
    scores = (hidden @ head).float() / 1.0
    log_p = torch.log_softmax(scores, -1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    logprobs = log_p.gather(1, targets[:, None])
    (logprobs.sum() + 0.1 * entropy.sum()).backward()
else:
    logprobs, entropy = token_logprobs(hidden @ head, targets, 1.0, impl="native", consume_logits=True)
    (logprobs.sum() + 0.1 * entropy.sum()).backward()
print(json.dumps(peak_mib() - before))
"""


def test_the_fused_path_needs_a_quarter_of_the_memory_of_the_dense_one() -> None:
    """4096 tokens of a vocabulary of 32k: the logits and nothing else of their size."""
    peaks = {}
    for path in ("fused", "dense"):
        command = [sys.executable, "-c", _PEAK, path]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        peaks[path] = json.loads(done.stdout)
    assert peaks["fused"] < peaks["dense"] / 4
    assert peaks["fused"] < 1.2 * 4096 * 32000 * 4 / 2**20
