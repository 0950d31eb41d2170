"""Log-probabilities of given tokens, and entropies, from logits.

One public function with two implementations of the same mathematics: `native` is the fused operator of csrc/loss,
`torch` is plain torch in float32 and serves as its reference, on every device and dtype. Sharded vocabularies and
hidden states are not handled here.

    logprobs, entropy = token_logprobs(logits, targets, temperature, impl="native", consume_logits=True)
"""

import math
from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rl.core.errors import ConfigError
from rl.ops.native_logprobs import native_token_logprobs

LogprobImpl = Literal["native", "torch"]

IGNORE_INDEX = -100
# Elements that the torch path casts to float32 at a time: 4 MB, which allocators reuse instead of returning.
_CHUNK_ELEMENTS = 2**20


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    impl: LogprobImpl,
    consume_logits: bool = False,
    entropy_gradient: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return log softmax(logits / temperature) at the targets, and the entropies of the rows.

    Rows whose target is -100 give log-probability 0 and no gradient; their entropy is that of the row. A logit of -inf
    has probability 0, and no gradient reaches it.

    Args:
        logits: [N, V]. native: float32 or bfloat16 on the CPU with adjacent columns; torch: any float.
        targets: [N] int64.
        temperature: the sampling temperature; finite and > 0.
        impl: native | torch.
        consume_logits: allow the native backward to write the gradient over `logits`: it saves an [N, V] tensor, and
            the logits must not be used after it. The torch path has no use for it.
        entropy_gradient: whether gradients flow through the entropy; otherwise it is a value without a graph.

    Returns:
        logprobs [N], entropy [N]: float32 (float64 when the torch path gets float64).

    Raises:
        ConfigError: temperature or impl is not usable.
        FatalError: the native library is missing.
    """
    if not (math.isfinite(temperature) and temperature > 0):
        raise ConfigError(
            f"temperature={temperature} cannot be trained on: log-probabilities need a finite temperature > 0; "
            "greedy decoding (0) is for validation only"
        )
    if impl == "native":
        logprobs, entropy = native_token_logprobs(logits, targets, temperature, consume_logits=consume_logits)
        return logprobs, entropy if entropy_gradient else entropy.detach()
    if impl == "torch":
        return _torch_token_logprobs(logits, targets, temperature, entropy_gradient)
    raise ConfigError(f"policy.logprob_impl={impl!r} is unknown; use native or torch")


def _torch_token_logprobs(
    logits: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Work in row chunks that the backward computes again, so that no [N, V] float32 tensor is kept."""
    chunks = []
    size = max(1, _CHUNK_ELEMENTS // max(1, logits.shape[1]))
    for rows, row_targets in zip(torch.split(logits, size), torch.split(targets, size), strict=True):
        if torch.is_grad_enabled() and logits.requires_grad:
            chunk = checkpoint(
                _chunk_logprobs,
                rows,
                row_targets,
                temperature,
                entropy_gradient,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        else:
            chunk = _chunk_logprobs(rows, row_targets, temperature, entropy_gradient)
        chunks.append(chunk)
    logprobs, entropies = zip(*chunks, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk_logprobs(
    logits: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    # Cuts the gradient of masked-out logits, which softmax's formula leaves at the target.
    scores = torch.where(scores == -math.inf, -math.inf, scores)
    log_p = torch.log_softmax(scores, dim=-1)
    is_ignored = targets == IGNORE_INDEX
    at_target = log_p.gather(1, targets.masked_fill(is_ignored, 0).unsqueeze(1)).squeeze(1)
    logprobs = torch.where(is_ignored, torch.zeros_like(at_target), at_target)
    if not entropy_gradient:
        log_p = log_p.detach()
    # 0 * -inf is NaN in value and gradient: impossible tokens must not enter the product.
    entropy = -(log_p.exp() * torch.where(log_p == -math.inf, 0.0, log_p)).sum(dim=-1)
    return logprobs, torch.where(is_ignored, entropy.detach(), entropy)
