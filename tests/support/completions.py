"""Short ways to write completions and prompts in tests of environments and logs; no tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

from rl.core.types import Completion, FinishReason, Message, Prompt, VersionSpan
from rl.environments.base import Episode


def completion(text: str, finish: FinishReason = FinishReason.STOP) -> Completion:
    """A completion whose tokens are its bytes, sampled by version 0."""
    tokens = tuple(text.encode()) or (0,)
    return Completion(
        tokens=tokens,
        logprobs=(-0.5,) * len(tokens),
        finish_reason=finish,
        version_spans=(VersionSpan(0, 0, len(tokens)),),
        text=text,
    )


def text_prompt(text: str = "1+1=", metadata: Mapping[str, Any] | None = None, prompt_id: str = "p0") -> Prompt:
    """A raw-text prompt whose tokens are its bytes."""
    return Prompt(
        prompt_id=prompt_id,
        messages=(Message("text", text),),
        environment="math",
        metadata=metadata or {},
        token_ids=tuple(text.encode()),
    )


def episodes(completions: Sequence[Completion]) -> list[Episode]:
    """What an environment is asked about the first turn of these siblings."""
    return [Episode(sample, (), completion) for sample, completion in enumerate(completions)]
