"""Losses over pairs of responses: Bradley-Terry reward models, and DPO.

Sequences 2i and 2i + 1 of a batch are the chosen and the rejected response of pair i. A pair's loss is

    -log sigmoid(beta (r_chosen - r_rejected))              (Bradley and Terry 1952; Christiano et al. 2017)

where r is a reward model's score, or for DPO (Rafailov et al. 2023, equation 7) the sum over the response's tokens of
logprob - reference_logprob. Losses are means over pairs; a pair counts as two sequences, so sums are doubled and
divided by the number of sequences.

    sums = DPOLoss(beta=0.05)(logprobs, batch)
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rl.algorithms.algorithm import LossSums
from rl.algorithms.nll import nll_by_sequence, sum_by_sequence
from rl.core.batch import TrainBatch
from rl.core.metrics import Metric, Per


@dataclass(frozen=True)
class _Pairs:
    """Weights of the P pairs, and which of them count."""

    weights: Tensor
    index: Tensor

    @classmethod
    def of(cls, batch: TrainBatch, dtype: torch.dtype) -> "_Pairs":
        chosen, rejected = batch.sample_weights[0::2], batch.sample_weights[1::2]
        if chosen.shape != rejected.shape or not torch.equal(chosen, rejected):
            raise ValueError(
                f"a preference batch holds pairs of equal weight, chosen then rejected; got {batch.num_sequences} "
                f"sequences with weights {batch.sample_weights.tolist()}"
            )
        index = (chosen > 0).nonzero().squeeze(1)
        return cls(chosen[index].to(dtype), index)

    def mean(self, values: Tensor) -> Tensor:
        """Return the sum over pairs ([P'] values of those that count) that becomes a mean once divided by sequences."""
        return 2 * (self.weights * values).sum()


def pairwise_loss(scores: Tensor, batch: TrainBatch, beta: float = 1.0) -> LossSums:
    """Return the Bradley-Terry loss of a reward model.

    Args:
        scores: [N] float with gradient, chosen and rejected in turn.
        batch: the micro-batch; the two sequences of a pair have the same weight.
        beta: factor of the difference.

    Raises:
        ValueError: sequences do not form pairs of equal weight.
    """
    loss, metrics = _preference(scores, _Pairs.of(batch, scores.dtype), beta)
    return LossSums(loss, Per.SEQUENCES, {"loss": Metric(loss.item(), Per.SEQUENCES)} | metrics | _count(batch))


@dataclass(frozen=True)
class DPOLoss:
    """preference_weight x DPO + sft_weight x negative log-likelihood of the chosen responses.

    Attributes:
        beta: How much the policy is held to the reference.
        preference_weight: Weight of the pairwise term.
        sft_weight: Weight of the likelihood term.
        average_preference: Take the mean log-ratio of a response instead of the sum.
        average_sft: Take the mean log-likelihood of a response instead of the sum.
    """

    beta: float = 0.05
    preference_weight: float = 1.0
    sft_weight: float = 0.0
    average_preference: bool = False
    average_sft: bool = False

    def __call__(self, logprobs: Tensor, batch: TrainBatch) -> LossSums:
        """Return the sums of one micro-batch.

        Args:
            logprobs: [T] float with gradient.
            batch: With `reference_logprobs`.

        Raises:
            ValueError: the column is missing, or sequences do not form pairs of equal weight.
        """
        if batch.reference_logprobs is None:
            raise ValueError("DPO needs the column reference_logprobs")
        pairs = _Pairs.of(batch, logprobs.dtype)
        log_ratios = logprobs - batch.reference_logprobs.to(logprobs.dtype)
        scores = sum_by_sequence(log_ratios, batch, average=self.average_preference)
        preference, metrics = _preference(scores, pairs, self.beta)
        likelihood = nll_by_sequence(logprobs, batch, average=self.average_sft)
        sft = pairs.mean(likelihood[0::2][pairs.index])
        loss = self.preference_weight * preference
        if self.sft_weight > 0:
            loss = loss + self.sft_weight * sft
        metrics |= {
            "loss": Metric(loss.item(), Per.SEQUENCES),
            "preference_loss": Metric(preference.item(), Per.SEQUENCES),
            "sft_loss": Metric(sft.item(), Per.SEQUENCES),
        }
        return LossSums(loss, Per.SEQUENCES, metrics | _count(batch))


def _preference(scores: Tensor, pairs: _Pairs, beta: float) -> tuple[Tensor, dict[str, Metric]]:
    chosen, rejected = scores[0::2][pairs.index], scores[1::2][pairs.index]
    loss = pairs.mean(-logsigmoid(beta * (chosen - rejected)))
    with torch.no_grad():
        means = {
            "accuracy": pairs.mean((chosen > rejected).to(scores.dtype)),
            "rewards_chosen_mean": pairs.mean(chosen),
            "rewards_rejected_mean": pairs.mean(rejected),
        }
    return loss, {name: Metric(value.item(), Per.SEQUENCES) for name, value in means.items()}


def _count(batch: TrainBatch) -> dict[str, Metric]:
    return {"num_valid_samples": Metric(batch.sample_weights.sum().item() / 2, Per.NONE)}
