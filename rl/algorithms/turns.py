"""The turns of a batch: maximal runs of sampled tokens. Whatever the environment says comes between two of them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rl.core.batch import TrainBatch


@dataclass(frozen=True)
class Turns:
    """The K turns of a batch, in order.

    Attributes:
        starts: [K] int64, position of each turn's first token.
        sequences: [K] int64, the sequence that it stands in.
        of_token: [T] int64, the turn of each sampled token; -1 elsewhere.
    """

    starts: Tensor
    sequences: Tensor
    of_token: Tensor


def find_turns(batch: TrainBatch) -> Turns:
    """Find the runs of the loss mask. None crosses sequences, for the first position of each is masked."""
    before = torch.cat([batch.loss_mask.new_zeros(1), batch.loss_mask[:-1]])
    begins = batch.loss_mask & ~before
    starts = begins.nonzero().squeeze(1)
    of_token = torch.where(batch.loss_mask, begins.cumsum(0) - 1, -1)
    return Turns(starts, batch.sequence_ids[starts], of_token)


def count_tokens(marks: Tensor, turns: Turns) -> Tensor:
    """Return [K] int64: at how many tokens of each turn `marks` ([T] bool) holds."""
    hits = turns.of_token[marks & (turns.of_token >= 0)]
    return torch.bincount(hits, minlength=turns.starts.numel())
