"""Reward functions of the tiny runs: `score(prompts, completions, **columns) -> list of floats`."""

import time
from typing import Any


def share_of_letters(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Share of lower-case letters among the characters: a dense reward that a random model can raise."""
    return [sum("a" <= c <= "z" for c in text) / max(len(text), 1) for text in completions]


def slow_share_of_letters(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The same, slow enough that a test can catch a run in the middle."""
    time.sleep(0.2)
    return share_of_letters(prompts, completions)


def raises(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Fail for every second group."""
    if len("".join(completions)) % 2:
        raise RuntimeError("the judge is broken")
    return [float(len(text)) for text in completions]


def always_raises(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Fail for every group."""
    raise RuntimeError("the judge is broken")


def returns_none(prompts: list[str], completions: list[str], **_: Any) -> list[Any]:
    """Score the first completion of a group and no other."""
    return [float(len(text)) if index else None for index, text in enumerate(completions)]


def hangs(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Take for ever on some groups."""
    if len("".join(completions)) % 2:
        time.sleep(3600)
    return [float(len(text)) for text in completions]


def too_easy_every_second(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """1 for every answer to a prompt with an even number: its group teaches nothing. Else the share of letters."""
    time.sleep(0.1)
    shares = share_of_letters(prompts, completions)
    return [1.0 if int(prompt[4:6]) % 2 == 0 else share for prompt, share in zip(prompts, shares, strict=True)]


def always_right(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """1 for every completion."""
    return [1.0 for _ in completions]


def letters_and_length(prompts: list[str], completions: list[str], **_: Any) -> list[dict[str, float]]:
    """Two components: the share of letters, and whether the answer is short."""
    letters = share_of_letters(prompts, completions)
    return [
        {"letters": share, "length": float(len(text) < 4)} for share, text in zip(letters, completions, strict=True)
    ]
