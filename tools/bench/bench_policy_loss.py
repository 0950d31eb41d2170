"""The policy loss of many tokens with gradients: the fused operator, the project's torch form and a minimal one.

    tools/python tools/bench/bench_policy_loss.py        a million tokens, two threads; about a minute

The objective: clipped token ratios, truncated importance weights, k3 penalty, entropy bonus. Ours and the project's
torch form give every metric too, the minimal one none. Limit: a copy of the nine columns that must cross memory.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from rl.algorithms.config import LossConfig
from rl.algorithms.objective import parse_objective
from rl.core.batch import TrainBatch
from tools.bench import report
from tools.bench.policy_loss_case import (
    CLIP,
    ENTROPY_COEF,
    KL_COEF,
    SEQUENCE_TOKENS,
    TRUNCATION,
    Tokens,
    policy_loss_case,
)
from tools.bench.rounds import Case

PROJECT = "torch eager"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and report."""
    options = report.parse(__doc__, "policy_loss", arguments, tokens=2**20)
    report.run(options, build_cases)


def build_cases(options: argparse.Namespace) -> Mapping[str, Callable[[], Case]]:
    """Return the one table."""
    return {"policy loss": lambda: policy_loss_case(options, {PROJECT: ProjectLoss()})}


class ProjectLoss:
    """The objective as a configuration, computed by rl.algorithms on the same tokens."""

    def __init__(self) -> None:
        config = LossConfig(
            ratio_clip_min=CLIP,
            ratio_clip_max=CLIP,
            reference_policy_kl_penalty=KL_COEF,
            entropy_coef=ENTROPY_COEF,
            use_importance_sampling_correction=True,
            truncated_importance_sampling_type="tis",
            truncated_importance_sampling_ratio=TRUNCATION,
        )
        self._loss = parse_objective(config, single_update=False)
        self._batch: TrainBatch | None = None

    def __call__(self, logprobs: Tensor, entropy: Tensor, tokens: Tokens) -> Tensor:
        if self._batch is None:
            self._batch = batch_of(tokens)
        return self._loss(logprobs, entropy, self._batch).loss


def batch_of(tokens: Tokens) -> TrainBatch:
    """Return the tokens as a batch of sequences."""
    count = tokens.logprobs.numel()
    offsets = torch.tensor([*range(0, count, SEQUENCE_TOKENS), count])
    num_sequences = offsets.numel() - 1
    mask = tokens.weights > 0
    return TrainBatch(
        tokens=torch.zeros(count, dtype=torch.int64),
        offsets=offsets,
        loss_mask=mask,
        generation_logprobs=torch.where(mask, tokens.generation_logprobs, 0.0),
        token_versions=torch.where(mask, 0, -1),
        group_ids=torch.zeros(num_sequences, dtype=torch.int64),
        rewards=torch.ones(num_sequences),
        valid=torch.ones(num_sequences, dtype=torch.bool),
        sample_weights=torch.ones(num_sequences),
        versions=torch.zeros(num_sequences, 2, dtype=torch.int64),
        prev_logprobs=tokens.prev_logprobs,
        reference_logprobs=tokens.reference_logprobs,
        advantages=tokens.advantages,
    )


if __name__ == "__main__":
    main()
