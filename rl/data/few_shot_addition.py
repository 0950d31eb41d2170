"""The embedded task: sums of two digits after three worked examples, with a fixed held-out part.

The held-out pairs are written out, so they are the same for every run, seed and Python version. None of the
worked examples is among them. Before training, the default model answers 9 of the 19 held-out prompts (47%) by greedy
decoding.
"""

from typing import Literal

from rl.core.types import Message
from rl.data.columns import ANSWER, PLAIN_TEXT, Row

WORKED_EXAMPLES = "2+3=5\n4+1=5\n6+2=8\n"
HELD_OUT_PAIRS: frozenset[tuple[int, int]] = frozenset(
    {(1, 1), (1, 5), (1, 9), (2, 8), (3, 9), (5, 5), (5, 9), (6, 8), (6, 9), (7, 7), (8, 9)}
)
_DIGITS = range(1, 10)


def few_shot_addition_rows(part: Literal["train", "heldout"]) -> list[Row]:
    """Return the rows of one part in a fixed order: 62 training prompts or 19 held-out ones (11 pairs, both orders)."""
    wanted = part == "heldout"
    return [_row(a, b) for a in _DIGITS for b in _DIGITS if ((min(a, b), max(a, b)) in HELD_OUT_PAIRS) == wanted]


def _row(a: int, b: int) -> Row:
    prompt = f"{WORKED_EXAMPLES}{a}+{b}="
    return Row(row_id=f"{a}+{b}", messages=(Message(PLAIN_TEXT, prompt),), metadata={ANSWER: str(a + b)})
