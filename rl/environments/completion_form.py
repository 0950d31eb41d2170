"""What can be told from a completion's form: its thinking, its tagged answer.

Pure functions of the text in linear time: they run beside the event loop's other work.
"""

import re

from rl.core.types import TurnFlag

_THINK_TAG = re.compile(r"</?think>")
_ANSWER_CLOSE = "</answer>"
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


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


def tagged_answer(text: str) -> str | None:
    """Return what the last pair of <answer> tags holds; None when there is none."""
    # Without what follows the last closing tag: each tag that is never closed would be searched for to the end.
    answers = _ANSWER.findall(text[: text.rfind(_ANSWER_CLOSE) + len(_ANSWER_CLOSE)])
    return answers[-1] if answers else None
