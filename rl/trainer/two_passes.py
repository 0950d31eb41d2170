"""Log-probabilities first, then any loss of them, then the gradients: for losses that one pass cannot compute.

Log-probabilities come from hidden states, and logits are made again in the backward; or from the model's own logits,
where those are more than a product or plain torch was asked for. The loss is the native form where it has one, else
its own call in torch.
"""

import torch
from torch import Tensor

from rl.algorithms.algorithm import LossFunction, LossSums, NativeLoss
from rl.core.batch import TrainBatch
from rl.ops.linear_logprobs import linear_token_logprobs
from rl.ops.logprobs import token_logprobs
from rl.ops.policy_loss import policy_loss
from rl.trainer.layout import Layout
from rl.trainer.loss_path import ForwardSettings
from rl.trainer.model import CausalModel


def two_passes(
    logprobs: Tensor, entropy: Tensor, batch: TrainBatch, loss: LossFunction, native: NativeLoss | None
) -> LossSums:
    """Run the backward of the loss of [T] log-probabilities; return its sums."""
    if native is None:
        sums, value = (each := loss(logprobs, entropy, batch)), each.loss
    else:
        counted = batch.token_weights > 0
        result = policy_loss(logprobs[counted], entropy[counted], native.tokens(batch), native.params)
        sums, value = native.sums(result.metrics, logprobs, batch), result.loss
    if value.requires_grad:
        value.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return sums


def logprobs_and_entropy(
    model: CausalModel, layout: Layout, counted: Tensor, settings: ForwardSettings, *, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies on the CPU with graph, [T] each, 0 where not `counted` ([T] bool).

    Where no logits exist, the backward adds the output layer's gradient to `model.head_gradient()` itself: chunk by
    chunk, without a second matrix of that size.

    Args:
        model: The model.
        layout: Of the counted tokens, on its device.
        counted: The tokens.
        settings: How.
        entropy_gradient: Whether the entropy has a graph too.
    """
    if settings.needs_logits:
        logits = model.logits_at(layout.tokens, layout.places, layout.position_ids, layout.mask)
        logprobs, entropy = token_logprobs(
            logits,
            layout.targets,
            settings.temperature,
            impl=settings.impl,
            consume_logits=True,
            entropy_gradient=entropy_gradient,
        )
    else:
        hidden = model.hidden_at(layout.tokens, layout.places, layout.position_ids, layout.mask)
        logprobs, entropy = linear_token_logprobs(
            hidden,
            model.head_weight,
            layout.targets,
            settings.temperature,
            grad_weight=model.head_gradient() if torch.is_grad_enabled() else None,
        )
        entropy = entropy if entropy_gradient else entropy.detach()
    return _spread(logprobs, layout.pairs, counted), _spread(entropy, layout.pairs, counted)


def _spread(values: Tensor, pairs: Tensor, counted: Tensor) -> Tensor:
    """Give each counted token the value of its pair."""
    by_token = values.cpu()[pairs]
    return by_token.new_zeros(counted.numel()).masked_scatter(counted, by_token)
