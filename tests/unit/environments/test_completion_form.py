import pytest

from rl.core.types import TurnFlag
from rl.environments.completion_form import is_thinking_malformed, thinking_flags


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
