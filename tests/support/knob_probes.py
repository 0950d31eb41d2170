"""What a configuration makes of fixed inputs: each function asks the code that a run asks, and returns all it says.

Results are compared with `differ`. None of them says that a value arrived unless something was computed with it.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from rl.controller.setup import build_algorithm
from rl.core.batch import FLAG_BITS, TrainBatch
from rl.core.types import TurnFlag
from rl.trainer.batching import Batching
from rl.trainer.optimizer import Optimizer
from rl.trainer.skipping import sequences_to_compute
from tests.support.knob_workshop import Case
from tests.support.losses import gradient_of
from tests.support.reward_batches import reward_batch
from tests.support.rollouts import random_groups, scatter_sampled

# The last rollout failed, so the groups have different numbers of votes.
REWARDS = [1.0, 0.0, -1.0, 0.5, 2.0, -0.5, 1.0, math.nan]
LENGTHS = [6, 5, 4, 3, 2, 6, 4, 5]
GROUPS = [0, 0, 0, 0, 1, 1, 1, 1]
TRUNCATED = [True, False, False, True, False, True, False, False]
COMPONENTS = {
    "correctness": [1.0, 0, 0, 0, 1, 0, 1, math.nan],
    "format": [1.0, 1, 0, 0, 1, 1, 0, math.nan],
    "integer": [0.0, 1, 1, 1, 0, 0, 1, math.nan],
}
# Log-ratios of whole sequences: of the policy to that at the start of the step, and of that to the generator.
DRIFT = [0.1, 0.3, 0.3, -0.1, 0.15, -0.1, 0.2, 0.0]
MISMATCH = [0.05, -0.05, 0.08, -0.07, 0.06, 0.0, -0.05, 0.0]
THINK_OPEN, THINK_CLOSE, OTHER_OPEN, OTHER_CLOSE, UNWANTED = 5, 6, 8, 9, 7


def differ(left: Any, right: Any) -> bool:
    """Whether two results differ by more than rounding."""
    if isinstance(left, float) and isinstance(right, float):
        return not (
            left == right or (math.isnan(left) and math.isnan(right)) or math.isclose(left, right, abs_tol=1e-9)
        )
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) != len(right) or any(differ(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() != right.keys() or any(differ(left[key], right[key]) for key in left)
    return bool(left != right)


def trained(case: Case) -> Any:
    """Rewards, weights, advantages, needed columns, loss and gradient of a fixed batch."""
    algorithm = build_algorithm(case.config)
    batch, told = algorithm.shape(_batch())
    current = _noise(1) - 1.0
    single = case.config.policy.train_global_batch_size is None
    prev = current if single else current + 0.5 * _noise(2) - _by_sequence(DRIFT)
    columns = {
        "generation_logprobs": prev + 0.3 * _noise(3) - _by_sequence(MISMATCH),
        "prev_logprobs": prev,
        "reference_logprobs": current + 0.8 * _noise(4),
    }
    batch = batch.with_columns(**{name: _sampled(batch, values) for name, values in columns.items()})
    batch, filtered = algorithm.filter(batch)
    batch = batch.with_columns(**algorithm.advantages(batch))
    batch = batch.with_counts(batch.count())
    loss = algorithm.losses["policy"]
    logprobs = current.double().requires_grad_()
    entropy = (1.0 + _noise(5)).double().requires_grad_()
    sums = loss(scatter_sampled(batch.loss_mask, logprobs), scatter_sampled(batch.loss_mask, entropy), batch)
    graph = sums.loss + 0.0 * entropy.sum()
    assert batch.advantages is not None
    return {
        "rewards": batch.rewards.tolist(),
        "weights": batch.sample_weights.tolist(),
        "advantages": batch.advantages.tolist(),
        "needs": sorted(need.value for need in algorithm.needs),
        "told": {**told, **filtered},
        "loss": sums.loss.item(),
        "per": sums.per.name,
        "gradient": torch.autograd.grad(graph, logprobs, retain_graph=True)[0].tolist(),
        "entropy": gradient_of(graph, entropy).tolist(),
    }


def _batch() -> TrainBatch:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(20, 200, (sum(LENGTHS),), generator=generator)
    # Tags in the first four sequences, which their prompts did not open; in the fifth the end of what its prompt did.
    tokens[[0, 6, 7, 11, 15, 16, 18, 19]] = torch.tensor(
        [THINK_OPEN, THINK_OPEN, THINK_CLOSE, OTHER_OPEN, THINK_OPEN, OTHER_CLOSE, THINK_CLOSE, UNWANTED]
    )
    batch = reward_batch(
        REWARDS, LENGTHS, groups=GROUPS, truncated=TRUNCATED, components=COMPONENTS, tokens=tokens.tolist()
    )
    flags = torch.zeros(batch.num_tokens, dtype=torch.int64)
    flags[batch.loss_mask & (batch.sequence_ids == 2)] = FLAG_BITS[TurnFlag.INVALID_TOOL_CALL]
    flags[batch.loss_mask & (batch.sequence_ids == 5)] = FLAG_BITS[TurnFlag.MALFORMED_THINKING]
    ids = batch.tokens.clone()
    ids[batch.offsets[4]] = THINK_OPEN
    return batch.with_columns(turn_flags=flags, tokens=ids)


def _noise(seed: int) -> Tensor:
    """In [-1/2, 1/2), for each sampled token."""
    return torch.rand(sum(LENGTHS), generator=torch.Generator().manual_seed(seed)) - 0.5


def _by_sequence(values: list[float]) -> Tensor:
    """A value per sequence, for each sampled token."""
    return torch.tensor(values).repeat_interleave(torch.tensor(LENGTHS))


def _sampled(batch: TrainBatch, values: Tensor) -> Tensor:
    return scatter_sampled(batch.loss_mask, values.float())


def learned(case: Case) -> Any:
    """Weights and learning rates after six RL steps of one optimizer step each, with fixed gradients."""
    policy = case.config.policy
    parameters = [nn.Parameter(torch.tensor([1.0, -2.0, 3.0])), nn.Parameter(torch.tensor([[0.5, 4.0]]))]
    optimizer = Optimizer(parameters, policy.optimizer, policy.scheduler, policy.max_grad_norm)
    generator = torch.Generator().manual_seed(0)
    weights, rates = [], []
    for step in range(6):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator) * (4.0 - step)
        rates.append(optimizer.step(2.0).lr)
        optimizer.end_rl_step()
        weights.append([value for parameter in parameters for value in parameter.detach().double().flatten().tolist()])
    return [weights, rates]


def cut(case: Case) -> Any:
    """Which sequences each pass of each rank computes, and how wide its rows are."""
    batch = TrainBatch.from_groups(random_groups(0))
    settings = case.config.policy
    found = []
    for batching in (
        Batching.for_training(settings, can_share=True),
        Batching.for_logprobs(settings, can_share=True),
    ):
        ranks = batching.cut(batch, batch.loss_mask, settings.num_workers)
        found.append([[(work.numbers, repr(work.rows), work.width) for work in works] for works in ranks])
    return found


def computed(case: Case) -> Any:
    """Which sequences of a batch are computed, of which one group has no advantage."""
    batch = TrainBatch.from_groups(random_groups(0))
    advantages = torch.where(batch.loss_mask, 1.0, 0.0).masked_fill(batch.group_ids[batch.sequence_ids] == 1, 0.0)
    batch = batch.with_columns(advantages=advantages)
    loss = build_algorithm(case.config).losses["policy"]
    return sequences_to_compute(batch, loss, skip=case.config.policy.skip_zero_advantages).tolist()
