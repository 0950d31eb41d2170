"""One whole RL step of a configuration in this process: its algorithm, and a real trainer over the tiny model."""

import math
from pathlib import Path
from typing import Any, cast

import torch

from rl.algorithms.algorithm import Need
from rl.cluster.config import ClusterConfig
from rl.cluster.local import LocalCluster
from rl.controller.activity import Activity
from rl.controller.config import MasterConfig
from rl.controller.phases import Phases
from rl.controller.residency import Dedicated
from rl.controller.setup import build_algorithm
from rl.controller.step import StepParts, TrainStep
from rl.controller.stop import StopSignal
from rl.core.clock import SystemClock
from rl.core.metric_registry import check_metric_names
from rl.core.resources import RunResources
from rl.core.types import Completion, FinishReason, Rollout, RolloutGroup, Turn, TurnFlag, VersionSpan
from rl.rollout.buffer import ReplayBuffer
from rl.rollout.sampler import InOrder
from rl.trainer.policy import PolicyRequest, start_policy
from tests.support.fakes import FakeGenerator, FakeRefitCheck, FakeWeightSync
from tests.support.rollouts import make_group

COMPONENTS = ("correctness", "integer", "format")


async def one_step(config: MasterConfig) -> dict[str, float]:
    """Train one step on groups of mixed rewards, ends and faults of form; return its metrics, all of them finite."""
    model, algorithm = Path(config.policy.model_name), build_algorithm(config)
    request = PolicyRequest(
        model_path=model,
        tokenizer_path=model,
        temperature=config.policy.generation.temperature,
        seed=config.grpo.seed,
        sequences_per_step=config.sequences_per_step,
        needs_reference=Need.REFERENCE in algorithm.needs,
        num_threads=1,
        gpus_per_worker=0,
        call_timeout_s=60.0,
        version=0,
    )
    cluster = LocalCluster(ClusterConfig(kind="local"), RunResources(tag="test", temp_dir=model))
    policy = await start_policy(cluster, config.policy, request)
    try:
        step = await _step_of(config, {"policy": policy})
        report = await step(1)
    finally:
        await policy.close()
    metrics = dict(report.metrics)
    check_metric_names(metrics)
    broken = {name: value for name, value in metrics.items() if not math.isfinite(value)}
    assert not broken, f"metrics that are no numbers: {broken}"
    assert report.version == 1
    assert metrics.get("train/steps_skipped_nonfinite", 0.0) == 0.0
    return metrics


async def _step_of(config: MasterConfig, models: dict[str, Any]) -> TrainStep:
    clock = SystemClock()
    groups = make_groups(config.grpo.num_prompts_per_step, config.grpo.num_generations_per_prompt)
    buffer = ReplayBuffer(InOrder(0), len(groups), len(groups), 0)
    for group in groups:
        await buffer.put(await buffer.reserve(), group)
    sync = cast(Any, FakeWeightSync(FakeGenerator(clock, latency=lambda _: 0.0)))
    parts = StepParts(
        buffer,
        len(groups),
        Dedicated(),
        build_algorithm(config),
        models,
        sync,
        cast(Any, FakeRefitCheck()),
        Activity(clock),
        Activity(clock),
        0.01,
    )
    return TrainStep(parts, Phases(clock, lambda _: None), StopSignal())


def make_groups(num_groups: int, size: int) -> list[RolloutGroup]:
    """Groups of one-turn rollouts: every third is truncated, every fourth has a fault of form."""
    generator = torch.Generator().manual_seed(7)
    draw = lambda low, high: int(torch.randint(low, high, (), generator=generator))  # noqa: E731
    groups = []
    for number in range(num_groups):
        prompt = tuple(draw(0, 200) for _ in range(draw(3, 7)))
        rollouts = []
        for sample in range(size):
            tokens = tuple(draw(0, 200) for _ in range(draw(2, 7)))
            # A random model of 260 tokens says about log(1/260) = -5.6 of each.
            logprobs = tuple(-5.6 + 0.02 * draw(-10, 10) for _ in tokens)
            finish = FinishReason.LENGTH if sample % 3 == 0 else FinishReason.STOP
            completion = Completion(tokens, logprobs, finish, (VersionSpan(0, 0, len(tokens)),), "text")
            flags = frozenset(TurnFlag) if sample % 4 == 3 else frozenset[TurnFlag]()
            parts = {name: float((sample + number + index) % (index + 2) == 0) for index, name in enumerate(COMPONENTS)}
            rollouts.append(
                Rollout(
                    f"{number}/{sample}",
                    (Turn(prompt, completion, flags=flags),),
                    reward=sum(parts.values()) - 0.5 * (sample == 1),
                    reward_components=parts,
                )
            )
        groups.append(make_group(number, rollouts))
    return groups
