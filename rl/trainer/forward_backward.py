"""Micro-batches: from jagged sequences to padded tensors, through the model, to log-probabilities and loss sums.

Logits exist at counted positions only. Nothing here divides, steps or talks to other ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl.algorithms.algorithm import LossFunction
from rl.core.batch import TrainBatch
from rl.core.metrics import Metric, Per, merge_metrics
from rl.ops.logprobs import LogprobImpl, token_logprobs
from rl.trainer.model import CausalModel


@dataclass(frozen=True)
class ChunkReport:
    """Sums over the sequences that one rank has accumulated.

    Attributes:
        num_tokens: Sum of token weights.
        num_sequences: Sum of sequence weights.
        per: The count that divides the loss; None when the rank saw no sequence.
        metrics: Metric sums and extrema.
    """

    num_tokens: float = 0.0
    num_sequences: float = 0.0
    per: Per | None = None
    metrics: dict[str, Metric] = field(default_factory=dict)


def merge_reports(reports: Sequence[ChunkReport]) -> ChunkReport:
    """Add the reports of chunks or ranks.

    Raises:
        ValueError: they disagree about what divides the loss.
    """
    kinds = {report.per for report in reports if report.per is not None}
    if len(kinds) > 1:
        raise ValueError(f"one optimizer step mixes losses divided by {sorted(kind.value for kind in kinds)}")
    return ChunkReport(
        num_tokens=sum(report.num_tokens for report in reports),
        num_sequences=sum(report.num_sequences for report in reports),
        per=next(iter(kinds), None),
        metrics=merge_metrics([report.metrics for report in reports]),
    )


@dataclass(frozen=True)
class ForwardSettings:
    """How sequences go through a model.

    Attributes:
        temperature: Sampling temperature; logits are divided by it.
        impl: Native op or plain torch.
        micro_batch_size: Sequences of one pass.
    """

    temperature: float
    impl: LogprobImpl
    micro_batch_size: int


def accumulate_gradients(
    model: CausalModel, batch: TrainBatch, loss: LossFunction, settings: ForwardSettings
) -> ChunkReport:
    """Run forward and backward over all micro-batches; gradients of the loss sum add up in the parameters."""
    reports = []
    for micro in batch.microbatches(settings.micro_batch_size):
        counted = micro.token_weights > 0
        logprobs, entropy = _logprobs_and_entropy(model, micro, counted, settings)
        sums = loss(logprobs, entropy, micro)
        if sums.loss.requires_grad:
            sums.loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        reports.append(
            ChunkReport(
                num_tokens=float(micro.token_weights.sum()),
                num_sequences=float(micro.sample_weights.sum()),
                per=sums.per,
                metrics=dict(sums.metrics),
            )
        )
    return merge_reports(reports)


def compute_logprobs(model: CausalModel, batch: TrainBatch, settings: ForwardSettings) -> Tensor:
    """Return the log-probability of every sampled token, [T] float32; 0 off the mask. No gradient."""
    with torch.no_grad():
        parts = [
            _logprobs_and_entropy(model, micro, micro.loss_mask, settings)[0]
            for micro in batch.microbatches(settings.micro_batch_size)
        ]
    return torch.cat(parts) if parts else torch.zeros(0)


def pad_right(batch: TrainBatch, column: Tensor) -> Tensor:
    """Lay a [T] column out as [N, longest], filled up on the right with 0."""
    place = torch.arange(batch.num_tokens) - batch.offsets[:-1][batch.sequence_ids]
    padded = column.new_zeros(batch.num_sequences, int(batch.lengths.max()))
    padded[batch.sequence_ids, place] = column
    return padded


def _logprobs_and_entropy(
    model: CausalModel, batch: TrainBatch, counted: Tensor, settings: ForwardSettings
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies on the CPU, [T] float32 each, 0 where not `counted` ([T] bool)."""
    empty = torch.zeros(batch.num_tokens)
    if not bool(counted.any()):
        return empty, empty
    # Token t is predicted at position t - 1 of its sequence; the first position is never counted.
    predicting = torch.zeros_like(counted)
    predicting[:-1] = counted[1:]
    logits = model.logits_at(
        pad_right(batch, batch.tokens).to(model.device), pad_right(batch, predicting).to(model.device)
    )
    targets = batch.tokens[counted].to(model.device)
    logprobs, entropy = token_logprobs(logits, targets, settings.temperature, impl=settings.impl, consume_logits=True)
    return empty.masked_scatter(counted, logprobs.cpu()), empty.masked_scatter(counted, entropy.detach().cpu())
