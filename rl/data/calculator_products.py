"""Products of two-digit numbers after worked examples that use a calculator; with a fixed held-out part.

The prompts are raw text for an environment of kind `tools` with a tool named `calculator`. The products are beyond what
a small model knows by heart, so only a rollout that calls the tool and repeats its result is right. The default model
manages that in about a third of its rollouts before training.

    Q: 84*51
    <tool_call>{"name": "calculator", "arguments": {"expression": "84*51"}}</tool_call>
    <tool_response>4284</tool_response>
    A: 4284
"""

import random
from collections.abc import Sequence

from rl.core.types import Message
from rl.data.columns import ANSWER, PLAIN_TEXT, Row
from rl.data.config import CalculatorProductsDataset

_EXAMPLES = ((37, 29), (84, 51))
_NUMBERS = range(11, 100)
# Every seventh pair, by the sum of its weighted factors, is held out; the same for every run and seed.
_HELD_OUT_EVERY = 7


def calculator_product_rows(config: CalculatorProductsDataset) -> Sequence[Row]:
    """Return the rows of one part in an order that the seed gives; no pair occurs twice, or in both parts."""
    wanted = config.part == "heldout"
    pairs = [(a, b) for a in _NUMBERS for b in _NUMBERS if _is_held_out(a, b) == wanted and (a, b) not in _EXAMPLES]
    random.Random(f"calculator_products:{config.seed}").shuffle(pairs)
    return [_row(a, b) for a, b in pairs[: config.size]]


def _is_held_out(a: int, b: int) -> bool:
    """Whether a pair is held out; both orders of it are in the same part."""
    return (min(a, b) * 3 + max(a, b)) % _HELD_OUT_EVERY == 0


def _row(a: int, b: int) -> Row:
    examples = "".join(_example(*pair) for pair in _EXAMPLES)
    return Row(
        row_id=f"{a}*{b}",
        messages=(Message(PLAIN_TEXT, f"{examples}Q: {a}*{b}\n"),),
        metadata={ANSWER: str(a * b)},
    )


def _example(a: int, b: int) -> str:
    call = f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{a}*{b}"}}}}</tool_call>'
    return f"Q: {a}*{b}\n{call}\n<tool_response>{a * b}</tool_response>\nA: {a * b}\n\n"
