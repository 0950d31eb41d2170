"""Draws one token from logits, with the log-probability of the distribution that it was drawn from. Pure torch."""

import torch

from rl.generation.generator import SamplingParams


def sample_token(logits: torch.Tensor, params: SamplingParams, generator: torch.Generator) -> tuple[int, float]:
    """Sample a token.

    Args:
        logits: [vocabulary] float32.
        params: Temperature, top_k and top_p apply in this order; temperature 0 takes the most likely token, whose
            log-probability is then that of the unscaled logits.
        generator: Advanced by one draw when the temperature is positive.

    Returns:
        The token id and its log-probability.
    """
    if params.temperature == 0:
        token = int(logits.argmax())
        return token, float(torch.log_softmax(logits, dim=-1)[token])
    logprobs = torch.log_softmax(_filtered(logits / params.temperature, params.top_k, params.top_p), dim=-1)
    token = int(torch.multinomial(logprobs.exp(), 1, generator=generator))
    return token, float(logprobs[token])


def _filtered(logits: torch.Tensor, top_k: int | None, top_p: float) -> torch.Tensor:
    if top_k is not None and top_k < logits.numel():
        smallest = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(descending=True)
        before = ordered.softmax(dim=-1).cumsum(dim=-1) - ordered.softmax(dim=-1)
        logits = logits.index_fill(0, order[before >= top_p], -torch.inf)
    return logits
