import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.environments.tool_calls import CallFault, ToolCall, parse_call, parse_calls

OPEN, CLOSE = "<tool_call>", "</tool_call>"
CALL = '{"name": "calculator", "arguments": {"expression": "2*3"}}'
PARSED = ToolCall("calculator", {"expression": "2*3"})


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("just an answer", []),
        (f"let me see {OPEN}{CALL}{CLOSE} now", [PARSED]),
        (f"{OPEN}\n{CALL}\n{CLOSE}\n", [PARSED]),
        (f"{OPEN}{CALL}", [PARSED]),  # the engine cut the stop string off
        (f"{OPEN}{CALL}{CLOSE}{OPEN}{CALL}{CLOSE}", [PARSED, PARSED]),
        (f'{OPEN}{{"name": "now"}}{CLOSE}', [ToolCall("now", {})]),
    ],
)
def test_calls_are_found_in_order(text, calls):
    assert parse_calls(text, OPEN, CLOSE) == calls


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"nam": 1', "not valid JSON"),
        ("", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        (f'{{"name": "f", "arguments": {{"a": {"[" * 900}{"]" * 900}}}}}', "nested more than 32 levels deep"),
        (f'{{"name": "f", "arguments": {{"a": {"[" * 32}{"]" * 32}}}}}', "nested more than 32 levels deep"),
        ("[1]", "must be a JSON object, not a list"),
        ("{}", "has no name"),
        ('{"name": 3, "arguments": {}}', "the name must be text, not a number"),
        ('{"name": "f", "arguments": "2*3"}', "arguments must be a JSON object, not text"),
        ('{"name": "f", "arguments": [1]}', "arguments must be a JSON object, not a list"),
        ('{"name": "f", "arguments": null}', "arguments must be a JSON object, not null"),
        ('{"name": "f", "args": {}}', "unknown key 'args'"),
    ],
)
def test_a_malformed_call_is_a_fault_in_words(body, words):
    (fault,) = parse_calls(f"{OPEN}{body}{CLOSE}", OPEN, CLOSE)
    assert isinstance(fault, CallFault) and words in fault.words


def test_tags_that_do_not_pair_are_faults():
    first, second = parse_calls(f"{OPEN}a {OPEN}{CALL}{CLOSE}", OPEN, CLOSE)
    assert isinstance(first, CallFault) and "not closed" in first.words and second == PARSED
    (fault,) = parse_calls(f"6{CLOSE}", OPEN, CLOSE)
    assert isinstance(fault, CallFault) and "without <tool_call>" in fault.words


@pytest.mark.parametrize(("opening", "closing"), [("[[", "]]"), ("```call", "```"), ("@", "@@"), (".*", "(")])
def test_tags_may_be_any_text(opening, closing):
    assert parse_calls(f"so {opening}{CALL}{closing}", opening, closing) == [PARSED]


@given(st.text(alphabet='<tool_cal>/{}[]":,1 "name'), st.text(max_size=30))
def test_no_text_is_an_error(text, more):
    for call in [*parse_calls(OPEN + text + CLOSE + more, OPEN, CLOSE), parse_call(text + more)]:
        assert isinstance(call, ToolCall | CallFault)
