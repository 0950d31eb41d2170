"""Loss and gradients of a micro-batch in one pass: the native form of a token-level loss beside the output layer.

The body of the model keeps its graph; the output layer's two gradients come with the loss, chunk by chunk, and no
logits of the whole micro-batch ever exist.
"""

from dataclasses import replace

import torch
from torch import Tensor

from rl.algorithms.algorithm import LossSums, NativeLoss
from rl.core.batch import TrainBatch
from rl.ops.linear_logprobs import LinearPlan, linear_policy_loss_
from rl.ops.policy_loss import PolicyLossTokens
from rl.trainer.layout import Layout
from rl.trainer.model import CausalModel


def one_pass(model: CausalModel, layout: Layout, batch: TrainBatch, native: NativeLoss, temperature: float) -> LossSums:
    """Add the gradients of the loss sum to the parameters; return the sums, without graph.

    Args:
        model: The model.
        layout: Of the micro-batch's tokens with weight.
        batch: The micro-batch.
        native: Its loss.
        temperature: Logits are divided by it.
    """
    hidden = model.hidden_at(layout.tokens, layout.places, layout.position_ids, layout.mask)
    tokens, offsets = _by_pair(native.tokens(batch), layout.pairs, layout.targets.numel(), model.device)
    result = linear_policy_loss_(
        hidden.detach(),
        model.head_weight.detach(),
        layout.targets,
        temperature,
        tokens,
        native.params,
        grad_weight=model.head_gradient(),
        plan=LinearPlan(host_row_offsets=offsets),
    )
    if hidden.requires_grad:
        hidden.backward(result.grad_hidden)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    logprobs = torch.zeros(batch.num_tokens)
    logprobs[batch.token_weights > 0] = result.logprobs.cpu()[layout.pairs]
    return native.sums(result.metrics, logprobs, batch)


def _by_pair(
    tokens: PolicyLossTokens, pairs: Tensor, num_pairs: int, device: torch.device
) -> tuple[PolicyLossTokens, Tensor]:
    """Sort tokens by their pair, in the order of the batch within each; return them on the device, and where pairs end.

    Siblings that share a prefix and the token after it look at one pair.
    """
    order = torch.argsort(pairs, stable=True)
    counts = torch.bincount(pairs, minlength=num_pairs)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])

    def moved(column: Tensor | None) -> Tensor | None:
        return None if column is None else column[order].to(device)

    by_pair = replace(
        tokens,
        generation_logprobs=tokens.generation_logprobs[order].to(device),
        advantages=tokens.advantages[order].to(device),
        shares=tokens.shares[order].to(device),
        weights=tokens.weights[order].to(device),
        prev_logprobs=moved(tokens.prev_logprobs),
        reference_logprobs=moved(tokens.reference_logprobs),
        nll_coefs=moved(tokens.nll_coefs),
        row_offsets=offsets.to(device),
    )
    return by_pair, offsets
