"""Whole conversations as token ids with a mask over what the assistant says: data for supervised objectives.

A conversation is tokenized once. Where its template marks the assistant's text ({% generation %}), the marks decide;
otherwise the text of a message is the difference between the renders before and after it, and the pieces must make up
the whole, or it is an error: a template that rewrites history has no such difference. The mask comes from the text,
never from token values, so a pad token that is also the end token changes nothing.

    encoded = encode_conversation(tokenizer, messages, trained=assistant_messages(messages))
    encoded.token_ids, encoded.mask
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from rl.core.errors import DataError
from rl.core.types import Message

# Characters [start, end) of a text.
Span = tuple[int, int]


class SpanTokenizer(Protocol):
    """The part of a PromptTokenizer that is needed here."""

    def render(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        """Return the text that the chat template writes."""
        ...

    def render_marked(self, messages: Sequence[Message]) -> tuple[str, list[Span]] | None:
        """Return the text and the assistant's spans in it; None when the template marks none."""
        ...

    def encode_spans(self, text: str) -> tuple[tuple[int, ...], list[Span]]:
        """Return the token ids of a text and the characters of each."""
        ...

    def is_special(self, token: int) -> bool:
        """Whether a token is a mark of the format rather than text."""
        ...


@dataclass(frozen=True)
class EncodedConversation:
    """A tokenized conversation.

    Attributes:
        token_ids: [T].
        mask: [T], true for the tokens to be learned.
    """

    token_ids: tuple[int, ...]
    mask: tuple[bool, ...]


def assistant_messages(messages: Sequence[Message]) -> list[int]:
    """Return the places of the assistant's messages."""
    return [place for place, message in enumerate(messages) if message.role == "assistant"]


def encode_conversation(
    tokenizer: SpanTokenizer, messages: Sequence[Message], trained: Collection[int]
) -> EncodedConversation:
    """Tokenize a conversation and mark what the assistant says in some of its messages.

    Args:
        tokenizer: Template and vocabulary.
        messages: The conversation; what is in it before the first of `trained` is context, whoever said it.
        trained: Places of the messages to be learned; all of them the assistant's.

    Returns:
        Its ids and mask. The header of a message is never marked, its end token is, what follows that token is not.

    Raises:
        DataError: a place is no assistant's message, the template refuses the messages, or the pieces do not make up
            the whole.
    """
    answers = assistant_messages(messages)
    wrong = sorted(set(trained) - set(answers))
    if wrong:
        raise DataError(f"message {wrong[0]} of {len(messages)} cannot be learned: the assistant's are {answers}")
    marked = tokenizer.render_marked(messages)
    text, spans = _by_difference(tokenizer, messages, answers) if marked is None else marked
    if len(spans) != len(answers):
        raise DataError(f"the chat template marks {len(spans)} spans for {len(answers)} messages of the assistant")
    token_ids, characters = tokenizer.encode_spans(text)
    mask = [False] * len(token_ids)
    for answer, (start, end) in zip(answers, spans, strict=True):
        if answer in trained:
            _mark(
                mask, [place for place, (a, b) in enumerate(characters) if start <= a < b <= end], token_ids, tokenizer
            )
    return EncodedConversation(token_ids, tuple(mask))


def _mark(mask: list[bool], places: Sequence[int], token_ids: Sequence[int], tokenizer: SpanTokenizer) -> None:
    """Mark the tokens at `places` up to their last end token: a policy says nothing after it."""
    ends = [number for number, place in enumerate(places) if tokenizer.is_special(token_ids[place])]
    for place in places[: ends[-1] + 1] if ends else places:
        mask[place] = True


def _by_difference(
    tokenizer: SpanTokenizer, messages: Sequence[Message], answers: Sequence[int]
) -> tuple[str, list[Span]]:
    whole = tokenizer.render(messages, generation_prompt=False)
    spans = []
    for place in answers:
        opening = tokenizer.render(messages[:place], generation_prompt=True)
        closed = tokenizer.render(messages[: place + 1], generation_prompt=False)
        if not (whole.startswith(closed) and closed.startswith(opening)):
            raise DataError(
                f"message {place}: the chat template writes it differently as an answer, as the last message and as "
                "a part of the whole conversation, so its tokens cannot be told; use a template with {% generation %}"
            )
        spans.append((len(opening), len(closed)))
    bounds = [0, *(bound for span in spans for bound in span), len(whole)]
    if any(start > end for start, end in pairwise(bounds)):
        raise DataError(f"the pieces {spans} of the conversation do not make up its {len(whole)} characters")
    return whole, spans
