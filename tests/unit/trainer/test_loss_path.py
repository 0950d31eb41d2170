"""Which way is chosen, and what is said about it."""

from typing import Any

import pytest
from torch import Tensor

from rl.algorithms.algorithm import LossSums
from rl.core.batch import TrainBatch
from rl.core.metrics import Per
from rl.trainer.loss_path import ForwardSettings, Way, choose_path
from tests.support.losses import OPTIONS, objective

NATIVE = ForwardSettings(1.0, "native")
MASK = {"use_importance_sampling_correction": True, "truncated_importance_sampling_type": "seq-mask-tis"}
SEQUENCE = {"sequence_level_importance_ratios": True, "token_level_loss": False}


@pytest.mark.parametrize(
    ("options", "way", "is_native", "reason"),
    [
        ({}, Way.ONE_PASS, True, "one pass: loss and gradients of the output layer without logits"),
        (SEQUENCE, Way.TWO_PASSES, True, "two passes without logits: ratios are of whole sequences"),
        (MASK, Way.TWO_PASSES, False, "two passes without logits, loss in torch (SequenceMask has no native form)"),
    ],
)
def test_an_objective_goes_the_shortest_way_that_can_compute_it(
    options: dict[str, Any], way: Way, is_native: bool, reason: str
) -> None:
    path = choose_path(objective(**options), NATIVE)
    assert (path.way, path.native is not None, path.reason) == (way, is_native, reason)


class _LossOfAUser:
    """One that has never heard of native code."""

    uses_entropy = False

    def contributes(self, batch: TrainBatch) -> Tensor:
        return batch.sample_weights > 0

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: TrainBatch) -> LossSums:
        return LossSums((logprobs * batch.token_weights).sum(), Per.TOKENS, {})


def test_a_loss_that_offers_nothing_takes_two_passes() -> None:
    path = choose_path(_LossOfAUser(), NATIVE)
    assert (path.way, path.native) == (Way.TWO_PASSES, None)
    assert path.reason == "two passes without logits, loss in torch (_LossOfAUser offers no native form)"


@pytest.mark.parametrize("options", OPTIONS)
def test_plain_torch_and_a_head_that_is_no_matrix_use_the_models_logits(options: dict[str, Any]) -> None:
    loss = objective(**options)
    plain = choose_path(loss, ForwardSettings(1.0, "torch"))
    assert (plain.way, plain.native) == (Way.LOGITS, None)
    path = choose_path(loss, ForwardSettings(1.0, "native", head_fault="it has a bias"))
    assert path.way is Way.LOGITS
    assert path.reason.startswith("two passes over the model's own logits: it has a bias")
    assert (path.native is None) == ("loss in torch" in path.reason) == (options.items() >= MASK.items())
