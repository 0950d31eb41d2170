"""Loss, gradient and metrics do not depend on micro-batches, packing, prefix sharing, ranks or skipping.

In float64, so that what is compared is the mathematics; the library's norms round to float32 on the way.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl.algorithms.algorithm import LossFunction, LossSums
from rl.algorithms.config import LossConfig
from rl.algorithms.objective import parse_objective
from rl.core.batch import TrainBatch
from rl.core.metrics import Metric, Per
from rl.trainer.policy import TrainResult, WorkerPolicy
from tests.support.policies import (
    first_moments,
    make_batch,
    make_policy,
    make_request,
    make_settings,
    weights_of,
    worker_of,
)

LOSSES: dict[str, LossFunction] = {
    "token": parse_objective(LossConfig(reference_policy_kl_penalty=0.0), single_update=True),
    "sequence, dual clip, entropy": parse_objective(
        LossConfig(reference_policy_kl_penalty=0.0, token_level_loss=False, ratio_clip_c=3.0, entropy_coef=0.01), True
    ),
    "constant divisor": parse_objective(
        LossConfig(reference_policy_kl_penalty=0.0, token_level_loss=False, sequence_loss_divisor=7), True
    ),
    "KL and positive examples": parse_objective(
        LossConfig(reference_policy_kl_penalty=0.1, positive_example_nll_weight=0.5), True
    ),
    "sequence ratio, truncated correction": parse_objective(
        LossConfig(
            reference_policy_kl_penalty=0.0,
            sequence_level_importance_ratios=True,
            token_level_loss=False,
            use_importance_sampling_correction=True,
            truncated_importance_sampling_type="tis",
            truncated_importance_sampling_ratio=2.0,
        ),
        single_update=False,
    ),
}
CUTS: dict[str, dict[str, Any]] = {
    "1": {"train_micro_batch_size": 1, "share_prefixes": "off"},
    "2": {"train_micro_batch_size": 2, "share_prefixes": "off"},
    "4": {"train_micro_batch_size": 4, "share_prefixes": "off"},
    "padded": {"share_prefixes": "off", "dynamic_batching": {"enabled": True, "train_mb_tokens": 32}},
    "packed": {"share_prefixes": "off", "sequence_packing": {"enabled": True, "train_mb_tokens": 32}},
    "shared": {"share_prefixes": "on"},
    "shared, small": {"share_prefixes": "on", "train_micro_batch_size": 1, "max_total_sequence_length": 20},
    "shared, padded": {"share_prefixes": "on", "dynamic_batching": {"enabled": True, "train_mb_tokens": 32}},
    "shared, packed": {"share_prefixes": "on", "sequence_packing": {"enabled": True, "train_mb_tokens": 32}},
}


def make_columns() -> TrainBatch:
    """Unequal weights, a dropped sequence, old log-probabilities that are not the policy's."""
    batch = make_batch(3)
    old = batch.generation_logprobs * 0.9
    return batch.with_columns(
        sample_weights=torch.tensor([1.0, 0.0, 0.5] + [1.0] * 13), prev_logprobs=old, reference_logprobs=old * 1.1
    )


async def train(
    model: Path, batch: TrainBatch, loss: LossFunction, steps: int = 1, **settings: Any
) -> tuple[WorkerPolicy, TrainResult]:
    """In float64 by plain torch, unless the settings ask for native code, which has none."""
    policy = await make_policy(make_settings(model, **settings), make_request(model, temperature=0.8))
    for rank in range(policy.group.world_size):
        if settings.get("logprob_impl") != "native":
            worker_of(policy, rank)._model.module.double()
    for _ in range(steps):
        result = await policy.train(batch, loss)
    return policy, result


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("name", LOSSES)
async def test_loss_and_gradients_do_not_depend_on_how_the_batch_is_cut(
    tiny_model: Path, name: str, num_workers: int
) -> None:
    batch, loss = make_columns(), LOSSES[name]
    whole, expected = await train(tiny_model, batch, loss, train_micro_batch_size=16, share_prefixes="off")
    wanted = first_moments(whole)
    largest = max(float(moment.abs().max()) for moment in wanted.values())
    for cut, settings in CUTS.items():
        policy, got = await train(tiny_model, batch, loss, num_workers=num_workers, **settings)
        shared = {"num_computed_positions": expected.metrics["num_computed_positions"]}
        assert got.metrics | shared == pytest.approx(expected.metrics, rel=1e-6, abs=1e-6), cut
        for rank in range(num_workers):
            moments = first_moments(policy, rank)
            assert all((moments[key] - wanted[key]).abs().max() <= 1e-6 * largest for key in wanted), cut


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("name", LOSSES)
async def test_native_loss_and_gradients_are_those_of_float64_however_the_batch_is_cut(
    tiny_model: Path, name: str, num_workers: int
) -> None:
    batch, loss = make_columns(), LOSSES[name]
    whole, expected = await train(tiny_model, batch, loss, train_micro_batch_size=16, share_prefixes="off")
    wanted = first_moments(whole)
    largest = max(float(moment.abs().max()) for moment in wanted.values())
    for cut, settings in CUTS.items():
        policy, got = await train(tiny_model, batch, loss, num_workers=num_workers, logprob_impl="native", **settings)
        shared = {"num_computed_positions": expected.metrics["num_computed_positions"]}
        assert got.metrics | shared == pytest.approx(expected.metrics, rel=1e-5, abs=1e-5), cut
        for rank in range(num_workers):
            moments = first_moments(policy, rank)
            assert all((moments[key] - wanted[key]).abs().max() <= 1e-5 * largest for key in wanted), cut


@pytest.mark.parametrize("name", ["token", "constant divisor", "sequence ratio, truncated correction"])
@pytest.mark.parametrize("settings", [{}, {"train_global_batch_size": 8}], ids=["one update", "two updates"])
async def test_skipped_sequences_change_no_weight_and_no_mean(
    tiny_model: Path, name: str, settings: dict[str, Any]
) -> None:
    batch = make_columns()
    learns = torch.tensor([0.0] * 4 + [1.0] * 4 + [0.0] * 4 + [1.0] * 4)
    assert batch.advantages is not None
    batch = batch.with_columns(advantages=batch.advantages * learns[batch.sequence_ids])
    results = [
        await train(tiny_model, batch, LOSSES[name], steps=3, skip_zero_advantages=skip, **settings)
        for skip in (False, True)
    ]
    (full, without), (part, skipping) = results
    # Each update computes a group that proves the refit; what has no weight at all is no skipped sequence.
    assert (without.metrics["num_skipped_sequences"], skipping.metrics["num_skipped_sequences"]) == (0.0, 7.0)
    assert skipping.metrics["num_computed_positions"] < without.metrics["num_computed_positions"]
    for key in ("loss", "grad_norm", "global_valid_toks", "global_valid_seqs", "num_valid_samples"):
        assert skipping.metrics[key] == pytest.approx(without.metrics[key], rel=1e-6)
    left, right = await weights_of(full), await weights_of(part)
    assert all((left[key] - right[key]).abs().max() <= 1e-7 for key in left)


@dataclass(frozen=True)
class _MeasuredLoss:
    """A loss with a metric that is 1 on every token."""

    uses_entropy: bool = False

    def contributes(self, batch: TrainBatch) -> Tensor:
        return torch.arange(batch.num_sequences) % 4 == 2

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: TrainBatch) -> LossSums:
        assert not entropy.requires_grad
        ones = float(batch.token_weights.sum())
        metrics = {"t": Metric(ones, Per.TOKENS), "s": Metric(float(batch.sample_weights.sum()), Per.SEQUENCES)}
        return LossSums((logprobs * batch.token_weights).sum(), Per.TOKENS, metrics)


async def test_means_of_what_the_policy_did_do_not_shrink_when_sequences_are_skipped(tiny_model: Path) -> None:
    _, result = await train(tiny_model, make_batch(), _MeasuredLoss())
    assert (result.metrics["t"], result.metrics["s"], result.metrics["num_skipped_sequences"]) == (1.0, 1.0, 12.0)
    counts = make_batch().count()
    assert (result.metrics["global_valid_toks"], result.metrics["global_valid_seqs"]) == (counts.tokens, 16.0)


async def test_a_step_without_any_advantage_still_decays_weights_and_compares_logprobs(tiny_model: Path) -> None:
    batch = make_batch()
    batch = batch.with_columns(advantages=torch.zeros(batch.num_tokens))
    loss = LOSSES["token"]
    runs = [await train(tiny_model, batch, loss, steps=3, skip_zero_advantages=skip) for skip in (False, True)]
    (full, _), (part, result) = runs
    assert (result.metrics["num_skipped_sequences"], result.metrics["loss"]) == (12.0, 0.0)
    assert (result.metrics["grad_norm"], result.metrics["steps_skipped_empty"]) == (0.0, 0.0)
    left, right = await weights_of(full), await weights_of(part)
    assert all(torch.equal(left[key], right[key]) for key in left)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("share", ["off", "on"])
@pytest.mark.parametrize("impl", ["torch", "native"])
async def test_on_policy_the_ratio_is_exactly_one_at_every_temperature(
    tiny_model: Path, temperature: float, share: str, impl: str
) -> None:
    settings = make_settings(tiny_model, share_prefixes=share, lr=0.0, logprob_impl=impl)
    policy = await make_policy(settings, make_request(tiny_model, temperature=temperature))
    batch = make_batch()
    batch = batch.with_columns(prev_logprobs=await policy.logprobs(batch))
    for single_update in (True, False):
        loss = parse_objective(LossConfig(reference_policy_kl_penalty=0.0), single_update)
        metrics = (await policy.train(batch, loss)).metrics
        assert (metrics["probs_ratio_min"], metrics["probs_ratio_max"]) == (1.0, 1.0)


async def test_each_of_several_updates_divides_by_its_own_tokens(tiny_model: Path) -> None:
    """Were both divided by the tokens of the whole step, each gradient would be too small by their share."""
    batch = make_batch(4)
    norms = []
    for half in batch.split(8):
        _, alone = await train(tiny_model, half, LOSSES["token"], lr=0.0)
        norms.append(alone.metrics["grad_norm"])
    _, both = await train(tiny_model, batch, LOSSES["token"], lr=0.0, train_global_batch_size=8)
    assert both.metrics["grad_norm"] == pytest.approx(norms[-1], rel=1e-6)
    assert both.metrics["global_valid_toks"] == pytest.approx(batch.count().tokens / 2)
