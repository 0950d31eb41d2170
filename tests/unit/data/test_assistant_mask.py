"""Tests of rl.data.assistant_mask."""

from pathlib import Path

import pytest

from rl.core.errors import DataError
from rl.core.types import Message
from rl.data.assistant_mask import assistant_messages, encode_conversation
from rl.data.chat import PromptTokenizer
from tests.support.chat_templates import CHATML, LLAMA3, MARKED, QWEN3, SMOLLM2, make_prompt_tokenizer

CONVERSATION = [
    Message("user", "2+2?"),
    Message("assistant", "4, é"),
    Message("tool", "ok"),
    Message("assistant", "4 indeed"),
    Message("user", "bye"),
]


def learned(tokenizer: PromptTokenizer, messages: list[Message], trained: list[int]) -> list[str]:
    """The runs of masked tokens, as text; the ids are those of the whole conversation."""
    encoded = encode_conversation(tokenizer, messages, trained)
    assert encoded.token_ids == tokenizer.encode_text(tokenizer.render(messages, generation_prompt=False))
    assert len(encoded.mask) == len(encoded.token_ids)
    runs: list[list[int]] = []
    for place, (token, is_learned) in enumerate(zip(encoded.token_ids, encoded.mask, strict=True)):
        if is_learned and (place == 0 or not encoded.mask[place - 1]):
            runs.append([])
        if is_learned:
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML, "<|im_end|>"),
        (SMOLLM2, "<|im_end|>"),
        (LLAMA3, "<|eot_id|>"),
        (QWEN3, "<|im_end|>"),
        (MARKED, "<|im_end|>"),
    ],
)
@pytest.mark.parametrize("pad", [None, "end"])
def test_answers_and_their_end_tokens_are_learned_whatever_pads(
    tmp_path: Path, template: str, end: str, pad: str | None
) -> None:
    tokenizer = make_prompt_tokenizer(tmp_path, template, eos=end, pad=end if pad else None)
    assert learned(tokenizer, CONVERSATION, [1, 3]) == [f"4, é{end}", f"4 indeed{end}"]
    assert learned(tokenizer, CONVERSATION, [3]) == [f"4 indeed{end}"]
    assert learned(tokenizer, CONVERSATION, []) == []


def test_answers_of_the_prompt_are_context() -> None:
    assert assistant_messages(CONVERSATION) == [1, 3]


def test_only_answers_can_be_learned(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"message 2 of 5 cannot be learned: the assistant's are \[1, 3\]"):
        encode_conversation(make_prompt_tokenizer(tmp_path, CHATML), CONVERSATION, [1, 2])


def test_a_template_that_rewrites_history_is_an_error(tmp_path: Path) -> None:
    tokenizer = make_prompt_tokenizer(tmp_path, QWEN3)
    thinking = [Message("user", "a"), Message("assistant", "<think>x</think>b"), Message("user", "c")]
    with pytest.raises(DataError, match="message 1: the chat template writes it differently"):
        encode_conversation(tokenizer, thinking, [1])
    assert learned(tokenizer, thinking[:2], [1]) == ["<think>x</think>b<|im_end|>"]


def test_marks_that_do_not_fit_the_answers_are_an_error(tmp_path: Path) -> None:
    odd = MARKED.replace("message['role'] == 'assistant'", "message['content'] == '4 indeed'")
    with pytest.raises(DataError, match="marks 1 spans for 2 messages"):
        encode_conversation(make_prompt_tokenizer(tmp_path, odd), CONVERSATION, [1])


def test_a_token_over_the_edge_of_an_answer_is_not_learned(tmp_path: Path) -> None:
    glued = "{% for m in messages %}{{ 'a' + m['content'] }}{% endfor %}{% if add_generation_prompt %}a{% endif %}"
    tokenizer = make_prompt_tokenizer(tmp_path, glued, merges=True)
    encoded = encode_conversation(tokenizer, [Message("user", "x"), Message("assistant", "bc")], [1])
    assert tokenizer.decode([t for t, m in zip(encoded.token_ids, encoded.mask, strict=True) if m]) == "c"
