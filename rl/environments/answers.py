"""Judge an answer with math-verify; runs inside scoring processes.

math-verify's own deadlines use SIGALRM, which fails outside a main thread; they are off: the pool's deadline governs.
"""

import logging
import re
from dataclasses import dataclass

import math_verify

# One value, as text or LaTeX: an optional sign, then a number, a fraction or a word. No operators: 3+5 is no value.
_NUMBER = r"(?:\d[\d,]*(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
_FRACTION = r"\d+\s*/\s*\d+|\\[dt]?frac\s*(?:\{\d+\}|\d)\s*(?:\{\d+\}|\d)"
_LITERAL = re.compile(rf"[-+]?\s*(?:{_FRACTION}|{_NUMBER}|[A-Za-z]+)\s*(?:\\?%)?")
_WRAPPERS = (re.compile(r"\$(.*)\$", re.DOTALL), re.compile(r"\\boxed\{(.*)\}", re.DOTALL))


@dataclass(frozen=True)
class Judgement:
    """Whether the answer is right; `fault` tells when the reference answer itself cannot be read."""

    is_correct: bool
    fault: str = ""


def prepare_math() -> None:
    """Import math-verify's parser once, so that no deadline pays for it."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns in every call that its own deadlines are off
    judge_answer(r"\boxed{\frac12}", "1/2")


def judge_answer(text: str, reference: str) -> Judgement:
    """Compare the answer in a text with the reference by symbolic equality.

    Args:
        text: The completion; the answer is LaTeX in it, best in a box, or an expression.
        reference: The right answer, as text or LaTeX, boxed or not.
    """
    gold = _parse(reference if "\\boxed" in reference else f"\\boxed{{{reference}}}") or _parse(reference)
    if not gold:
        return Judgement(
            False, fault=f"the reference answer {reference!r} is not a mathematical value that math-verify can read"
        )
    return Judgement(bool(math_verify.verify(gold, _parse(text), timeout_seconds=None)))


def judge_literal_answer(text: str, reference: str) -> Judgement:
    """As `judge_answer`, but the whole text must be one value: expressions and sentences do not count."""
    value = literal_value(text)
    if value is None:
        return Judgement(False)
    if value == reference.strip():
        return Judgement(True)
    return judge_answer(f"\\boxed{{{value}}}", reference)


def literal_value(text: str) -> str | None:
    """Return the one value that the text consists of, without space, dollar signs and box; None if it is no value."""
    value = text.strip()
    for wrapper in _WRAPPERS:
        if wrapped := wrapper.fullmatch(value):
            value = wrapped.group(1).strip()
    return value if _LITERAL.fullmatch(value) else None


def _parse(text: str) -> list[object]:
    parsed: list[object] = math_verify.parse(text, parsing_timeout=None)
    return parsed
