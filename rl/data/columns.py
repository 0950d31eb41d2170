"""Turn one record of a dataset (a mapping of columns) into a Row, with errors that show the record.

It knows no file format and no tokenizer.
"""

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl.core.errors import ConfigError, DataError
from rl.core.types import Message

PLAIN_TEXT = "text"
ANSWER = "answer"
_EXAMPLE_CHARACTERS = 300


@dataclass(frozen=True)
class Row:
    """One record of a dataset, before tokenization.

    Attributes:
        row_id: Unique and stable in its dataset.
        messages: The prompt. A plain string is one message with role "text"; what becomes of it is the prompt format's
            business.
        metadata: All other columns as JSON values; the reference answer stands under "answer".
    """

    row_id: str
    messages: tuple[Message, ...]
    metadata: Mapping[str, Any]


def check_columns(
    found: Iterable[str], prompt_key: str, answer_key: str | None, source: str, example: Mapping[str, Any] | None
) -> None:
    """Raise a ConfigError that shows the columns found, those expected and an example row, when one is missing."""
    columns = sorted(found)
    expected = [prompt_key] if answer_key is None else [prompt_key, answer_key]
    missing = [name for name in expected if name not in columns]
    if not missing:
        return
    shown = "" if example is None else f"\n  example row:      {shorten(example)}"
    raise ConfigError(
        f"{source} lacks the column{'s' * (len(missing) > 1)} {', '.join(map(repr, missing))}.\n"
        f"  columns found:    {', '.join(columns) or 'none'}\n"
        f"  columns expected: {_expected(prompt_key, answer_key)}{shown}\n"
        "Name your own columns with prompt_key and answer_key (answer_key: null when there is no reference answer)."
    )


def row_from_columns(
    columns: Mapping[str, Any], row_id: str, prompt_key: str, answer_key: str | None, source: str
) -> Row:
    """Build a Row.

    Args:
        columns: The record.
        row_id: Its id.
        prompt_key: Column of the prompt.
        answer_key: Column of the reference answer, or None.
        source: Where the record comes from, for errors ("file:line").

    Raises:
        DataError: the prompt is neither a non-empty string nor a list of {role, content}.
    """
    messages = _messages(columns[prompt_key], source)
    metadata = {name: json_value(value) for name, value in columns.items() if name not in (prompt_key, answer_key)}
    if answer_key is not None:
        metadata[ANSWER] = json_value(columns[answer_key])
    return Row(row_id=row_id, messages=messages, metadata=metadata)


def shorten(example: Mapping[str, Any]) -> str:
    """Render a record in one line of bounded length, each value cut before the whole."""
    cut = {
        name: value[:77] + "..." if isinstance(value, str) and len(value) > 80 else value
        for name, value in example.items()
    }
    text = json.dumps(cut, ensure_ascii=False, default=str)
    return text if len(text) <= _EXAMPLE_CHARACTERS else text[: _EXAMPLE_CHARACTERS - 3] + "..."


def json_value(value: Any) -> Any:
    """Return `value` as JSON can hold it: dates become ISO text, everything else that JSON does not know its repr."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(name): json_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return repr(value)


def _expected(prompt_key: str, answer_key: str | None) -> str:
    prompt = f"{prompt_key} (text, or a list of {{role, content}})"
    return prompt if answer_key is None else f"{prompt}, {answer_key} (the reference answer)"


def _messages(prompt: Any, source: str) -> tuple[Message, ...]:
    if isinstance(prompt, str):
        if not prompt:
            raise DataError(f"{source}: the prompt is empty")
        return (Message(PLAIN_TEXT, _unicode(prompt, source)),)
    if not isinstance(prompt, Sequence) or not prompt:
        raise DataError(f"{source}: the prompt must be text or a list of {{role, content}}, got {prompt!r:.120}")
    return tuple(_message(entry, source) for entry in prompt)


def _message(entry: Any, source: str) -> Message:
    if not isinstance(entry, Mapping) or not {"role", "content"} <= set(entry):
        raise DataError(f"{source}: a message must have role and content, got {entry!r:.120}")
    role, content = entry["role"], entry["content"]
    if not isinstance(role, str) or not isinstance(content, str):
        raise DataError(f"{source}: role and content of a message must be text, got {entry!r:.120}")
    return Message(_unicode(role, source), _unicode(content, source))


def _unicode(text: str, source: str) -> str:
    """Refuse half of a character, such as JSON's "\\ud83d" alone, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{source}: character {error.start} of the prompt is {text[error.start]!a}, half of a surrogate pair and "
            "no Unicode text; write the whole character"
        ) from error
    return text
