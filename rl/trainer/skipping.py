"""Which sequences of an optimizer step are computed at all."""

import torch
from torch import Tensor

from rl.algorithms.algorithm import LossFunction
from rl.core.batch import TrainBatch


def sequences_to_compute(batch: TrainBatch, loss: LossFunction, *, skip: bool) -> Tensor:
    """Return [N] bool: sequences with weight, with `skip` only those that change loss or gradient.

    The gap between the log-probabilities of trainer and generator proves every refit, so a step never goes without: if
    no sequence that is left holds a token of the batch's policy version, the first group that does is computed too.
    Where no sequence with weight does, the first group with weight stands in.
    """
    with_weight = _any_token(batch, batch.token_weights > 0)
    if not skip:
        return with_weight
    kept = with_weight & loss.contributes(batch)
    own = _any_token(batch, (batch.token_weights > 0) & (batch.token_versions == _version(batch)))
    witnesses = own if bool(own.any()) else with_weight
    if bool((kept & witnesses).any()) or not bool(witnesses.any()):
        return kept
    first_group = batch.group_ids[witnesses.nonzero()[0]]
    return kept | (with_weight & (batch.group_ids == first_group))


def _any_token(batch: TrainBatch, where: Tensor) -> Tensor:
    return torch.bincount(batch.sequence_ids[where], minlength=batch.num_sequences) > 0


def _version(batch: TrainBatch) -> int:
    return -1 if batch.policy_version is None else batch.policy_version
