"""Log-probabilities of given tokens, and entropies, from logits.

Each public function has two implementations of the same mathematics: `native` is the fused operator of csrc/loss,
`torch` is plain torch in float32 and serves as its reference, on every device and dtype. Sharded vocabularies and
hidden states are not handled here.

    logprobs, entropy = token_logprobs(logits, targets, temperature, impl="native", consume_logits=True)

Over the support of a sampler that cut its distribution:

    thresholds = logits_thresholds(logits, top_k=50, top_p=0.95, temperature=temperature, impl="native")
    logprobs, entropy = token_logprobs(logits, targets, temperature, impl="native", thresholds=thresholds)
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rl.core.errors import ConfigError
from rl.ops.native_logprobs import native_logits_threshold, native_token_logprobs

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
    thresholds: Tensor | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log softmax(logits / temperature) at the targets, and the entropies of the rows.

    Rows whose target is -100 give log-probability 0 and no gradient; their entropy is that of the row. A logit of -inf
    has probability 0, and no gradient reaches it.

    Args:
        logits: [N, V]. native: float32, bfloat16 or float16 with adjacent columns, on the CPU or a GPU; torch: any
            float.
        targets: [N] int64.
        temperature: the sampling temperature; finite and > 0.
        impl: native | torch.
        consume_logits: allow the native backward to write the gradient over `logits`: it saves an [N, V] tensor, and
            the logits must not be used after it. The torch path has no use for it.
        entropy_gradient: whether gradients flow through the entropy; otherwise it is a value without a graph.
        thresholds: [N] float32; a logit below its row's threshold counts as -inf (see `logits_thresholds`).
        vocab_size: columns from here on are padding and count as -inf; None = there are none.

    Returns:
        logprobs [N], entropy [N]: float32 (float64 when the torch path gets float64).

    Raises:
        ConfigError: temperature or impl is not usable.
        FatalError: the native library is missing.
    """
    _check_temperature(temperature)
    if impl == "native":
        logprobs, entropy = native_token_logprobs(
            logits, targets, temperature, thresholds=thresholds, vocab_size=vocab_size, consume_logits=consume_logits
        )
        return logprobs, entropy if entropy_gradient else entropy.detach()
    if impl == "torch":
        return _torch_token_logprobs(logits, targets, _Reading(temperature, vocab_size), thresholds, entropy_gradient)
    raise _unknown(impl)


def logits_thresholds(
    logits: Tensor, *, top_k: int | None, top_p: float, temperature: float, impl: LogprobImpl
) -> Tensor | None:
    """Return the smallest logit of each row that top-k / top-p sampling keeps; None where neither cuts anything.

    top-k first, then the fewest largest of what it left whose probabilities reach `top_p`, at least one. Logits equal
    to the threshold all stay. No gradient flows through it.

    Args:
        logits: [N, V], before the temperature; of a padded vocabulary, without the padding.
        top_k: None = off.
        top_p: in (0, 1]; 1 = off.
        temperature: of the probabilities that top-p adds up.
        impl: native | torch.

    Returns:
        [N] float32, or None.

    Raises:
        ConfigError: an argument is not usable.
        FatalError: the native library is missing.
    """
    _check_temperature(temperature)
    if not 0 < top_p <= 1:
        raise ConfigError(f"top_p={top_p} is no share of probability; use a number in (0, 1], 1 = off")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k={top_k} leaves no token; use a number > 0, or null = off")
    if top_k is None and top_p == 1:
        return None
    if impl == "native":
        return native_logits_threshold(logits, top_k or 0, top_p, temperature)
    if impl == "torch":
        return _torch_thresholds(logits.detach(), top_k, top_p, temperature)
    raise _unknown(impl)


@dataclass(frozen=True)
class _Reading:
    """How the torch path reads logits."""

    temperature: float
    vocab_size: int | None


def _check_temperature(temperature: float) -> None:
    if not (math.isfinite(temperature) and temperature > 0):
        raise ConfigError(
            f"temperature={temperature} cannot be trained on: log-probabilities need a finite temperature > 0; "
            "greedy decoding (0) is for validation only"
        )


def _unknown(impl: str) -> ConfigError:
    return ConfigError(f"policy.logprob_impl={impl!r} is unknown; use native or torch")


def _torch_token_logprobs(
    logits: Tensor, targets: Tensor, reading: _Reading, thresholds: Tensor | None, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Work in row chunks that the backward computes again, so that no [N, V] float32 tensor is kept."""
    chunks = []
    size = max(1, _CHUNK_ELEMENTS // max(1, logits.shape[1]))
    cuts = torch.full_like(targets, -math.inf, dtype=torch.float32) if thresholds is None else thresholds
    pieces = torch.split(logits, size), torch.split(targets, size), torch.split(cuts, size)
    for rows in zip(*pieces, strict=True):
        if torch.is_grad_enabled() and logits.requires_grad:
            chunk = checkpoint(
                _chunk_logprobs, *rows, reading, entropy_gradient, use_reentrant=False, preserve_rng_state=False
            )
        else:
            chunk = _chunk_logprobs(*rows, reading, entropy_gradient)
        chunks.append(chunk)
    logprobs, entropies = zip(*chunks, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk_logprobs(
    logits: Tensor, targets: Tensor, cuts: Tensor, reading: _Reading, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)) / reading.temperature
    is_out = (scores == -math.inf) | (logits < cuts.unsqueeze(1))
    if reading.vocab_size is not None:
        is_out[:, reading.vocab_size :] = True
    # Cuts the gradient of masked-out logits too, which softmax's formula leaves at the target.
    log_p = torch.log_softmax(torch.where(is_out, -math.inf, scores), dim=-1)
    is_ignored = targets == IGNORE_INDEX
    at_target = log_p.gather(1, targets.masked_fill(is_ignored, 0).unsqueeze(1)).squeeze(1)
    logprobs = torch.where(is_ignored, torch.zeros_like(at_target), at_target)
    if not entropy_gradient:
        log_p = log_p.detach()
    # 0 * -inf is NaN in value and gradient: impossible tokens must not enter the product.
    entropy = -(log_p.exp() * torch.where(log_p == -math.inf, 0.0, log_p)).sum(dim=-1)
    return logprobs, torch.where(is_ignored, entropy.detach(), entropy)


def _torch_thresholds(logits: Tensor, top_k: int | None, top_p: float, temperature: float) -> Tensor:
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    ordered = scores.sort(dim=-1, descending=True).values
    if top_k is not None and top_k < ordered.shape[1]:
        last = ordered[:, top_k - 1 : top_k]
        ordered = torch.where(ordered < last, -math.inf, ordered)
    if top_p < 1:
        mass_before = torch.softmax(ordered.double() / temperature, dim=-1).cumsum(-1).roll(1, dims=-1)
        mass_before[:, 0] = 0
        ordered = torch.where(mass_before < top_p, ordered, math.inf)
    is_kept = (ordered > -math.inf) & (ordered < math.inf)
    lowest = torch.where(is_kept, ordered, math.inf).amin(dim=-1)
    nothing_cut = is_kept.sum(-1) == (scores > -math.inf).sum(-1)
    return torch.where(nothing_cut | (lowest == math.inf), -math.inf, lowest).to(torch.float32)
