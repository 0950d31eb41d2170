"""One training step, the same for synchronous and asynchronous runs, shared and dedicated devices.

    collect -> shape rewards -> score -> filter -> advantages -> train -> publish -> advance

consumes: the groups of the step (`ReplayBuffer.take`)
produces: a new version on every generator, and a StepReport
waits for: the groups, and only there; the models; the refit
unblocked by: `ReplayBuffer.put`
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from rl.algorithms.algorithm import Algorithm, Need
from rl.controller.activity import Activity, overlap_s
from rl.controller.phases import (
    ADVANTAGES,
    DATA,
    GENERATION,
    LOGPROBS,
    TOTAL,
    TRAINING,
    VALIDATION,
    WEIGHT_SYNC,
    Phases,
)
from rl.controller.refit_check import RefitCheck
from rl.controller.residency import Residency
from rl.controller.reward_metrics import batch_metrics, reward_metrics
from rl.controller.rollout_metrics import rollout_metrics
from rl.controller.step_metrics import environment_metrics, prefixed, rates, refit_metrics, trained_by_rollout
from rl.controller.stop import StopSignal
from rl.core.batch import TrainBatch
from rl.core.errors import FatalError
from rl.core.types import PolicyVersion, RolloutGroup, TrainedSequence
from rl.rollout.buffer import ReplayBuffer
from rl.trainer.policy import Policy, TrainResult
from rl.weights.report import SyncReport
from rl.weights.sync import WeightSync

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepReport:
    """What a step did.

    Attributes:
        step: Number of the step, from 1.
        version: The version that it made.
        groups: What it was trained on.
        metrics: All numbers of the step, with prefixes.
        trained: What the step made of each rollout, by id: one entry per sequence.
    """

    step: int
    version: PolicyVersion
    groups: Sequence[RolloutGroup]
    metrics: Mapping[str, float]
    trained: Mapping[str, tuple[TrainedSequence, ...]]


@dataclass(frozen=True)
class StepParts:
    """What a step works with.

    Attributes:
        buffer: Source of groups.
        groups_per_step: Groups of one step.
        residency: Who is on the devices.
        algorithm: Rewards to advantages, and the losses.
        models: By the names under which the algorithm has losses; "policy" is the one that generates.
        weight_sync: Brings weights to the generators.
        refit_check: Proves that they compute with them, beside the rollouts; its numbers stand in the step after.
        generating: When rollouts are under way.
        training: When the models work.
        logprob_gap_limit: Difference between trainer and generator, in nats, that is no rounding.
    """

    buffer: ReplayBuffer
    groups_per_step: int
    residency: Residency
    algorithm: Algorithm
    models: Mapping[str, Policy]
    weight_sync: WeightSync
    refit_check: RefitCheck
    generating: Activity
    training: Activity
    logprob_gap_limit: float


class TrainStep:
    """Callable with the step's number."""

    def __init__(self, parts: StepParts, phases: Phases, stop: StopSignal) -> None:
        self._parts = parts
        self._phases = phases
        self._stop = stop
        self._last_gap = 0.0

    async def __call__(self, step: int) -> StepReport:
        """Train one step; the generators hold the version before it.

        Raises:
            RunStopped: the run was asked to stop while the step waited for its groups; nothing has changed then.
            FatalError: the step cannot be made.
        """
        parts = self._parts
        parts.residency.drain()  # what the first refit moved is no part of a step
        with self._phases.total():
            with self._phases.span(GENERATION):
                groups = await self._stop.guard(parts.buffer.take(parts.groups_per_step))
                probe = await parts.refit_check.end()
            async with parts.residency.training():
                with parts.training.span():
                    batch, told = await self._prepare(groups)
                    await self._explain_last_gap(step, batch)
                    results = await self._train(batch)
                    self._last_gap = results["policy"].metrics.get("max_logprob_diff", 0.0)
            version = self._next_version(results)
            sync = await self.publish(version)
        metrics = self._metrics(groups, batch, results, refit_metrics(sync) | probe) | prefixed("train", told)
        report = StepReport(step, version, groups, metrics, trained_by_rollout(groups, batch))
        await parts.buffer.advance(version)
        return report

    async def publish(self, version: PolicyVersion) -> SyncReport:
        """Bring the policy's weights to every generator, and begin to prove it; also once before the first step.

        Raises:
            RefitError: the refit failed; nothing is generated then.
        """
        parts = self._parts
        async with parts.residency.refit() as before_resume:
            with self._phases.span(WEIGHT_SYNC):
                report = await parts.weight_sync.publish(version, before_resume)
        parts.refit_check.begin(report)
        return report

    async def _prepare(self, groups: Sequence[RolloutGroup]) -> tuple[TrainBatch, dict[str, float]]:
        """Lay out the batch, transform rewards, drop sequences, and fill the columns that the losses need.

        Returns:
            The batch, and what the algorithm's stages have to report.
        """
        algorithm = self._parts.algorithm
        with self._phases.span(DATA):
            batch = TrainBatch.from_groups(groups).at_version(self._parts.buffer.version)
        with self._phases.span(ADVANTAGES):
            batch, shaped = algorithm.shape(batch)
        with self._phases.span(LOGPROBS):
            batch = batch.with_columns(**await self._score(batch))
        with self._phases.span(ADVANTAGES):
            batch, filtered = algorithm.filter(batch)
            batch = batch.with_columns(**algorithm.advantages(batch))
        if not bool((batch.token_weights > 0).any()):
            sequences, invalid = batch.num_sequences, int((~batch.valid).sum())
            rest = "" if invalid == sequences else "; filters dropped the rest"
            _log.error(
                "nothing is learned from this step: of %d sequences, %d have no valid reward%s",
                sequences,
                invalid,
                rest,
            )
        return batch, shaped | filtered

    async def _score(self, batch: TrainBatch) -> dict[str, Tensor]:
        policy = self._parts.models["policy"]
        passes = {Need.PREV: policy.logprobs, Need.REFERENCE: policy.reference_logprobs}
        needs = self._parts.algorithm.needs
        unknown = sorted(need.value for need in needs - passes.keys())
        if unknown:
            raise FatalError(f"the algorithm needs the columns {unknown}, which no model of this run computes")
        return {need.value: await score(batch) for need, score in passes.items() if need in needs}

    async def _explain_last_gap(self, step: int, batch: TrainBatch) -> None:
        """Name what is wrong when the last step's gap was no rounding.

        It is seen while a step trains, when the weights have changed already; a fault of the set-up is still there in
        the next step, before its training.
        """
        if self._last_gap <= self._parts.logprob_gap_limit:
            return
        with self._phases.span(LOGPROBS):
            cause = await self._parts.models["policy"].explain_gap(batch)
        _log.error(
            "trainer and generator differed by up to %.2g nats in step %d, where rounding gives less than %.2g: %s; "
            "what is trained on is not what was sampled",
            self._last_gap,
            step - 1,
            self._parts.logprob_gap_limit,
            cause,
        )

    async def _train(self, batch: TrainBatch) -> dict[str, TrainResult]:
        with self._phases.span(TRAINING):
            losses = self._parts.algorithm.losses
            return {name: await self._parts.models[name].train(batch, loss) for name, loss in losses.items()}

    def _next_version(self, results: Mapping[str, TrainResult]) -> PolicyVersion:
        version, expected = results["policy"].version, self._parts.buffer.version + 1
        if version != expected:
            raise FatalError(f"training made version {version} out of {expected - 1}; a step adds exactly 1")
        return version

    def _metrics(
        self,
        groups: Sequence[RolloutGroup],
        batch: TrainBatch,
        results: Mapping[str, TrainResult],
        refit: Mapping[str, float],
    ) -> dict[str, float]:
        version = self._parts.buffer.version
        # A validation between two steps is no part of either; it reports its own time.
        seconds = {name: value for name, value in self._phases.drain().items() if name != VALIDATION}
        train = {
            **results["policy"].metrics,
            **rollout_metrics(groups),
            **environment_metrics([rollout for group in groups for rollout in group.rollouts]),
            **reward_metrics(groups, batch),
            **batch_metrics(batch, version),
        }
        train["num_prompt_groups"] = float(len(groups))
        for name in results.keys() - {"policy"}:
            train |= prefixed(name, results[name].metrics)
        performance = rates(batch.num_tokens, train["num_rollouts"], seconds, TOTAL, TRAINING)
        performance["overlap_s"] = overlap_s(self._parts.generating.drain(), self._parts.training.drain())
        return (
            prefixed("train", train)
            | prefixed("timing/train", seconds)
            | prefixed("performance", performance)
            | prefixed("refit", refit)
            | prefixed("residency", self._parts.residency.drain())
        )
