"""The contract of an algorithm: which columns it needs, how it turns rewards into advantages, and its losses.

Pure mathematics over a TrainBatch; nothing here knows workers, processes or asynchrony.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from rl.core.batch import TrainBatch
from rl.core.metrics import Metric, Per
from rl.ops.policy_loss import PolicyLossParams, PolicyLossTokens


class Need(enum.Enum):
    """A [T] column that must be computed by a model before advantages and losses."""

    PREV = "prev_logprobs"
    REFERENCE = "reference_logprobs"
    TEACHER = "teacher_logprobs"
    VALUES = "values"


@dataclass(frozen=True)
class LossSums:
    """What a loss says about one micro-batch: sums, which are divided once by counts over all micro-batches and ranks.

    The loss is divided by the count of the whole optimizer step, to which sequences that were left out add 0; metrics
    by the counts of what was computed, so that a mean of what the policy did does not shrink with them.

    Attributes:
        loss: Scalar tensor with gradient; the sum over tokens, or over sequences of their token means.
        per: The count that divides the loss: TOKENS or SEQUENCES.
        metrics: Sums and extrema, detached.
    """

    loss: Tensor
    per: Per
    metrics: Mapping[str, Metric]


class LossFunction(Protocol):
    """A picklable loss.

    Batches are on the CPU, and so is what the trainer hands over, wherever the model is: a number per token is small
    beside the logits, which never leave the model's device.

    Args of a call:
        logprobs: [T] float32 with gradient, of the trained policy; meaningful where token_weights > 0.
        entropy: [T] float32, of the policy's distribution at the same places; with gradient when `uses_entropy`.
        batch: The micro-batch; its `counts` are those of the whole optimizer step.
    """

    @property
    def uses_entropy(self) -> bool:
        """Whether the loss needs the gradient of the entropy."""
        ...

    def contributes(self, batch: TrainBatch) -> Tensor:
        """Return [N] bool: the sequences whose loss or gradient may differ from 0.

        The others are not computed; they still count where sums are divided. Needs the batch's advantages.
        """
        ...

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: TrainBatch) -> LossSums:
        """Return the sums of this micro-batch."""
        ...


class NativeLoss(Protocol):
    """A loss in the form of csrc/loss/policy_loss.h: what a trainer needs to compute it beside the output layer.

    With it a trainer can take loss and gradients of a micro-batch in one pass, in which logits never exist. The sums
    are those of the loss's own call, up to rounding.
    """

    @property
    def params(self) -> PolicyLossParams:
        """The objective. With sequence ratios, whole sequences must be known before the loss: that takes two passes."""
        ...

    def tokens(self, batch: TrainBatch) -> PolicyLossTokens:
        """Return the columns of the tokens with weight, in the order of the batch, without `row_offsets`."""
        ...

    def sums(self, metrics: Tensor, logprobs: Tensor, batch: TrainBatch) -> LossSums:
        """Return what the loss's call returns, without graph.

        Args:
            metrics: [len(PolicyMetric)] float64, of the pass.
            logprobs: [T] float32, from the pass.
            batch: The micro-batch.
        """
        ...


@runtime_checkable
class OffersNativeLoss(Protocol):
    """A LossFunction that may have a native form. Others are computed in torch from native log-probabilities."""

    def native(self) -> NativeLoss | str:
        """Return the native form, or why there is none, as a clause; asked once per pass over the micro-batches."""
        ...


class Estimator(Protocol):
    """Turns the rewards of a step into advantages; a pure function of the batch, named by its paper."""

    @property
    def needs(self) -> frozenset[Need]:
        """Columns that must be filled before it is called."""
        ...

    def __call__(self, batch: TrainBatch) -> dict[str, Tensor]:
        """Return the columns to add: `advantages` [T] float32, and `returns` where a critic learns.

        Values are 0 off the sampled tokens of valid sequences, and do not depend on what stands there.
        """
        ...


# A batch that a stage has changed, and what the stage has to report.
Staged = tuple[TrainBatch, dict[str, float]]


class Algorithm(Protocol):
    """What a training step asks of an algorithm: shape -> (columns of `needs`) -> filter -> advantages -> losses."""

    @property
    def needs(self) -> frozenset[Need]:
        """Columns that must be filled before `filter`, `advantages` and the losses."""
        ...

    @property
    def losses(self) -> Mapping[str, LossFunction]:
        """The loss of each trained model, by model name; in training order."""
        ...

    def shape(self, batch: TrainBatch) -> Staged:
        """Transform rewards, and drop sequences that no model need look at to be dropped."""
        ...

    def filter(self, batch: TrainBatch) -> Staged:
        """Drop sequences by the columns of `needs`: weight 0 in the loss, the vote in baselines kept."""
        ...

    def advantages(self, batch: TrainBatch) -> dict[str, Tensor]:
        """Return the columns to add to the batch."""
        ...
