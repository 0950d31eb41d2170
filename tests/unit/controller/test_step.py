"""A training step puts the algorithm's stages in order and survives a step of which nothing is left."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from rl.algorithms.algorithm import Algorithm, Need
from rl.algorithms.assembly import build_algorithm
from rl.algorithms.config import GRPOConfig, LossConfig
from rl.controller.activity import Activity
from rl.controller.phases import Phases
from rl.controller.residency import Dedicated
from rl.controller.step import StepParts, StepReport, TrainStep
from rl.controller.stop import StopSignal
from rl.core.clock import SystemClock
from rl.core.errors import FatalError
from rl.core.metric_registry import check_metric_names
from rl.core.types import FinishReason, RolloutGroup
from rl.rollout.buffer import ReplayBuffer
from rl.rollout.sampler import InOrder
from rl.trainer.policy import Policy
from tests.support.fakes import FakeAlgorithm, FakeGenerator, FakePolicy, FakeRefitCheck, FakeWeightSync
from tests.support.policies import make_policy, make_request, make_settings, weights_of
from tests.support.rollouts import make_completion, make_group, make_rollout
from tests.support.tiny_model import make_tiny_model

NO_KL = LossConfig(reference_policy_kl_penalty=0.0)


def groups_of(
    rewards: list[list[float]], finish: FinishReason = FinishReason.STOP, version: int = 0
) -> list[RolloutGroup]:
    """Groups of one-turn rollouts of 2 sampled tokens."""
    completion = replace(make_completion([5, 6], version=version), finish_reason=finish)
    return [
        make_group(
            number,
            [make_rollout([([1, 2], completion)], reward, rollout_id=f"{number}/{i}") for i, reward in enumerate(row)],
        )
        for number, row in enumerate(rewards)
    ]


async def run_step(algorithm: Algorithm, policy: Policy, groups: list[RolloutGroup]) -> StepReport:
    (report,) = await run_steps(algorithm, policy, [groups])
    return report


async def run_steps(algorithm: Algorithm, policy: Policy, steps: list[list[RolloutGroup]]) -> list[StepReport]:
    clock = SystemClock()
    buffer = ReplayBuffer(InOrder(0), len(steps[0]), len(steps[0]), 0)
    sync = cast(Any, FakeWeightSync(FakeGenerator(clock, latency=lambda _: 0.0)))
    parts = StepParts(
        buffer,
        len(steps[0]),
        Dedicated(),
        algorithm,
        {"policy": policy},
        sync,
        cast(Any, FakeRefitCheck()),
        Activity(clock),
        Activity(clock),
        0.01,
    )
    step = TrainStep(parts, Phases(clock, lambda _: None), StopSignal())
    reports = []
    for number, groups in enumerate(steps, 1):
        for group in groups:
            await buffer.put(await buffer.reserve(), group)
        reports.append(await step(number))
    return reports


def build(**grpo: Any) -> Algorithm:
    return build_algorithm(GRPOConfig.model_validate(grpo), NO_KL, single_update=True)


async def test_rewards_are_shaped_before_scoring_and_sequences_filtered_after_it() -> None:
    policy = FakePolicy(SystemClock(), seconds=0.0)
    algorithm = build(reward_scaling={"enabled": True, "target_min": -1}, seq_logprob_error_threshold=1.5)
    report = await run_step(algorithm, policy, groups_of([[1.0, 0.0], [0.0, 0.0]]))
    assert policy.scored == ["policy"]
    batch = policy.batches[0]
    assert batch.rewards.tolist() == [1, -1, -1, -1]
    assert batch.raw_rewards is not None
    assert batch.raw_rewards.tolist() == [1, 0, 0, 0]
    # The generator says -1 of each token, the policy 0: every error is e.
    assert batch.sample_weights.tolist() == [0, 0, 0, 0]
    assert batch.advantages is not None
    assert bool((batch.advantages != 0).any())
    metrics = report.metrics
    assert metrics["train/reward"] == -0.5
    assert metrics["train/raw_reward"] == metrics["train/mean_total_reward"] == 0.25
    assert metrics["train/num_masked_seqs_by_logprob_error"] == 4.0
    assert metrics["train/masked_correct_pct"] == 0.25
    assert metrics["train/advantages/sum"] == pytest.approx(0.0)
    check_metric_names(metrics)


async def test_without_transforms_the_reward_is_the_raw_one_and_stands_once() -> None:
    report = await run_step(build(), FakePolicy(SystemClock(), seconds=0.0), groups_of([[1.0, 0.0]]))
    assert report.metrics["train/reward"] == 0.5
    assert "train/raw_reward" not in report.metrics


async def test_a_column_that_no_model_computes_ends_the_run() -> None:
    algorithm = FakeAlgorithm(frozenset({Need.VALUES}))
    with pytest.raises(FatalError, match=r"needs the columns \['values'\]"):
        await run_step(algorithm, FakePolicy(SystemClock(), seconds=0.0), groups_of([[1.0, 0.0]]))


async def test_a_step_of_which_filters_leave_nothing_is_skipped_and_counted(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny")
    policy = await make_policy(make_settings(model), make_request(model, sequences_per_step=4))
    before = await weights_of(policy)
    groups = groups_of([[1.0, 0.0], [1.0, 0.0]], FinishReason.LENGTH)
    report = await run_step(build(overlong_filtering=True), policy, groups)
    after = await weights_of(policy)
    await policy.close()
    assert report.version == 1
    assert report.metrics["train/steps_skipped_empty"] == 1.0
    assert report.metrics["train/num_overlong_filtered"] == 4.0
    assert report.metrics.get("train/loss", 0.0) == 0.0
    assert report.metrics["train/reward"] == 0.5
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(value == value for value in report.metrics.values())
    check_metric_names(report.metrics)


async def test_a_gap_that_is_no_rounding_is_explained_in_the_next_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_tiny_model(tmp_path / "tiny")
    policy = await make_policy(make_settings(model, lr=0.0), make_request(model, sequences_per_step=2))
    # Every token is reported at -1, which no model of 257 random outcomes says of it.
    steps = [groups_of([[1.0, 0.0]]), groups_of([[1.0, 0.0]], version=1), groups_of([[1.0, 0.0]], version=2)]
    reports = await run_steps(build(), policy, steps)
    await policy.close()
    told = [record.getMessage() for record in caplog.records if "trainer and generator differed" in record.getMessage()]
    assert [f"in step {step}" in message for step, message in enumerate(told, 1)] == [True, True]
    assert "the generator seems to" in told[0]
    assert reports[0].metrics["train/max_logprob_diff"] > 0.01
