"""Micro-batches: from jagged sequences to rows, through the model, to log-probabilities, loss sums and gradients.

Which of three ways a micro-batch goes is chosen by `loss_path`. Nothing here divides, steps or talks to other ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl.algorithms.algorithm import LossFunction, LossSums
from rl.core.batch import TrainBatch
from rl.core.metrics import Counts, Metric, Per, merge_metrics
from rl.trainer.layout import lay_out
from rl.trainer.loss_path import ForwardSettings, LossPath, Way, choose_path
from rl.trainer.model import CausalModel
from rl.trainer.one_pass import one_pass
from rl.trainer.planner import Row
from rl.trainer.two_passes import logprobs_and_entropy, two_passes


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


def accumulate_gradients(
    model: CausalModel, work: Sequence[Work], loss: LossFunction, settings: ForwardSettings
) -> ChunkReport:
    """Run forward and backward over all micro-batches; gradients of the loss sum add up in the parameters."""
    path = choose_path(loss, settings)
    reports = []
    for part in work:
        sums = _accumulate(model, part, loss, path, settings)
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
        return [_sampled_logprobs(model, part, settings) for part in work]


def _sampled_logprobs(model: CausalModel, work: Work, settings: ForwardSettings) -> Tensor:
    counted = work.batch.loss_mask
    if not bool(counted.any()):
        return torch.zeros(counted.numel())
    layout = lay_out(work.batch, work.rows, counted, work.width).to(model.device)
    logprobs, _ = logprobs_and_entropy(model, layout, counted, settings, entropy_gradient=False)
    return logprobs


def _accumulate(
    model: CausalModel, work: Work, loss: LossFunction, path: LossPath, settings: ForwardSettings
) -> LossSums:
    counted = work.batch.token_weights > 0
    if not bool(counted.any()):
        nothing = torch.zeros(counted.numel())
        return loss(nothing, nothing, work.batch)
    layout = lay_out(work.batch, work.rows, counted, work.width).to(model.device)
    if path.way is Way.ONE_PASS and path.native is not None:
        return one_pass(model, layout, work.batch, path.native, settings.temperature)
    logprobs, entropy = logprobs_and_entropy(model, layout, counted, settings, entropy_gradient=loss.uses_entropy)
    return two_passes(logprobs, entropy, work.batch, loss, path.native)
