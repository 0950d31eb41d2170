"""Names the likely cause when trainer and generator disagree about tokens that the version in training sampled.

There both score the same tokens with the same weights, so the difference is rounding. When it is not, one of a few
things is wrong, and each leaves its mark: the generator's numbers come out when the trainer scores at another
temperature, in another precision, or one position further; when nothing of that helps, the weights differ. This file
compares; the passes are run by `rl.trainer.policy`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from rl.core.batch import TrainBatch

# What runs are sampled at; a fault usually leaves one side at one of these.
TEMPERATURES = (0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2.0)
# A cause must explain this share of the difference.
_EXPLAINED = 0.5
# More sequences would not make the comparison surer.
MAX_SEQUENCES = 16


def own_tokens(batch: TrainBatch) -> Tensor:
    """Return [T] bool: tokens that the version in training sampled."""
    if batch.policy_version is None:
        return torch.zeros(batch.num_tokens, dtype=torch.bool)
    return batch.loss_mask & (batch.token_versions == batch.policy_version)


def mean_gap(logprobs: Tensor, batch: TrainBatch) -> float:
    """Return the mean |logprobs - generation_logprobs| over own tokens, in nats; 0 where there is none."""
    own = own_tokens(batch)
    gaps = (logprobs - batch.generation_logprobs)[own].abs()
    return float(gaps.nanmean()) if gaps.numel() else 0.0


def shifted_gap(logprobs: Tensor, batch: TrainBatch, shift: int) -> float:
    """Return the mean difference when the generator's value of token t belongs to token t + shift (1 or -1).

    Only neighbours that are both own tokens of one sequence are compared; infinite where there are none.
    """
    own = own_tokens(batch)
    neighbours = own[:-1] & own[1:] & (batch.sequence_ids[:-1] == batch.sequence_ids[1:])
    early, late = (neighbours.nonzero().squeeze(1) + step for step in (0, 1))
    given, meant = (early, late) if shift == 1 else (late, early)
    gaps = (logprobs[meant] - batch.generation_logprobs[given]).abs()
    return float(gaps.nanmean()) if gaps.numel() else float("inf")


def name_cause(gap: float, explained: Mapping[str, float]) -> str:
    """Return the cause that leaves the smallest difference, or that the weights differ.

    Args:
        gap: Mean difference as it is.
        explained: What would be left of it if the cause, a clause about the generator, were true.
    """
    cause = min(explained, key=lambda name: explained[name])
    if explained[cause] <= _EXPLAINED * gap:
        return f"the generator seems to {cause} (that leaves {explained[cause]:.1e} of {gap:.1e})"
    return (
        "no other temperature, precision or position explains it, so the generator seems to hold other weights: a "
        "refit that did not arrive, or another model"
    )
