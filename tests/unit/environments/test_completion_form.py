import pytest

from rl.core.types import TurnFlag
from rl.environments.completion_form import is_thinking_malformed, tagged_answer, thinking_flags


@pytest.mark.parametrize(
    ("text", "malformed"),
    [
        ("no thought", False),
        ("<think>a</think>b", False),
        ("a</think>b", False),  # the template opened it
        ("<think>a</think>b<think>c</think>", False),
        ("<think>a", True),
        ("a</think>b</think>", True),
        ("<think><think>a</think>", True),
        ("<think>a</think></think>", True),
        ("a</think><think>b", True),
    ],
)
def test_think_tags_must_alternate(text, malformed):
    assert is_thinking_malformed(text) is malformed
    assert thinking_flags(text, True) == (frozenset({TurnFlag.MALFORMED_THINKING}) if malformed else frozenset())
    assert thinking_flags(text, False) == frozenset()


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("12", None),
        ("<answer>12", None),
        ("</answer><answer>", None),
        ("<answer>12</answer> or <answer> 13 </answer>.", " 13 "),
        ("<answer>1<answer>2</answer>", "1<answer>2"),
        ("<answer>4</answer>" + "<answer>" * 100_000, "4"),  # in linear time
    ],
)
def test_the_last_pair_of_answer_tags_holds_the_answer(text, answer):
    assert tagged_answer(text) == answer
