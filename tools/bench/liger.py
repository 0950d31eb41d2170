"""Liger-Kernel's cross entropy as a contender, where that package is installed; nothing of ours needs it."""

import importlib
import importlib.util
from collections.abc import Callable

from torch import Tensor

_PACKAGE = "liger_kernel"


def cross_entropy() -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return log-probabilities by Liger's loss, whose forward writes gradients over the logits; None: not installed."""
    if importlib.util.find_spec(_PACKAGE) is None:
        return None
    loss = importlib.import_module(f"{_PACKAGE}.transformers").LigerCrossEntropyLoss(reduction="none")

    def logprobs(logits: Tensor, targets: Tensor) -> Tensor:
        return -loss(logits, targets).float()

    return logprobs
