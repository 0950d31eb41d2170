"""What is left out changes nothing, and the proof of the refit is never left out."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rl.algorithms.algorithm import LossSums
from rl.core.batch import TrainBatch
from rl.core.metrics import Per
from rl.trainer.skipping import sequences_to_compute
from tests.support.rollouts import make_completion, make_group, make_rollout


@dataclass(frozen=True)
class _Loss:
    numbers: tuple[int, ...]
    uses_entropy: bool = False

    def contributes(self, batch: TrainBatch) -> Tensor:
        return torch.isin(torch.arange(batch.num_sequences), torch.tensor(self.numbers, dtype=torch.int64))

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: TrainBatch) -> LossSums:
        return LossSums(logprobs.sum(), Per.TOKENS, {})


def _batch(versions: list[list[int]]) -> TrainBatch:
    groups = [
        make_group(number, [make_rollout([((1,), make_completion([2], version=version))]) for version in group])
        for number, group in enumerate(versions)
    ]
    return TrainBatch.from_groups(groups).at_version(5)


def _computed(batch: TrainBatch, *numbers: int, skip: bool = True) -> list[int]:
    return sequences_to_compute(batch, _Loss(numbers), skip=skip).nonzero().squeeze(1).tolist()


def test_without_skipping_all_with_weight_are_computed() -> None:
    batch = _batch([[5, 5], [5, 5]]).with_columns(sample_weights=torch.tensor([1.0, 0.0, 1.0, 1.0]))
    assert _computed(batch, 2, skip=False) == [0, 2, 3]


def test_with_skipping_those_that_contribute_are() -> None:
    assert _computed(_batch([[5, 5], [5, 5]]), 1, 3) == [1, 3]


def test_where_nothing_contributes_the_first_group_is_computed() -> None:
    assert _computed(_batch([[5, 5], [5, 5]])) == [0, 1]


def test_where_only_stale_sequences_contribute_the_first_group_of_the_own_version_is_added() -> None:
    assert _computed(_batch([[4, 4], [4, 4], [5, 4], [5, 5]]), 1) == [1, 4, 5]


def test_where_all_are_stale_what_contributes_is_enough() -> None:
    assert _computed(_batch([[4, 4], [4, 4]]), 3) == [3]
    assert _computed(_batch([[4, 4], [4, 4]])) == [0, 1]


def test_a_step_without_weight_computes_nothing() -> None:
    assert _computed(_batch([[5], [5]]).with_columns(sample_weights=torch.zeros(2)), 0) == []
