"""Short ways to write rollouts, groups and batches in tests."""

from collections.abc import Sequence

import torch

from rl.core.batch import TrainBatch
from rl.core.types import (
    Completion,
    FinishReason,
    Message,
    Prompt,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    Turn,
    VersionSpan,
)


def make_completion(tokens: Sequence[int], logprobs: Sequence[float] | None = None, version: int = 0) -> Completion:
    """A completion that one policy version sampled; log-probabilities default to -1."""
    values = tuple(logprobs) if logprobs is not None else (-1.0,) * len(tokens)
    return Completion(tuple(tokens), values, FinishReason.STOP, (VersionSpan(version, 0, len(tokens)),), text="")


def make_rollout(
    turns: Sequence[tuple[Sequence[int], Completion]],
    reward: float = 0.0,
    status: RolloutStatus = RolloutStatus.OK,
    rollout_id: str = "0/0",
) -> Rollout:
    """A rollout of (prompt tokens, completion) turns."""
    return Rollout(rollout_id, tuple(Turn(tuple(prompt), completion) for prompt, completion in turns), reward, status)


def make_group(group_id: int, rollouts: Sequence[Rollout]) -> RolloutGroup:
    """A group of one prompt."""
    prompt = Prompt(f"p{group_id}", (Message("text", "p"),), "math", {}, rollouts[0].turns[0].prompt_tokens)
    return RolloutGroup(group_id, prompt, tuple(rollouts))


def random_groups(seed: int, num_groups: int = 4, group_size: int = 4, vocab_size: int = 256) -> list[RolloutGroup]:
    """Groups of single-turn rollouts with prompts of 2-8 tokens, completions of 1-6 and rewards 0 or 1."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    def tokens(count: int) -> list[int]:
        return [draw(0, vocab_size) for _ in range(count)]

    groups = []
    for group_id in range(num_groups):
        prompt = tokens(draw(2, 9))
        rollouts = []
        for sample in range(group_size):
            sampled = tokens(draw(1, 7))
            logprobs = [-0.01 - 6 * float(torch.rand((), generator=generator)) for _ in sampled]
            turn = (prompt, make_completion(sampled, logprobs))
            rollouts.append(make_rollout([turn], float(draw(0, 2)), rollout_id=f"{group_id}/{sample}"))
        groups.append(make_group(group_id, rollouts))
    return groups


def loss_batch(
    generation_logprobs: Sequence[float],
    advantages: Sequence[float] | None = None,
    prev_logprobs: Sequence[float] | None = None,
    reference_logprobs: Sequence[float] | None = None,
    lengths: Sequence[int] | None = None,
    sample_weights: Sequence[float] | None = None,
) -> TrainBatch:
    """A batch for loss tests: given values for the sampled tokens, one masked token put before each sequence.

    `lengths` are the sampled tokens per sequence (default: one sequence of all).
    """
    lengths = list(lengths) if lengths is not None else [len(generation_logprobs)]
    mask = torch.tensor([sampled for length in lengths for sampled in [False] + [True] * length])
    full = torch.tensor([length + 1 for length in lengths])

    def column(values: Sequence[float] | None) -> torch.Tensor | None:
        return None if values is None else scatter_sampled(mask, torch.tensor(values, dtype=torch.float32))

    generation = column(generation_logprobs)
    assert generation is not None
    weights = torch.tensor(sample_weights or [1.0] * len(lengths), dtype=torch.float32)
    return TrainBatch(
        tokens=torch.zeros(mask.numel(), dtype=torch.int64),
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), full.cumsum(0)]),
        loss_mask=mask,
        generation_logprobs=generation,
        token_versions=torch.where(mask, 0, -1),
        group_ids=torch.zeros(len(lengths), dtype=torch.int64),
        rewards=torch.zeros(len(lengths)),
        valid=weights > 0,
        sample_weights=weights,
        versions=torch.zeros(len(lengths), 2, dtype=torch.int64),
        prev_logprobs=column(prev_logprobs),
        reference_logprobs=column(reference_logprobs),
        advantages=column(advantages),
    )


def scatter_sampled(mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Put `values` ([K]) at the true places of `mask` ([T]) and 0 elsewhere; differentiable."""
    return torch.zeros(mask.numel(), dtype=values.dtype).masked_scatter(mask, values)
