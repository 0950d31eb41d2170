"""Tests of rl.telemetry.rollout_view."""

from dataclasses import replace

from rl.core.types import Message, Rollout, RolloutStatus, Turn, TurnFlag
from rl.telemetry.rollout_view import rollout_text
from tests.support.completions import completion, text_prompt

EXPECTED = """\
rollout 7/0 of prompt p0 in environment math
[text] prompt, 4 tokens, not trained
    1+1=
[assistant] turn 0, 5 tokens, sampled by version 0 and trained, ended by stop, reward 0, invalid_tool_call
    <a
    b
[tool] environment, 3 tokens with the template's, not trained
    no such tool
[assistant] turn 1, 1 tokens, sampled by version 0 and trained, ended by stop, reward 1
    2
[user] environment, after the end, in no sequence
    more?
end: done, 2 turns, reward 1
"""


def test_a_rollout_is_told_message_by_message() -> None:
    prompt = text_prompt("1+1=")
    call = completion("<a\nb ")
    flags = frozenset({TurnFlag.INVALID_TOOL_CALL})
    first = Turn(prompt.token_ids, call, (Message("tool", "no such tool"),), 0.0, flags)
    second = Turn((*prompt.token_ids, *call.tokens, 1, 2, 3), completion("2"), (Message("user", "more?"),), 1.0)
    assert rollout_text(prompt, Rollout("7/0", (first, second), 1.0)) == EXPECTED


def test_the_size_of_a_prompt_is_that_of_all_its_messages() -> None:
    prompt = replace(text_prompt("1+1="), messages=(Message("system", "Add."), Message("user", "1+1=")))
    text = rollout_text(prompt, Rollout("7/0", (Turn(prompt.token_ids, completion("2")),), 1.0))
    assert "[system] prompt, 4 tokens with the other 1, not trained" in text


def test_forks_and_failures_are_named() -> None:
    prompt = text_prompt("1+1=")
    turns = (Turn(prompt.token_ids, completion("")), Turn((1,), completion("2"), forked=True))
    text = rollout_text(prompt, Rollout("7/0", turns, float("nan"), RolloutStatus.REWARD_TIMEOUT))
    assert "its history was rewritten: a sequence of its own" in text and "reward none (reward_timeout)" in text
