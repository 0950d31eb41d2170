"""One draw: the token's own log-probability, at the temperature and filters that were sampled."""

import math

import pytest
import torch

from rl.generation.generator import SamplingParams
from rl.generation.sampling import sample_token


def params(temperature: float = 1.0, top_p: float = 1.0, top_k: int | None = None) -> SamplingParams:
    return SamplingParams(temperature, top_p, top_k, 8, (), (), 0)


def draws(logits: list[float], settings: SamplingParams, count: int = 300) -> dict[int, float]:
    generator = torch.Generator().manual_seed(0)
    return dict(sample_token(torch.tensor(logits), settings, generator) for _ in range(count))


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, -2.1269), (0.5, -4.0181)])
def test_logprobs_are_those_at_the_sampling_temperature(temperature: float, expected: float) -> None:
    assert draws([2.0, 0.0], params(temperature))[1] == pytest.approx(expected, abs=1e-4)


def test_the_logprob_is_the_sampled_tokens_not_the_most_likely_ones() -> None:
    found = draws([2.0, 0.0], params())
    assert found[0] == pytest.approx(-0.1269, abs=1e-4)
    assert found[0] != found[1]


def test_temperature_zero_takes_the_most_likely_token() -> None:
    assert draws([0.0, 1.0, 0.5], params(0.0)) == {1: pytest.approx(1 - math.log(sum(map(math.exp, (0, 1, 0.5)))))}


def test_top_k_keeps_k_tokens_and_renormalises() -> None:
    found = draws([1.0, 1.0, 0.0, -1.0], params(top_k=2))
    assert found == {0: pytest.approx(math.log(0.5)), 1: pytest.approx(math.log(0.5))}


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass() -> None:
    logits = [math.log(p) for p in (0.5, 0.3, 0.2)]
    assert set(draws(logits, params(top_p=0.5))) == {0}
    assert set(draws(logits, params(top_p=0.6))) == {0, 1}
    assert draws(logits, params(top_p=0.6))[0] == pytest.approx(math.log(0.5 / 0.8), abs=1e-6)


def test_the_same_seed_draws_the_same_token() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1))
    first = [sample_token(logits, params(), torch.Generator().manual_seed(9))[0] for _ in range(5)]
    assert len(set(first)) == 1
