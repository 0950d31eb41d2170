"""Prompts to token ids: the chat template and the tokenizer live here and nowhere else.

Completions are never tokenized again; only prompts are. How a conversation goes on from turn to turn is the business
of `conversation.py`, what of it the assistant said that of `assistant_mask.py`; both ask this module.

    tokenizer = PromptTokenizer(model_path, policy.tokenizer, data, trust_remote_code=False)
    tokenizer.encode(row.messages)
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from jinja2 import TemplateError
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from rl.core.errors import ConfigError, DataError
from rl.core.types import Message
from rl.data.columns import PLAIN_TEXT
from rl.data.config import DataConfig

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


class TokenizerSettings(Protocol):
    """What is read of the `policy.tokenizer` section."""

    @property
    def chat_template(self) -> str | None:
        """Jinja template that replaces the tokenizer's own."""
        ...


class PromptTokenizer:
    """Applies the chat template, or tokenizes the text as it is."""

    def __init__(
        self,
        model_path: str | Path,
        tokenizer: TokenizerSettings,
        data: DataConfig,
        tokenizer_path: str | Path | None = None,
        *,
        trust_remote_code: bool,
    ) -> None:
        """Load the tokenizer.

        Args:
            model_path: Local model folder; its generation settings name the model's own stop tokens.
            tokenizer: The `policy.tokenizer` section.
            data: The `data` section.
            tokenizer_path: Local folder of another tokenizer; None = the model's own.
            trust_remote_code: Run tokenizer code found in the folder.

        Raises:
            ConfigError: no tokenizer in the folder, or no chat template although data.prompt_format is chat.
        """
        self.path = Path(model_path if tokenizer_path is None else tokenizer_path)
        self._raw = data.prompt_format == "raw"
        self._system_prompt = data.system_prompt
        self._tokenizer = _load(self.path, trust_remote_code)
        if tokenizer.chat_template is not None:
            self._tokenizer.chat_template = tokenizer.chat_template
        if self._raw and self._system_prompt is not None:
            raise ConfigError(
                "data.system_prompt needs data.prompt_format: chat, but it is raw; put the text into the prompts"
            )
        if not self._raw and not self._tokenizer.chat_template:
            raise ConfigError(
                f"the tokenizer in {self.path} has no chat template, which data.prompt_format: chat needs; "
                "use data.prompt_format: raw, or give a template in policy.tokenizer.chat_template"
            )
        self.stop_token_ids = _stop_token_ids(Path(model_path), self._tokenizer.eos_token_id)
        marks = (number for number, token in self._tokenizer.added_tokens_decoder.items() if token.special)
        self._special = frozenset([*self.stop_token_ids, *self._tokenizer.all_special_ids, *marks])

    def messages(self, row_messages: Sequence[Message]) -> tuple[Message, ...]:
        """Return the conversation that the model sees.

        Raw format: the one plain text. Chat format: the system prompt, then the row, in which plain text is the user's.

        Raises:
            DataError: a conversation of several messages in raw format, or two system messages.
        """
        if self._raw:
            if len(row_messages) != 1:
                raise DataError(
                    f"data.prompt_format: raw takes one text, but this row has {len(row_messages)} messages; use chat"
                )
            return (Message(PLAIN_TEXT, row_messages[0].content),)
        chat = tuple(Message("user", m.content) if m.role == PLAIN_TEXT else m for m in row_messages)
        if self._system_prompt is None:
            return chat
        if chat[0].role == "system":
            raise DataError(
                "the row begins with a system message of its own, and data.system_prompt would put a second one before "
                "it; leave one of them out"
            )
        return (Message("system", self._system_prompt), *chat)

    def encode(self, row_messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the token ids of a prompt; in chat format they end with the generation prompt.

        Raises:
            DataError: the chat template refuses the messages, a message is no Unicode text, or nothing is left to
                condition on.
        """
        messages = self.messages(row_messages)
        if self._raw:
            _check_unicode(messages[0])
        ids = self._encode_text(messages[0].content) if self._raw else self._encode_chat(messages)
        if not ids:
            raise DataError(f"the prompt {messages[0].content!r:.80} has no tokens")
        return ids

    def render(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        """Return the text that the chat template writes for a conversation as it stands.

        Raises:
            DataError: the template refuses it, or a message is no Unicode text.
        """
        return str(self._rendered(messages, add_generation_prompt=generation_prompt)[0])

    def render_marked(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]] | None:
        """Return the text of a conversation and the characters [start, end) that the template marks as generated.

        None when it has no {% generation %} marks. Raises DataError as `render`.
        """
        if not _MARKED.search(self._tokenizer.get_chat_template()):
            return None
        text, spans = self._rendered(messages, return_assistant_tokens_mask=True)
        return text, spans

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a piece of text, without special tokens of the tokenizer's own."""
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode_after(self, token: int, text: str) -> tuple[int, ...]:
        """Return the token ids that `text` has after a special token."""
        ids = self.encode_text(self.decode([token]) + text)
        return ids[1:] if ids[:1] == (token,) else self.encode_text(text)

    def encode_spans(self, text: str) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
        """Return the token ids of a text, and the characters [start, end) of each."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return tuple(encoded["input_ids"]), [(start, end) for start, end in encoded["offset_mapping"]]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def is_special(self, token: int) -> bool:
        """Whether a token is a mark of the format (an end of turn, say) rather than text."""
        return token in self._special

    def _encode_text(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text)["input_ids"])

    def _encode_chat(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        # The template writes the special tokens itself.
        return self.encode_text(self.render(messages, generation_prompt=True))

    def _rendered(self, messages: Sequence[Message], **options: bool) -> tuple[str, list[tuple[int, int]]]:
        for message in messages:
            _check_unicode(message)
        chat = [{"role": message.role, "content": message.content} for message in messages]
        try:
            texts, spans = render_jinja_template(
                conversations=[chat],
                chat_template=self._tokenizer.get_chat_template(),
                **options,
                **self._tokenizer.special_tokens_map,
            )
        except (TemplateError, ValueError, TypeError) as error:
            roles = ", ".join(message.role for message in messages)
            raise DataError(f"the chat template refuses a conversation with the roles {roles}: {error}") from error
        return texts[0], spans[0] if spans else []


def _check_unicode(message: Message) -> None:
    """Refuse half of a surrogate pair, at which tokenizers fail with errors of their own."""
    try:
        message.content.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"character {error.start} of the {message.role} message is {message.content[error.start]!a}, half of a "
            "surrogate pair and no Unicode text"
        ) from error


def _load(path: Path, trust_remote_code: bool) -> Any:
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"cannot load a tokenizer from {path}: {error} (own code needs policy.trust_remote_code=true)"
        ) from error


def _stop_token_ids(model_path: Path, eos_token_id: int | None) -> tuple[int, ...]:
    """Return the end tokens of the model's generation settings, of its configuration and of its tokenizer."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        file = model_path / name
        value = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        found += value if isinstance(value, list) else [] if value is None else [value]
    if eos_token_id is not None:
        found.append(eos_token_id)
    return tuple(dict.fromkeys(found))
