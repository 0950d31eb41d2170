"""What can be wrong with a completion's form, apart from its answer. Pure functions of the text."""

import re

from rl.core.types import TurnFlag

_THINK_TAG = re.compile(r"</?think>")


def is_thinking_malformed(text: str) -> bool:
    """Whether <think> tags do not alternate, each opened and closed; no tags at all are well-formed.

    A first tag that closes is well-formed too: chat templates open the thinking at the end of the prompt.
    """
    tags = _THINK_TAG.findall(text)
    if tags and tags[0] == "</think>":
        tags = tags[1:]
    expected = ["<think>", "</think>"] * (len(tags) // 2)
    return tags != expected


def thinking_flags(text: str, think_tags: bool) -> frozenset[TurnFlag]:
    """The flags of a completion's thinking; none unless `think_tags` asks for a look."""
    malformed = think_tags and is_thinking_malformed(text)
    return frozenset({TurnFlag.MALFORMED_THINKING} if malformed else ())
