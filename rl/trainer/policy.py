"""The trained policy as the driver sees it, and its implementation over a worker group.

policy = await start_policy(cluster, settings, request)
result = await policy.train(batch, algorithm.losses["policy"])      # result.version == old version + 1
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from rl.algorithms.algorithm import LossFunction
from rl.cluster.worker_group import Cluster, WorkerGroup, WorkerRequest
from rl.core.batch import TrainBatch
from rl.core.errors import ConfigError, FatalError
from rl.core.metrics import Counts, Metric, Per, finalize_metrics
from rl.core.types import PolicyVersion
from rl.trainer.batching import Batching
from rl.trainer.config import PolicySettings
from rl.trainer.forward_backward import ChunkReport, Work, merge_reports
from rl.trainer.logprob_gap import MAX_SEQUENCES, TEMPERATURES, mean_gap, name_cause, own_tokens, shifted_gap
from rl.trainer.optimizer import OptimizerStep
from rl.trainer.request import PolicyRequest
from rl.trainer.skipping import sequences_to_compute
from rl.trainer.weight_sender import SENDER_CALLS, WorkerSender
from rl.trainer.worker import PolicyWorker
from rl.weights.transport import SenderHandle

__all__ = ["Policy", "PolicyRequest", "TrainResult", "WorkerPolicy", "start_policy"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainResult:
    """What one RL step of training did.

    Attributes:
        version: Version of the new weights.
        metrics: By bare name. Means over the optimizer steps of the RL step, extrema over all of them; `grad_norm` is
            the last one's. Metrics without a counted token are absent.
    """

    version: PolicyVersion
    metrics: dict[str, float]


class Policy(Protocol):
    """A model that can be trained, asked for log-probabilities, sent to generators and saved."""

    @property
    def version(self) -> PolicyVersion:
        """Version of the weights; grows by exactly 1 with each `train`."""
        ...

    async def train(self, batch: TrainBatch, loss: LossFunction) -> TrainResult:
        """Train one RL step on `batch`: one or several optimizer steps."""
        ...

    async def logprobs(self, batch: TrainBatch) -> Tensor:
        """Return log-probabilities of the sampled tokens, [T] float32; 0 off the mask."""
        ...

    async def logprobs_at(self, batch: TrainBatch, temperature: float) -> Tensor:
        """Return what `logprobs` would be at another sampling temperature."""
        ...

    async def reference_logprobs(self, batch: TrainBatch) -> Tensor:
        """Return the same under the frozen initial weights."""
        ...

    async def explain_gap(self, batch: TrainBatch) -> str:
        """Say why the generator's log-probabilities may differ from this policy's on its own tokens; before `train`."""
        ...

    def weight_sender(self) -> SenderHandle:
        """Return the trainer's end of a refit."""
        ...

    async def offload(self) -> int:
        """Make room for a generator on the same devices; return the bytes that left them."""
        ...

    async def reload(self) -> int:
        """Take what `train` needs back; return the bytes that entered the devices."""
        ...

    async def save(self, folder: Path, with_optimizer: bool) -> None:
        """Write a checkpoint into the existing `folder`."""
        ...

    async def restore(self, folder: Path) -> None:
        """Continue from a checkpoint, exactly."""
        ...

    async def export(self, folder: Path) -> None:
        """Write a Hugging Face folder."""
        ...

    async def close(self) -> None:
        """End the workers."""
        ...


async def start_policy(
    cluster: Cluster, settings: PolicySettings, request: PolicyRequest, note: Callable[[str], None] = _log.info
) -> "WorkerPolicy":
    """Start the trainer's workers and load the model on each.

    Args:
        cluster: Where they run.
        settings: The `policy` section.
        request: Derived settings.
        note: Told in one line when the model cannot share prefixes, and why.

    Raises:
        ConfigError: `policy.train_global_batch_size` does not divide the step, the model cannot be loaded, it cannot
            do what `share_prefixes` or `sequence_packing` ask for, or the cluster lacks resources.
        InfraError: a worker failed to start.
    """
    num_updates = _updates_per_step(settings, request)
    group = await cluster.start_workers(
        PolicyWorker,
        WorkerRequest(
            name="policy",
            num_workers=settings.num_workers,
            num_threads=request.num_threads,
            gpus_per_worker=request.gpus_per_worker,
            concurrency=1 + SENDER_CALLS,
            call_timeout_s=request.call_timeout_s,
        ),
        settings,
        request,
    )
    try:
        can_share = await _can_share(group, settings, note)
    except BaseException:
        await group.close()
        raise
    return WorkerPolicy(
        group, settings, num_updates, request.version, temperature=request.temperature, can_share=can_share
    )


class WorkerPolicy:
    """A Policy over data-parallel PolicyWorkers, which all hold the same weights.

    Args:
        group: The workers.
        settings: The `policy` section.
        num_updates: Optimizer steps of an RL step.
        version: Version of the weights.
        temperature: Sampling temperature, at which workers score.
        can_share: Whether the model computes several sequences in one row correctly.
    """

    def __init__(
        self,
        group: WorkerGroup[PolicyWorker],
        settings: PolicySettings,
        num_updates: int,
        version: PolicyVersion,
        *,
        temperature: float,
        can_share: bool,
    ) -> None:
        self._group = group
        self._weight_decay = settings.optimizer.kwargs.weight_decay
        self._num_updates = num_updates
        self._version = version
        self._temperature = temperature
        self._skip = settings.skip_zero_advantages
        self._explained: LossFunction | None = None
        self._training = Batching.for_training(settings, can_share=can_share)
        self._scoring = Batching.for_logprobs(settings, can_share=can_share)

    @property
    def group(self) -> WorkerGroup[PolicyWorker]:
        """The workers."""
        return self._group

    @property
    def version(self) -> PolicyVersion:
        """Version of the weights."""
        return self._version

    async def train(self, batch: TrainBatch, loss: LossFunction) -> TrainResult:
        """Train one RL step; the batch is cut, in order, into equal parts of one optimizer step each."""
        await self._note_path(loss)
        steps = [await self._optimizer_step(chunk, loss) for chunk in batch.shard(self._num_updates)]
        self._version = self._agreed(await self._group.broadcast(PolicyWorker.end_train), self._version + 1)
        return TrainResult(self._version, _mean_over_steps(steps) | {"wd": self._weight_decay})

    async def logprobs(self, batch: TrainBatch) -> Tensor:
        """Return [T] float32."""
        return await self._score(batch, PolicyWorker.logprobs)

    async def logprobs_at(self, batch: TrainBatch, temperature: float) -> Tensor:
        """Return [T] float32."""
        return await self._score(batch, PolicyWorker.logprobs_at, temperature)

    async def reference_logprobs(self, batch: TrainBatch) -> Tensor:
        """Return [T] float32."""
        return await self._score(batch, PolicyWorker.reference_logprobs)

    async def explain_gap(self, batch: TrainBatch) -> str:
        """Score some sequences in other ways, and name the one that gives the generator's numbers."""
        batch = batch.at_version(self._version)
        rows = torch.unique(batch.sequence_ids[own_tokens(batch)])[:MAX_SEQUENCES]
        if not rows.numel():
            return "no token of this step was sampled by the version in training"
        batch = batch.select(rows)
        own = await self.logprobs(batch)
        explained = {
            "report the value of another token: the one after": shifted_gap(own, batch, 1),
            "report the value of another token: the one before": shifted_gap(own, batch, -1),
            "compute in another precision": mean_gap(
                await self._score(batch, PolicyWorker.logprobs_in_other_precision), batch
            ),
        }
        for temperature in TEMPERATURES:
            if temperature != self._temperature:
                scored = await self._score(batch, PolicyWorker.logprobs_at, temperature)
                cause = f"sample at temperature {temperature} while the trainer scores at {self._temperature}"
                explained[cause] = mean_gap(scored, batch)
        return name_cause(mean_gap(own, batch), explained)

    async def offload(self) -> int:
        """Move what training alone needs to the host, on every worker; return the bytes that left devices."""
        return sum(await self._group.broadcast(PolicyWorker.offload))

    async def reload(self) -> int:
        """Bring it back; return the bytes."""
        return sum(await self._group.broadcast(PolicyWorker.reload))

    def weight_sender(self) -> SenderHandle:
        """Return the workers' end."""
        return WorkerSender(self._group)

    async def save(self, folder: Path, with_optimizer: bool) -> None:
        """Let rank 0 write."""
        await self._group.call(0, PolicyWorker.save, folder, with_optimizer)

    async def restore(self, folder: Path) -> None:
        """Let every rank read."""
        versions = await self._group.broadcast(PolicyWorker.restore, folder)
        self._version = self._agreed(versions, versions[0])

    async def export(self, folder: Path) -> None:
        """Let rank 0 write."""
        await self._group.call(0, PolicyWorker.export, folder)

    async def close(self) -> None:
        """End the workers."""
        await self._group.close()

    async def _optimizer_step(self, batch: TrainBatch, loss: LossFunction) -> "_Step":
        counts = batch.count()
        batch = batch.at_version(self._version).with_counts(counts)
        has_weight = sequences_to_compute(batch, loss, skip=False)
        computed = sequences_to_compute(batch, loss, skip=self._skip)
        shares = self._cut(self._training, batch, batch.token_weights * computed[batch.sequence_ids] > 0)
        report = merge_reports(await self._group.scatter(PolicyWorker.accumulate, shares, loss))
        count = counts.sequences if report.per is Per.SEQUENCES else counts.tokens
        # Tokens may all be masked where sequences still count: then there is no gradient, and nothing to step on.
        outcomes = await self._group.broadcast(PolicyWorker.apply_step, count if counts.tokens > 0 else 0.0)
        return _Step(report, counts, int(has_weight.sum() - computed.sum()), outcomes[0])

    async def _note_path(self, loss: LossFunction) -> None:
        """Log once, for each loss, which way it and its gradients are computed."""
        if self._explained is loss:
            return
        self._explained = loss
        _log.info("training: %s", await self._group.call(0, PolicyWorker.loss_path, loss))

    async def _score(self, batch: TrainBatch, method: Callable[..., list[Tensor]], *arguments: float) -> Tensor:
        shares = self._cut(self._scoring, batch, batch.loss_mask)
        logprobs = torch.zeros(batch.num_tokens)
        for share, parts in zip(shares, await self._group.scatter(method, shares, *arguments), strict=True):
            for work, part in zip(share, parts, strict=True):
                logprobs[batch.positions_of(work.numbers)] = part
        return logprobs

    def _cut(self, batching: Batching, batch: TrainBatch, counted: Tensor) -> list[list[Work]]:
        return batching.cut(batch, counted, self._group.world_size)

    def _agreed(self, versions: list[PolicyVersion], expected: PolicyVersion) -> PolicyVersion:
        if any(version != expected for version in versions):
            raise FatalError(f"trainer ranks hold versions {versions}, expected {expected} on each; they went apart")
        return expected


@dataclass(frozen=True)
class _Step:
    """One optimizer step.

    What the policy did is averaged over the tokens that it was computed for; the loss, and all counts, are of the
    whole step, whose other sequences add 0 to it.
    """

    report: ChunkReport
    counts: Counts
    num_skipped: int
    outcome: OptimizerStep

    def metrics(self) -> dict[str, float]:
        report, counts, outcome = self.report, self.counts, self.outcome
        metrics = finalize_metrics(report.metrics, report.computed.tokens, report.computed.sequences)
        count = counts.sequences if report.per is Per.SEQUENCES else counts.tokens
        metrics |= {
            "loss": report.loss / count if count > 0 else 0.0,
            "lr": outcome.lr,
            "num_valid_samples": counts.sequences,
            "global_valid_seqs": counts.sequences,
            "global_valid_toks": counts.tokens,
            "num_skipped_sequences": float(self.num_skipped),
            "num_computed_positions": float(report.num_positions),
            "steps_skipped_empty": float(outcome.skipped_empty),
            "steps_skipped_nonfinite": float(outcome.skipped_nonfinite),
        }
        return metrics if outcome.grad_norm is None else metrics | {"grad_norm": outcome.grad_norm}


_COUNTERS = (
    "steps_skipped_empty",
    "steps_skipped_nonfinite",
    "num_skipped_sequences",
    "num_computed_positions",
    "num_clamped_log_ratios",
)


def _mean_over_steps(steps: Sequence[_Step]) -> dict[str, float]:
    """Reduce over the optimizer steps of an RL step: counters add, extrema stay extrema, the rest are means."""
    values: dict[str, list[float]] = defaultdict(list)
    kinds: dict[str, Metric] = {}
    for step in steps:
        kinds |= step.report.metrics
        for name, value in step.metrics().items():
            values[name].append(value)
    return {name: _reduce(name, series, kinds.get(name)) for name, series in values.items()}


def _reduce(name: str, series: list[float], kind: Metric | None) -> float:
    if name == "grad_norm":
        return series[-1]
    if name in _COUNTERS:
        return sum(series)
    if kind is not None and kind.per is Per.MIN:
        return min(series)
    if kind is not None and kind.per is Per.MAX:
        return max(series)
    return sum(series) / len(series)


async def _can_share(group: WorkerGroup[PolicyWorker], settings: PolicySettings, note: Callable[[str], None]) -> bool:
    """Ask the model whether it honours our masks, where that matters.

    Raises:
        ConfigError: it does not, and the configuration relies on it.
    """
    if settings.share_prefixes == "off" and not settings.sequence_packing.enabled:
        return False
    fault = await group.call(0, PolicyWorker.mask_fault)
    if fault is None:
        return True
    for is_set, key, fix in (
        (settings.sequence_packing.enabled, "policy.sequence_packing.enabled=true", "use policy.dynamic_batching"),
        (settings.share_prefixes == "on", "policy.share_prefixes=on", "set policy.share_prefixes=auto"),
    ):
        if is_set:
            raise ConfigError(f"{key} does not work with the model {settings.model_name}: {fault}; {fix}")
    note(f"training computes each group's prompt once per sample: the model cannot share it, {fault}")
    return False


def _updates_per_step(settings: PolicySettings, request: PolicyRequest) -> int:
    size = settings.train_global_batch_size
    if size is None:
        return 1
    if request.sequences_per_step % size:
        raise ConfigError(
            f"policy.train_global_batch_size={size} does not divide the {request.sequences_per_step} sequences of a "
            "step (grpo.num_prompts_per_step x grpo.num_generations_per_prompt); choose a divisor, or null for all"
        )
    return request.sequences_per_step // size
