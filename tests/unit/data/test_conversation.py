"""Tests of rl.data.conversation."""

from pathlib import Path

import pytest
import torch

from rl.algorithms.assembly import build_estimator
from rl.algorithms.config import GRPOConfig, LossConfig
from rl.core.batch import TrainBatch
from rl.core.errors import DataError
from rl.core.types import Completion, FinishReason, Message, Prompt, Rollout, RolloutGroup, Turn, VersionSpan
from rl.data.chat import PromptTokenizer
from rl.data.conversation import Conversation, Conversations
from tests.support.chat_templates import CHATML, LLAMA3, PLAIN, QWEN3, SMOLLM2, make_prompt_tokenizer, special_id

TEMPLATES = {"smollm2": SMOLLM2, "chatml": CHATML, "llama3": LLAMA3, "qwen3": QWEN3}
ENDS = {"smollm2": "<|im_end|>", "chatml": "<|im_end|>", "llama3": "<|eot_id|>", "qwen3": "<|im_end|>"}
USER = Message("user", "what is 2+2?")


def sampled(
    tokenizer: PromptTokenizer, text: str, finish: FinishReason = FinishReason.STOP, visible: str | None = None
) -> Completion:
    """A completion of exactly this text, its end token included where it has one."""
    return completion_of(tokenizer.encode_text(text), text if visible is None else visible, finish)


def completion_of(tokens: tuple[int, ...], text: str, finish: FinishReason = FinishReason.STOP) -> Completion:
    return Completion(tokens, (-1.0,) * len(tokens), finish, (VersionSpan(0, 0, len(tokens)),), text)


def begin(tokenizer: PromptTokenizer, *messages: Message, fork: bool = False) -> tuple[Conversations, Conversation]:
    conversations = Conversations(tokenizer, is_raw=False, rewritten_history="fork" if fork else "error")
    prompt = Prompt("p0", messages, "echo", {}, tokenizer.encode(messages))
    return conversations, conversations.begin(prompt)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("ended", [True, False])
def test_what_stands_between_turns_is_what_the_whole_conversation_would_have(
    tmp_path: Path, template: str, role: str, ended: bool
) -> None:
    tokenizer = make_prompt_tokenizer(tmp_path, TEMPLATES[template], eos=ENDS[template])
    conversations, conversation = begin(tokenizer, USER)
    history = [USER]
    for answer, reply in (("it is 4", "sure?"), ("yes, 4", "and é?"), ("é\n\n x", "end")):
        text = answer + ENDS[template] if ended else answer
        finish = FinishReason.STOP if ended else FinishReason.LENGTH
        seen = conversation.token_ids
        completion = sampled(tokenizer, text, finish)
        conversation = conversations.follow(conversation, completion, [Message(role, reply)])
        history += [Message("assistant", answer), Message(role, reply)]
        assert conversation.token_ids == tokenizer.encode(history)
        assert conversation.token_ids[: len(seen) + len(completion.tokens)] == (*seen, *completion.tokens)
        assert conversation.text == tokenizer.render(history, generation_prompt=True)
        assert conversation.messages == tuple(history)
        assert not conversation.is_forked and not conversation.is_drifted


def test_sampled_ids_stay_though_the_text_would_be_tokenized_otherwise(tmp_path: Path) -> None:
    tokenizer = make_prompt_tokenizer(tmp_path, CHATML, merges=True)
    a, b = tokenizer.encode_text("a") + tokenizer.encode_text("b")
    assert tokenizer.encode_text("ab") != (a, b) and len(tokenizer.encode_text("ab")) == 1
    conversations, first = begin(tokenizer, USER)
    second = conversations.follow(first, completion_of((a, b, special_id("<|im_end|>")), "ab"), [USER])
    third = conversations.follow(second, completion_of((a, b), "ab", FinishReason.LENGTH), [USER])
    start = len(first.token_ids)
    assert second.token_ids[start : start + 3] == (a, b, special_id("<|im_end|>"))
    start = len(second.token_ids)
    assert third.token_ids[:start] == second.token_ids
    assert third.token_ids[start : start + 3] == (a, b, special_id("<|im_end|>"))
    assert tokenizer.decode(third.token_ids) == third.text


@pytest.mark.parametrize(
    ("said", "ending", "between"),
    [
        (" 4 \n", "<|eot_id|>", ""),
        ("\n4", "<|eot_id|>", ""),
        (" 4 ", "", "<|eot_id|>"),
        ("  ", "<|eot_id|>", ""),
        ("4", "<|endoftext|>", "<|eot_id|>"),
        ("", "<|endoftext|>", "<|eot_id|>"),
    ],
)
def test_outer_whitespace_and_another_end_stay_as_sampled_and_are_marked(
    tmp_path: Path, said: str, ending: str, between: str
) -> None:
    tokenizer = make_prompt_tokenizer(tmp_path, LLAMA3, eos="<|eot_id|>")
    conversations, first = begin(tokenizer, USER)
    finish = FinishReason.STOP if ending else FinishReason.LENGTH
    second = conversations.follow(first, sampled(tokenizer, said + ending, finish), [Message("tool", "go")])
    head = "<|start_header_id|>{}<|end_header_id|>\n\n"
    expected = (
        f"{first_text(tokenizer)}{said}{ending}{between}{head.format('tool')}go<|eot_id|>{head.format('assistant')}"
    )
    assert tokenizer.decode(second.token_ids) == expected
    assert second.is_drifted and not second.is_forked
    third = conversations.follow(second, sampled(tokenizer, "5<|eot_id|>"), [Message("tool", "on")])
    assert not third.is_drifted and third.token_ids[: len(second.token_ids)] == second.token_ids


def first_text(tokenizer: PromptTokenizer) -> str:
    return tokenizer.render([USER], generation_prompt=True)


def test_special_tokens_inside_an_answer_stay(tmp_path: Path) -> None:
    tokenizer = make_prompt_tokenizer(tmp_path, CHATML)
    conversations, first = begin(tokenizer, USER)
    completion = sampled(tokenizer, "a<|eot_id|>b<|im_end|>", visible="ab")
    second = conversations.follow(first, completion, [USER])
    assert second.messages[1].content == "a<|eot_id|>b" and not second.is_drifted


def test_a_stop_string_that_the_template_writes_itself_is_not_doubled(tmp_path: Path) -> None:
    tokenizer = make_prompt_tokenizer(tmp_path, PLAIN)
    conversations, first = begin(tokenizer, USER)
    ended = conversations.follow(first, sampled(tokenizer, "4\n", visible="4"), [USER])
    assert tokenizer.decode(ended.token_ids) == first_text(tokenizer) + f"4\n### user\n{USER.content}\n### assistant\n"


def test_a_stop_string_of_the_task_is_a_part_of_the_answer(tmp_path: Path) -> None:
    tokenizer = make_prompt_tokenizer(tmp_path, CHATML)
    conversations, first = begin(tokenizer, USER)
    second = conversations.follow(first, sampled(tokenizer, "4</answer>", visible="4"), [Message("tool", "ok")])
    assert second.messages[1].content == "4</answer>"
    assert second.token_ids == tokenizer.encode([USER, Message("assistant", "4</answer>"), Message("tool", "ok")])


THINKING = "<think>\nhm\n</think>\n\n4<|im_end|>"


def test_reasoning_stays_while_the_template_keeps_it(tmp_path: Path) -> None:
    tokenizer = make_prompt_tokenizer(tmp_path, QWEN3)
    conversations, first = begin(tokenizer, USER)
    second = conversations.follow(first, sampled(tokenizer, THINKING), [Message("tool", "ok")])
    assert not second.is_forked and "<think>" in tokenizer.decode(second.token_ids)


def test_a_rewritten_history_is_an_error_that_shows_both_texts(tmp_path: Path) -> None:
    tokenizer = make_prompt_tokenizer(tmp_path, QWEN3)
    conversations, first = begin(tokenizer, USER)
    second = conversations.follow(first, sampled(tokenizer, THINKING), [Message("tool", "ok")])
    with pytest.raises(DataError) as caught:
        conversations.follow(second, sampled(tokenizer, "4!<|im_end|>"), [Message("user", "and 3+3?")])
    assert "prompt p0 turn 1: the chat template rewrites the history" in str(caught.value)
    assert "'<think>\\nhm" in str(caught.value) and "'4<|im_end|>" in str(caught.value)
    assert "data.rewritten_history: fork" in str(caught.value)


def test_a_fork_begins_with_the_conversation_as_the_template_writes_it_now(tmp_path: Path) -> None:
    tokenizer = make_prompt_tokenizer(tmp_path, QWEN3)
    conversations, first = begin(tokenizer, USER, fork=True)
    answer = sampled(tokenizer, THINKING)
    second = conversations.follow(first, answer, [Message("user", "and 3+3?")])
    history = [USER, Message("assistant", "<think>\nhm\n</think>\n\n4"), Message("user", "and 3+3?")]
    assert second.is_forked and second.token_ids == tokenizer.encode(history)
    assert "<think>" not in tokenizer.decode(second.token_ids)
    third = conversations.follow(second, sampled(tokenizer, "6<|im_end|>"), [Message("tool", "ok")])
    assert not third.is_forked and third.token_ids[: len(second.token_ids)] == second.token_ids


def test_every_sampled_token_of_a_forked_rollout_carries_the_advantage_and_statistics_vote_once(tmp_path: Path) -> None:
    tokenizer = make_prompt_tokenizer(tmp_path, QWEN3)
    conversations, first = begin(tokenizer, USER, fork=True)
    turns, conversation = [], first
    for number in range(3):
        answer = sampled(tokenizer, THINKING.replace("hm", "hm" * (number + 1)))
        turns.append(Turn(conversation.token_ids, answer, reward=float(number == 2), forked=conversation.is_forked))
        conversation = conversations.follow(conversation, answer, [Message("user", "again " * (number + 1))])
    assert [turn.forked for turn in turns] == [False, True, True]
    plain = Turn(first.token_ids, sampled(tokenizer, "5<|im_end|>"))
    rollouts = [Rollout("0/0", tuple(turns), 1.0), *(Rollout(f"0/{n}", (plain,), 0.0) for n in (1, 2, 3))]
    prompt = Prompt("p0", (USER,), "echo", {}, first.token_ids)
    batch = TrainBatch.from_groups([RolloutGroup(0, prompt, tuple(rollouts))])
    assert batch.num_sequences == 6 and batch.rollout_ids is not None
    assert batch.rollout_ids.tolist() == [0, 0, 0, 1, 2, 3]
    # One vote of four: [1, 0, 0, 0] gives 1.5 and -0.5; a vote per sequence would give [1, 1, 1, 0, 0, 0].
    advantages = build_estimator(GRPOConfig(use_leave_one_out_baseline=False), LossConfig())(batch)["advantages"]
    expected = torch.where(batch.rollout_ids == 0, 1.5, -0.5)[batch.sequence_ids]
    assert advantages[batch.loss_mask].tolist() == pytest.approx(expected[batch.loss_mask].tolist(), abs=1e-4)
    assert int(batch.loss_mask.sum()) == sum(r.num_sampled_tokens for r in rollouts)
    assert not advantages[~batch.loss_mask].any()


def test_masks_ids_and_logprobs_have_one_length_and_only_sampled_tokens_are_trained(tmp_path: Path) -> None:
    tokenizer = make_prompt_tokenizer(tmp_path, CHATML)
    # The prompt holds a worked example by the assistant: context, not training data.
    messages = (USER, Message("assistant", "4"), Message("user", "3+3?"))
    conversations, first = begin(tokenizer, *messages)
    answer = sampled(tokenizer, "6<|im_end|>")
    second = conversations.follow(first, answer, [Message("tool", "right")])
    turns = (Turn(first.token_ids, answer), Turn(second.token_ids, answer))
    group = RolloutGroup(0, Prompt("p0", messages, "echo", {}, first.token_ids), (Rollout("0/0", turns, 1.0),))
    batch = TrainBatch.from_groups([group])
    assert len(batch.tokens) == len(batch.loss_mask) == len(batch.generation_logprobs)
    assert tuple(batch.tokens[batch.loss_mask].tolist()) == answer.tokens * 2


def test_raw_messages_are_appended_as_plain_text(tmp_path: Path) -> None:
    tokenizer = make_prompt_tokenizer(tmp_path, CHATML)
    conversations = Conversations(tokenizer, is_raw=True, rewritten_history="error")
    first = conversations.begin(Prompt("p0", (Message("text", "1+1="),), "echo", {}, tuple(b"1+1=")))
    answer = sampled(tokenizer, "2<|im_end|>", visible="2")
    second = conversations.follow(first, answer, [Message("text", " no\n"), Message("text", "x")])
    assert second.token_ids == (*b"1+1=", *answer.tokens, *b" no\nx") and second.turn == 1


@pytest.mark.parametrize("is_raw", [True, False])
def test_going_on_without_a_message_is_an_error(tmp_path: Path, is_raw: bool) -> None:
    tokenizer = make_prompt_tokenizer(tmp_path, CHATML)
    conversations = Conversations(tokenizer, is_raw=is_raw, rewritten_history="error")
    first = conversations.begin(Prompt("p0", (USER,), "echo", {}, (1,)))
    with pytest.raises(DataError, match="prompt p0 turn 0: the environment goes on without a message"):
        conversations.follow(first, sampled(tokenizer, "4"), [])


@pytest.mark.parametrize("is_raw", [True, False])
def test_half_a_character_from_an_environment_becomes_a_question_mark(tmp_path: Path, is_raw: bool) -> None:
    tokenizer = make_prompt_tokenizer(tmp_path, CHATML)
    conversations = Conversations(tokenizer, is_raw=is_raw, rewritten_history="error")
    first = conversations.begin(Prompt("p0", (USER,), "echo", {}, (1,)))
    second = conversations.follow(first, sampled(tokenizer, "4<|im_end|>"), [Message("tool", "a\ud83d")])
    assert "a?" in tokenizer.decode(second.token_ids)


def test_a_message_that_the_template_refuses_is_an_error_of_the_data(tmp_path: Path) -> None:
    refusing = (
        "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}>"
    )
    tokenizer = make_prompt_tokenizer(tmp_path, refusing)
    conversations, first = begin(tokenizer, USER)
    with pytest.raises(DataError, match="no tools"):
        conversations.follow(first, sampled(tokenizer, "4"), [Message("tool", "x")])


@pytest.mark.parametrize("fork", [True, False])
def test_a_template_that_passes_over_a_role_is_an_error_and_one_that_quotes_it_is_not(
    tmp_path: Path, fork: bool
) -> None:
    deaf = CHATML.replace("{% for message in messages %}", "{% for message in messages if message['role'] != 'tool' %}")
    tokenizer = make_prompt_tokenizer(tmp_path / "deaf", deaf)
    conversations, first = begin(tokenizer, USER, fork=fork)
    with pytest.raises(DataError, match="leaves out the environment's messages, whose role is tool"):
        conversations.follow(first, sampled(tokenizer, "4<|im_end|>"), [Message("tool", 'a "4"')])
    quoting = CHATML.replace(
        "message['content']", "(message['content'] | tojson if message['role'] == 'tool' else message['content'])"
    )
    tokenizer = make_prompt_tokenizer(tmp_path / "quoting", quoting)
    conversations, first = begin(tokenizer, USER, fork=fork)
    second = conversations.follow(first, sampled(tokenizer, "4<|im_end|>"), [Message("tool", 'a "4"')])
    assert '"a \\"4\\""' in tokenizer.decode(second.token_ids) and not second.is_forked and not second.is_drifted
