"""The cut of top-k / top-p sampling: native against plain torch, and log-probabilities over what it leaves."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rl.core.errors import ConfigError
from rl.generation.generator import SamplingParams
from rl.generation.sampling import sample_token
from rl.ops.logprobs import LogprobImpl, logits_thresholds, token_logprobs

IMPLS: tuple[LogprobImpl, ...] = ("native", "torch")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CUTS: tuple[tuple[int | None, float], ...] = ((1, 1.0), (5, 1.0), (50, 1.0), (None, 0.5), (None, 0.95), (20, 0.8))


def make_logits(vocab: int, dtype: torch.dtype, rows: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(vocab)
    return (3 * torch.randn(rows, vocab, generator=generator)).to(dtype)


def kept(logits: Tensor, top_k: int | None, top_p: float, temperature: float, impl: LogprobImpl) -> Tensor:
    """Which logits stay, [N, V] bool."""
    thresholds = logits_thresholds(logits, top_k=top_k, top_p=top_p, temperature=temperature, impl=impl)
    assert thresholds is not None
    assert thresholds.dtype == torch.float32
    return logits >= thresholds.unsqueeze(1)


def kept_by_definition(row: Tensor, top_k: int | None, top_p: float, temperature: float) -> Tensor:
    """One row by the words of the contract, in float64 and one token at a time."""
    values = sorted(row.double().tolist(), reverse=True)
    if top_k is not None and top_k < len(values):
        values = [value for value in values if value >= values[top_k - 1]]
    weights = [math.exp((value - values[0]) / temperature) for value in values]
    mass, threshold = 0.0, values[0]
    for value, weight in zip(values, weights, strict=True):
        if mass >= top_p * sum(weights):
            break
        mass, threshold = mass + weight, value
    return row.double() >= (values[-1] if top_p == 1 else threshold)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("top_k", "top_p"), CUTS)
@pytest.mark.parametrize("vocab", [7, 257, 1000, 32001])
def test_what_stays_is_what_the_definition_keeps(
    impl: LogprobImpl, dtype: torch.dtype, top_k: int | None, top_p: float, vocab: int
) -> None:
    logits = make_logits(vocab, dtype, rows=3)
    for temperature in (1.0, 0.6):
        got = kept(logits, top_k, top_p, temperature, impl)
        for row, row_kept in zip(logits, got, strict=True):
            assert torch.equal(row_kept, kept_by_definition(row, top_k, top_p, temperature))


@pytest.mark.parametrize("impl", IMPLS)
def test_ties_at_the_threshold_all_stay(impl: LogprobImpl) -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 2.0, 0.0]])
    assert kept(logits, 2, 1.0, 1.0, impl).tolist() == [[True, False, True, True, True, False]]
    assert kept(torch.zeros(1, 9), None, 0.2, 1.0, impl).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_masked_tokens_never_stay_because_of_the_cut(impl: LogprobImpl) -> None:
    """A top-k larger than what is possible cuts nothing: the impossible ones have probability 0 anyway."""
    logits = torch.full((1, 300), -math.inf)
    logits[0, [5, 90]] = torch.tensor([1.0, 2.0])
    thresholds = logits_thresholds(logits, top_k=10, top_p=1.0, temperature=1.0, impl=impl)
    assert thresholds is not None
    logprobs, _ = token_logprobs(logits, torch.tensor([90]), 1.0, impl=impl, thresholds=thresholds)
    assert logprobs.item() == pytest.approx(-math.log1p(math.exp(-1)), abs=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_to_cut_makes_no_tensor(impl: LogprobImpl) -> None:
    assert logits_thresholds(make_logits(9, torch.float32), top_k=None, top_p=1.0, temperature=1.0, impl=impl) is None


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("top_k", "top_p"), CUTS)
def test_logprobs_over_the_support_equal_the_definition(
    impl: LogprobImpl, dtype: torch.dtype, top_k: int | None, top_p: float
) -> None:
    logits = make_logits(1000, dtype)
    targets = logits.float().argsort(dim=1, descending=True)[:, 0].clone()
    targets[4] = int(logits[4].float().argmin())  # cut away
    thresholds = logits_thresholds(logits, top_k=top_k, top_p=top_p, temperature=0.7, impl="torch")
    assert thresholds is not None
    cut = torch.where(logits.double() >= thresholds.double()[:, None], logits.double(), -math.inf)
    want = torch.log_softmax(cut / 0.7, dim=-1)
    leaf = logits.clone().requires_grad_()
    logprobs, entropy = token_logprobs(leaf * 1, targets, 0.7, impl=impl, thresholds=thresholds)
    torch.testing.assert_close(logprobs.double(), want.gather(1, targets[:, None])[:, 0], atol=4e-6, rtol=1e-6)
    want_entropy = -torch.where(want == -math.inf, 0.0, want.exp() * want).sum(-1)
    torch.testing.assert_close(entropy.double(), want_entropy, atol=1e-5, rtol=1e-6)
    assert logprobs[4].item() == -math.inf
    (logprobs[:4].sum() + 0.3 * entropy.sum()).backward()
    assert leaf.grad is not None
    assert torch.isfinite(leaf.grad).all()
    assert (leaf.grad[logits < thresholds[:, None]] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_implementations_agree_on_gradients_over_the_support(dtype: torch.dtype) -> None:
    logits = make_logits(1000, dtype)
    targets = logits.float().argmax(dim=1)
    thresholds = logits_thresholds(logits, top_k=30, top_p=0.9, temperature=0.7, impl="native")
    gradients = []
    for impl in IMPLS:
        leaf = logits.clone().requires_grad_()
        logprobs, entropy = token_logprobs(leaf * 1, targets, 0.7, impl=impl, thresholds=thresholds)
        (logprobs.sum() + 0.3 * entropy.sum()).backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, atol=6e-6 if dtype == torch.float32 else 4e-3, rtol=0)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("top_k", "top_p"), CUTS)
def test_the_sampler_s_own_logprobs_are_those_of_training(impl: LogprobImpl, top_k: int | None, top_p: float) -> None:
    """Rollout parity: what the reference sampler reports for its token is what training computes for it."""
    params = SamplingParams(0.7, top_p, top_k, 1, (), (), 0)
    generator = torch.Generator().manual_seed(1)
    logits = make_logits(257, torch.float32, rows=20)
    thresholds = logits_thresholds(logits, top_k=top_k, top_p=top_p, temperature=0.7, impl=impl)
    drawn = [sample_token(row, params, generator) for row in logits]
    targets = torch.tensor([token for token, _ in drawn])
    logprobs, _ = token_logprobs(logits, targets, 0.7, impl=impl, thresholds=thresholds)
    torch.testing.assert_close(logprobs, torch.tensor([logprob for _, logprob in drawn]), atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_padded_vocabulary_is_left_out_by_a_narrower_view(impl: LogprobImpl) -> None:
    padded = torch.full((5, 300), 50.0)
    padded[:, :257] = make_logits(257, torch.float32)
    view = padded[:, :257]
    assert torch.equal(kept(view, 9, 0.9, 1.0, impl), kept(view.contiguous(), 9, 0.9, 1.0, impl))


def test_unusable_arguments_are_refused_by_name() -> None:
    logits, other = make_logits(9, torch.float32), "triton"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"top_k": 0, "top_p": 1.0, "temperature": 1.0, "impl": "torch"}, "top_k=0"),
        ({"top_k": None, "top_p": 0.0, "temperature": 1.0, "impl": "torch"}, "top_p=0"),
        ({"top_k": None, "top_p": 1.1, "temperature": 1.0, "impl": "torch"}, "top_p=1.1"),
        ({"top_k": None, "top_p": 0.5, "temperature": 0.0, "impl": "torch"}, "temperature=0"),
        ({"top_k": None, "top_p": 0.5, "temperature": 1.0, "impl": other}, "triton"),
    ]
    for arguments, message in cases:
        with pytest.raises(ConfigError, match=message):
            logits_thresholds(logits, **arguments)
