"""Conversations of several turns as token ids: what was sampled stays as it is, the template adds what stands between.

The policy must be trained on the very ids that it sampled, after the very ids that it saw. So a completion is never
tokenized again. The chat template is asked for the text of the whole conversation; what it writes after the sampled
text (end of turn, separators, the environment's messages, the generation prompt) is tokenized alone and appended.
That needs a template which writes the history as it was. One that rewrites it (drops old reasoning, say) is an error,
or begins a fork: a sequence of its own, over the whole conversation as the template writes it now.

It renders and tokenizes nothing itself: see `chat.py`. Whole conversations without samples: see `assistant_mask.py`.

    conversations = Conversations(tokenizer, is_raw=False, rewritten_history="error")
    conversation = conversations.begin(prompt)
    conversation = conversations.follow(conversation, completion, (Message("tool", "4"),))
    conversation.token_ids     # the prompt of the second turn
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from rl.core.errors import DataError
from rl.core.types import Completion, FinishReason, Message, Prompt

# Stands for an answer when the template is asked what it writes after one.
_ANSWER = "ANSWER-OF-THE-ASSISTANT"
_SHOWN = 40


class TurnTokenizer(Protocol):
    """The part of a PromptTokenizer that is needed here."""

    def render(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        """Return the text that the chat template writes."""
        ...

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a piece of text."""
        ...

    def encode_after(self, token: int, text: str) -> tuple[int, ...]:
        """Return the token ids that `text` has after a special token."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        ...

    def is_special(self, token: int) -> bool:
        """Whether a token is a mark of the format rather than text."""
        ...


@dataclass(frozen=True)
class Conversation:
    """What the policy has before it at one turn.

    Attributes:
        prompt_id: The dataset row that it began with.
        turn: Turns so far.
        messages: The conversation, without the answer that comes next.
        token_ids: The same as the policy sees it.
        text: The same as the template writes it, with the generation prompt; None where nobody needed it yet.
        is_forked: The history was rewritten: `token_ids` do not begin with those of the turn before.
        is_drifted: The template writes the last answer with other outer whitespace, or another end, than was sampled.
            The sampled ids stand.
    """

    prompt_id: str
    turn: int
    messages: tuple[Message, ...]
    token_ids: tuple[int, ...]
    text: str | None = None
    is_forked: bool = False
    is_drifted: bool = False


@dataclass(frozen=True)
class _Answer:
    """The text of a completion: what was said, and the special token that ended it ("" when none did)."""

    said: str
    ending: str


class Conversations:
    """Leads conversations from turn to turn.

    Args:
        tokenizer: Template and vocabulary.
        is_raw: There is no template: messages are appended as plain text.
        rewritten_history: What happens when the template rewrites the history.
    """

    def __init__(self, tokenizer: TurnTokenizer, *, is_raw: bool, rewritten_history: Literal["error", "fork"]) -> None:
        self._tokenizer = tokenizer
        self._is_raw = is_raw
        self._forks = rewritten_history == "fork"

    def begin(self, prompt: Prompt) -> Conversation:
        """Return the conversation of a first turn."""
        return Conversation(prompt.prompt_id, 0, prompt.messages, prompt.token_ids)

    def follow(self, conversation: Conversation, completion: Completion, messages: Sequence[Message]) -> Conversation:
        """Return the conversation of the next turn.

        Args:
            conversation: Of the turn that `completion` answers.
            completion: What was sampled; its ids are used as they are.
            messages: What the environment says next.

        Raises:
            DataError: there are no messages, the template refuses them or leaves them out, or it rewrites the history
                and data.rewritten_history is error.
        """
        if not messages:
            where = f"prompt {conversation.prompt_id} turn {conversation.turn}"
            raise DataError(f"{where}: the environment goes on without a message; it must answer or be done")
        messages = tuple(Message(message.role, _whole_characters(message.content)) for message in messages)
        if not self._is_raw:
            return self._follow_template(conversation, completion, messages)
        seen = (*conversation.token_ids, *completion.tokens)
        added = self._tokenizer.encode_text("".join(message.content for message in messages))
        history = (*conversation.messages, Message("assistant", completion.text), *messages)
        return Conversation(conversation.prompt_id, conversation.turn + 1, history, (*seen, *added))

    def _follow_template(
        self, conversation: Conversation, completion: Completion, messages: tuple[Message, ...]
    ) -> Conversation:
        before = conversation.text
        if before is None:
            before = self._tokenizer.render(conversation.messages, generation_prompt=True)
        answer = self._answer(completion)
        seen = before + answer.said + answer.ending
        whole, rest = "", None
        for content in _contents(answer, completion):
            history = (*conversation.messages, Message("assistant", content), *messages)
            whole = self._tokenizer.render(history, generation_prompt=True)
            if whole.startswith(seen):
                rest = whole.removeprefix(seen)
                break
        self._check_heard(conversation, history, messages, whole)
        is_drifted = rest is None
        if rest is None and whole.startswith(before):
            rest = self._drifted_rest(conversation, answer, messages, whole.removeprefix(before))
        if rest is None and not self._forks:
            raise _rewritten(conversation, seen, whole)
        following = Conversation(conversation.prompt_id, conversation.turn + 1, history, (), whole)
        if rest is None:
            return replace(following, token_ids=self._tokenizer.encode_text(whole), is_forked=True)
        added = self._encode_rest(completion, rest)
        token_ids = (*conversation.token_ids, *completion.tokens, *added)
        return replace(following, token_ids=token_ids, is_drifted=is_drifted)

    def _answer(self, completion: Completion) -> _Answer:
        last = completion.tokens[-1]
        if completion.finish_reason is FinishReason.STOP and self._tokenizer.is_special(last):
            return _Answer(self._tokenizer.decode(completion.tokens[:-1]), self._tokenizer.decode([last]))
        return _Answer(self._tokenizer.decode(completion.tokens), "")

    def _drifted_rest(
        self, conversation: Conversation, answer: _Answer, messages: tuple[Message, ...], tail: str
    ) -> str | None:
        """Return what follows an answer that the template trims or ends in its own way; None when it does more.

        `tail` is what the template writes after the generation prompt. What it writes after an answer shows with an
        answer that needs no trimming.
        """
        plain = (*conversation.messages, Message("assistant", _ANSWER), *messages)
        _, found, rest = self._tokenizer.render(plain, generation_prompt=True).rpartition(_ANSWER)
        said = answer.said
        if not found or tail not in {kept + rest for kept in (said, said.rstrip(), said.lstrip(), said.strip())}:
            return None
        return rest.removeprefix(answer.ending)

    def _check_heard(
        self, conversation: Conversation, history: tuple[Message, ...], messages: tuple[Message, ...], whole: str
    ) -> None:
        """Refuse a template that passes over the environment's messages, as some do with roles that they do not know.

        One that only writes them in its own way (as JSON, say) is fine.
        """
        if all(message.content.strip() in whole for message in messages):
            return
        if whole == self._tokenizer.render(history[: -len(messages)], generation_prompt=True):
            roles = ", ".join(sorted({message.role for message in messages}))
            raise DataError(
                f"prompt {conversation.prompt_id} turn {conversation.turn}: the chat template leaves out the "
                f"environment's messages, whose role is {roles}; use a template that knows it, or another role"
            )

    def _encode_rest(self, completion: Completion, rest: str) -> tuple[int, ...]:
        """Tokenize what follows a completion. Some tokenizers write the start of a text differently from its middle;
        after a special token the two are the same as in the whole, for it always splits.
        """
        last = completion.tokens[-1]
        if self._tokenizer.is_special(last):
            return self._tokenizer.encode_after(last, rest)
        return self._tokenizer.encode_text(rest)


def _contents(answer: _Answer, completion: Completion) -> Iterator[str]:
    """Yield what the assistant's message may be: up to a stop string that the template writes itself, or all of it."""
    is_cut = completion.finish_reason is FinishReason.STOP and not answer.ending
    if is_cut and completion.text != answer.said and answer.said.startswith(completion.text):
        yield completion.text
    yield answer.said


def _whole_characters(text: str) -> str:
    """Replace halves of surrogate pairs, which a model can make an environment repeat and no tokenizer takes."""
    return text.encode(errors="replace").decode()


def _rewritten(conversation: Conversation, seen: str, whole: str) -> DataError:
    place = len(os.path.commonprefix([seen, whole]))
    return DataError(
        f"prompt {conversation.prompt_id} turn {conversation.turn}: the chat template rewrites the history. Character "
        f"{place} begins {seen[place : place + _SHOWN]!r} as the policy saw and sampled it, but "
        f"{whole[place : place + _SHOWN]!r} in the next turn's prompt; use a template that keeps the history, or set "
        "data.rewritten_history: fork to train such turns as sequences of their own"
    )
