"""Micro-batches: from jagged sequences to rows, through the model, to log-probabilities and loss sums.

Logits exist at predicting positions only. Nothing here divides, steps or talks to other ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl.algorithms.algorithm import LossFunction
from rl.core.batch import TrainBatch
from rl.core.metrics import Counts, Metric, Per, merge_metrics
from rl.ops.logprobs import LogprobImpl, token_logprobs
from rl.trainer.layout import lay_out
from rl.trainer.model import CausalModel
from rl.trainer.planner import Row


@dataclass(frozen=True)
class Work:
    """One forward (and backward) pass.

    Attributes:
        batch: Its sequences.
        numbers: What their numbers were in the batch that was cut.
        rows: Where they go; units number the sequences of `batch`.
        width: Positions of a row, padding included.
    """

    batch: TrainBatch
    numbers: tuple[int, ...]
    rows: tuple[Row, ...]
    width: int


@dataclass(frozen=True)
class ChunkReport:
    """Sums over the sequences that one rank has computed.

    Attributes:
        loss: Sum of the losses.
        computed: Sums of their weights: what divides the means of what the policy did.
        num_positions: Positions that went through the model, without padding; shared ones once.
        per: The count that divides the loss; None when the rank computed nothing.
        metrics: Metric sums and extrema.
    """

    loss: float = 0.0
    computed: Counts = Counts(0.0, 0.0)
    num_positions: int = 0
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
        loss=sum(report.loss for report in reports),
        computed=Counts(
            sum(report.computed.tokens for report in reports),
            sum(report.computed.sequences for report in reports),
            sum(report.computed.positive_tokens for report in reports),
        ),
        num_positions=sum(report.num_positions for report in reports),
        per=next(iter(kinds), None),
        metrics=merge_metrics([report.metrics for report in reports]),
    )


@dataclass(frozen=True)
class ForwardSettings:
    """How sequences go through a model.

    Attributes:
        temperature: Sampling temperature; logits are divided by it.
        impl: Native op or plain torch.
    """

    temperature: float
    impl: LogprobImpl


def accumulate_gradients(
    model: CausalModel, work: Sequence[Work], loss: LossFunction, settings: ForwardSettings
) -> ChunkReport:
    """Run forward and backward over all micro-batches; gradients of the loss sum add up in the parameters."""
    reports = []
    for part in work:
        counted = part.batch.token_weights > 0
        logprobs, entropy = _logprobs_and_entropy(model, part, counted, settings, loss.uses_entropy)
        sums = loss(logprobs, entropy, part.batch)
        if sums.loss.requires_grad:
            sums.loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        reports.append(
            ChunkReport(
                loss=sums.loss.item(),
                computed=part.batch.count(),
                num_positions=sum(unit.num_positions for row in part.rows for unit in row),
                per=sums.per,
                metrics=dict(sums.metrics),
            )
        )
    return merge_reports(reports)


def compute_logprobs(model: CausalModel, work: Sequence[Work], settings: ForwardSettings) -> list[Tensor]:
    """Return the log-probability of every sampled token of each micro-batch, [T] float32 each; 0 off the mask."""
    with torch.no_grad():
        return [_logprobs_and_entropy(model, part, part.batch.loss_mask, settings, False)[0] for part in work]


def _logprobs_and_entropy(
    model: CausalModel, work: Work, counted: Tensor, settings: ForwardSettings, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies on the CPU, [T] each, 0 where not `counted` ([T] bool)."""
    if not bool(counted.any()):
        return torch.zeros(counted.numel()), torch.zeros(counted.numel())
    layout = lay_out(work.batch, work.rows, counted, work.width).to(model.device)
    logits = model.logits_at(layout.tokens, layout.places, layout.position_ids, layout.mask)
    logprobs, entropy = token_logprobs(
        logits,
        layout.targets,
        settings.temperature,
        impl=settings.impl,
        consume_logits=True,
        entropy_gradient=entropy_gradient,
    )
    return _spread(logprobs, layout.pairs, counted), _spread(entropy, layout.pairs, counted)


def _spread(values: Tensor, pairs: Tensor, counted: Tensor) -> Tensor:
    """Give each counted token the value of its pair."""
    by_token = values.cpu()[pairs]
    return by_token.new_zeros(counted.numel()).masked_scatter(counted, by_token)
