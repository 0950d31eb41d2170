"""Builds a Completion from what an engine returned, and refuses what must never reach a loss.

A missing or non-finite log-probability is an engine fault: the request may be tried again, the value is never guessed.
"""

from collections.abc import Sequence

from rl.core.errors import CompletionError, DataError, InfraError
from rl.core.types import Completion, FinishReason, PolicyVersion, VersionSpan


def make_completion(
    request_id: str,
    tokens: Sequence[int],
    logprobs: Sequence[float | None],
    finish_reason: str | None,
    spans: Sequence[VersionSpan],
    text: str,
) -> Completion:
    """Check and assemble a completion.

    Args:
        request_id: For messages.
        tokens: Sampled ids.
        logprobs: One per token, of the sampled token; None where the engine reported none.
        finish_reason: The engine's word: "stop" or "length"; anything else is a failed request.
        spans: Who sampled which tokens.
        text: The decoded tokens without the stop token or stop string.

    Raises:
        CompletionError: the engine gave no token, lost or spoiled a log-probability.
        InfraError: it ended the request early.
    """
    if finish_reason not in (FinishReason.STOP.value, FinishReason.LENGTH.value):
        raise InfraError(f"request {request_id} ended with '{finish_reason}' after {len(tokens)} tokens; retry it")
    missing = [position for position, value in enumerate(logprobs) if value is None]
    if missing:
        raise CompletionError(f"request {request_id}: the engine reported no log-probability of token {missing[0]}")
    try:
        values = tuple(float(value) for value in logprobs if value is not None)
        return Completion(tuple(tokens), values, FinishReason(finish_reason), tuple(spans), text)
    except ValueError as error:
        raise CompletionError(f"request {request_id}: the engine returned an unusable completion: {error}") from error


def completion_budget(request_id: str, prompt_tokens: Sequence[int], max_new_tokens: int, max_model_len: int) -> int:
    """Return how many tokens may be sampled after a prompt.

    Raises:
        DataError: the prompt is empty or leaves no room in the context.
    """
    if not prompt_tokens:
        raise DataError(f"request {request_id}: an empty prompt cannot be completed")
    room = max_model_len - len(prompt_tokens)
    if room < 1:
        raise DataError(
            f"request {request_id}: prompt of {len(prompt_tokens)} tokens leaves no room in a context of "
            f"{max_model_len} tokens; a prompt may have {max_model_len - 1}"
        )
    return min(max_new_tokens, room)


def merge_spans(versions: Sequence[PolicyVersion]) -> tuple[VersionSpan, ...]:
    """Turn one version per token into contiguous spans."""
    spans: list[VersionSpan] = []
    for position, version in enumerate(versions):
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version, spans[-1].start, position + 1)
        else:
            spans.append(VersionSpan(version, position, position + 1))
    return tuple(spans)
