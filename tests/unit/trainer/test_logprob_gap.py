"""A gap between trainer and generator is noticed, and its cause named: each fault is injected into a generator."""

from pathlib import Path

import pytest
import torch

from rl.algorithms.config import LossConfig
from rl.algorithms.objective import parse_objective
from rl.core.batch import TrainBatch
from rl.trainer.logprob_gap import name_cause
from tests.support.policies import make_batch, make_policy, make_request, make_settings

LOSS = parse_objective(LossConfig(reference_policy_kl_penalty=0.0), single_update=True)


async def score(
    model: Path, batch: TrainBatch, temperature: float = 1.0, precision: str = "float32", steps: int = 0
) -> torch.Tensor:
    """What an engine reports: with the model's weights, or those that some training has made of them."""
    settings = make_settings(model, precision=precision, lr=0.03)
    policy = await make_policy(settings, make_request(model, temperature=temperature))
    try:
        for _ in range(steps):
            await policy.train(batch, LOSS)
        return await policy.logprobs(batch)
    finally:
        await policy.close()


def shifted(values: torch.Tensor, batch: TrainBatch, shift: int) -> torch.Tensor:
    """Each sampled token reports the value of its neighbour; those without one keep theirs."""
    moved = values.clone()
    sampled = batch.loss_mask
    pairs = sampled[:-1] & sampled[1:]
    early = pairs.nonzero().squeeze(1)
    given, meant = (early, early + 1) if shift == 1 else (early + 1, early)
    moved[given] = values[meant]
    return moved


async def explain(model: Path, batch: TrainBatch, reported: torch.Tensor, temperature: float = 1.0) -> str:
    policy = await make_policy(make_settings(model), make_request(model, temperature=temperature))
    try:
        return await policy.explain_gap(batch.with_columns(generation_logprobs=reported))
    finally:
        await policy.close()


@pytest.mark.parametrize("temperature", [0.5, 2.0])
async def test_a_generator_at_another_temperature_is_named(tiny_model: Path, temperature: float) -> None:
    batch = make_batch()
    cause = await explain(tiny_model, batch, await score(tiny_model, batch, temperature))
    assert f"sample at temperature {temperature} while the trainer scores at 1.0" in cause


async def test_a_generator_without_temperature_is_named(tiny_model: Path) -> None:
    batch = make_batch()
    cause = await explain(tiny_model, batch, await score(tiny_model, batch), temperature=0.5)
    assert "sample at temperature 1.0 while the trainer scores at 0.5" in cause


async def test_a_generator_in_another_precision_is_named(tiny_model: Path) -> None:
    batch = make_batch()
    cause = await explain(tiny_model, batch, await score(tiny_model, batch, precision="bfloat16"))
    assert "compute in another precision" in cause


@pytest.mark.parametrize(("shift", "place"), [(1, "the one after"), (-1, "the one before")])
async def test_values_of_the_neighbouring_token_are_named(tiny_model: Path, shift: int, place: str) -> None:
    batch = make_batch()
    cause = await explain(tiny_model, batch, shifted(await score(tiny_model, batch), batch, shift))
    assert f"report the value of another token: {place}" in cause


async def test_what_nothing_explains_are_other_weights(tiny_model: Path) -> None:
    batch = make_batch()
    cause = await explain(tiny_model, batch, await score(tiny_model, batch, steps=3))
    assert "seems to hold other weights: a refit that did not arrive" in cause


async def test_without_own_tokens_there_is_nothing_to_explain(tiny_model: Path) -> None:
    batch = make_batch()
    policy = await make_policy(make_settings(tiny_model), make_request(tiny_model, version=7))
    assert await policy.explain_gap(batch) == "no token of this step was sampled by the version in training"
    await policy.close()


async def test_at_learning_rate_0_the_gap_stays_where_it_is(tiny_model: Path) -> None:
    batch = make_batch()
    reported = await score(tiny_model, batch) + 0.001
    policy = await make_policy(make_settings(tiny_model, lr=0.0), make_request(tiny_model))
    gaps = []
    for version in range(20):
        versions = torch.where(batch.loss_mask, version, -1)
        now = batch.with_columns(generation_logprobs=reported, token_versions=versions)
        gaps.append((await policy.train(now, LOSS)).metrics["max_logprob_diff"])
    await policy.close()
    assert gaps == pytest.approx([0.001] * 20, abs=1e-6)


def test_a_cause_must_explain_half_of_the_gap() -> None:
    assert "seems to sing" in name_cause(1.0, {"sing": 0.4, "dance": 0.45})
    assert "other weights" in name_cause(1.0, {"sing": 0.6, "dance": 0.9})


def test_the_limit_follows_the_precision_unless_it_is_given(tiny_model: Path) -> None:
    assert make_settings(tiny_model).logprob_gap_limit == 0.01
    assert make_settings(tiny_model, precision="bfloat16").logprob_gap_limit == 1.0
    assert make_settings(tiny_model, max_logprob_gap=0.3).logprob_gap_limit == 0.3
