"""Which way a micro-batch goes from hidden states to gradients, and why.

    one pass     hidden states, then loss and both gradients of the output layer chunk by chunk; for token-level losses
                 with a native form
    two passes   log-probabilities from hidden states (no logits), the loss, and the gradients with logits made again
    logits       the model's own logits, where they are more than a product, or where plain torch was asked for

Pure choice; what each does is in `one_pass` and `two_passes`.
"""

import enum
from dataclasses import dataclass

from rl.algorithms.algorithm import LossFunction, NativeLoss, OffersNativeLoss
from rl.ops.logprobs import LogprobImpl
from rl.ops.policy_loss import RatioKind


@dataclass(frozen=True)
class ForwardSettings:
    """How sequences go through a model.

    Attributes:
        temperature: Sampling temperature; logits are divided by it.
        impl: Native operators or plain torch.
        head_fault: Why the model's logits are not a product of hidden states and a matrix; None where they are.
    """

    temperature: float
    impl: LogprobImpl
    head_fault: str | None = None

    @property
    def needs_logits(self) -> bool:
        """Whether the model's own logits are computed."""
        return self.impl == "torch" or self.head_fault is not None


class Way(enum.Enum):
    """One of three ways."""

    ONE_PASS = "one pass"
    TWO_PASSES = "two passes"
    LOGITS = "logits"


@dataclass(frozen=True)
class LossPath:
    """What was chosen.

    Attributes:
        way: The way.
        native: The native form of the loss; None where it is computed in torch.
        reason: Why, in words for a log.
    """

    way: Way
    native: NativeLoss | None
    reason: str


def choose_path(loss: LossFunction, settings: ForwardSettings) -> LossPath:
    """Choose for one loss; the same loss and settings lead to the same path."""
    if settings.impl == "torch":
        return LossPath(Way.LOGITS, None, "plain torch: logits, log-probabilities and loss (policy.logprob_impl=torch)")
    offer = loss.native() if isinstance(loss, OffersNativeLoss) else f"{type(loss).__name__} offers no native form"
    native, in_torch = (None, f", loss in torch ({offer})") if isinstance(offer, str) else (offer, "")
    if settings.head_fault is not None:
        return LossPath(Way.LOGITS, native, f"two passes over the model's own logits: {settings.head_fault}{in_torch}")
    if native is None:
        return LossPath(Way.TWO_PASSES, None, f"two passes without logits{in_torch}")
    if native.params.ratio is RatioKind.SEQUENCE:
        return LossPath(Way.TWO_PASSES, native, "two passes without logits: ratios are of whole sequences")
    return LossPath(Way.ONE_PASS, native, "one pass: loss and gradients of the output layer without logits")
