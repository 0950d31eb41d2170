"""A tiny random classifier; its scores must be those of a plain forward of each conversation alone."""

import math

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
)

from rl.core.errors import ConfigError, DataError
from rl.core.types import Message, Prompt, RolloutStatus, Turn
from rl.environments.base import Episode
from rl.environments.config import RewardModelEnvConfig
from rl.environments.reward_model import (
    RewardModelEnvironment,
    group_metrics,
    load_classifier,
    prepare_classifier,
    score_conversations,
    score_rows,
)
from tests.support.completions import completion, episodes, text_prompt
from tests.support.tiny_classifier import make_classifier
from tests.support.tiny_model import EOS_ID, PAD_ID, make_tiny_tokenizer

KEY = "env.rm.model_name"
CHAT = Prompt("p0", (Message("user", "2+2?"),), "rm", {}, (1,))
TEXTS = ["4", "four, I think", "", "no"]


def settings(folder, **values):
    return RewardModelEnvConfig(kind="reward_model", model_name=str(folder), **values)


def alone(folder, tokens):
    """The score of one row without padding, by the model itself."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens])).logits.item()


def chat(text):
    return [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": text}]


def chat_tokens(text):
    return make_tiny_tokenizer()(f"<|user|>2+2?<|assistant|>{text}<|eos|>")["input_ids"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_classifier(tmp_path_factory.mktemp("classifier"))


@pytest.mark.parametrize("pad", [PAD_ID, EOS_ID, None], ids=["own pad", "pad is eos", "no pad"])
@pytest.mark.parametrize("micro_batch_size", [1, 3, 8])
def test_scores_are_those_of_a_plain_forward_whatever_the_padding(tmp_path, pad, micro_batch_size):
    folder = make_classifier(tmp_path, pad=pad)
    config = settings(folder, micro_batch_size=micro_batch_size)
    scores = score_conversations(config, KEY, [chat(text) for text in TEXTS])
    expected = [alone(folder, chat_tokens(text)) for text in TEXTS]
    assert scores == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 0.1


def test_plain_text_is_scored_as_it_is(folder):
    scores = score_conversations(settings(folder), KEY, [[{"role": "text", "content": "1+1=2"}]])
    assert scores == pytest.approx([alone(folder, list(b"1+1=2"))], abs=1e-5)


def test_a_long_conversation_has_no_score_and_harms_no_other(folder):
    scores = score_conversations(settings(folder), KEY, [chat("x" * 80), chat("4"), [{"role": "text", "content": ""}]])
    assert scores[0] == "it has 87 tokens, and the model reads 64"
    assert scores[1] == pytest.approx(alone(folder, chat_tokens("4")), abs=1e-5)
    assert scores[2] == "the conversation has no tokens"


def test_a_score_that_is_no_number_is_no_reward(tmp_path):
    config = settings(make_classifier(tmp_path))
    model = load_classifier(config, KEY).model
    with torch.no_grad():
        model.get_input_embeddings().weight[ord("!")] = math.nan
    scores = score_conversations(config, KEY, [chat("4!"), chat("4")])
    assert scores[0] == "the model gave nan" and isinstance(scores[1], float)


def test_rows_without_a_padding_token_are_padded_with_one_that_none_has(tmp_path):
    folder = make_classifier(tmp_path, pad=None)
    rows = [[0, 1, 2, 3], [4, 0]]
    expected = [alone(folder, row) for row in rows]
    assert score_rows(load_classifier(settings(folder), KEY), rows) == pytest.approx(expected, abs=1e-5)


def test_a_conversation_needs_a_chat_template(tmp_path):
    config = settings(make_classifier(tmp_path, template=False))
    with pytest.raises(DataError, match="no chat template"):
        score_conversations(config, KEY, [chat("4")])


@pytest.mark.parametrize(
    ("values", "words"),
    [({"labels": 3}, "gives 3 numbers"), ({"kind": LlamaForCausalLM}, "lacks the weights score.weight")],
)
def test_what_gives_no_trained_score_is_refused(tmp_path, values, words):
    with pytest.raises(ConfigError, match=rf"env\.rm\.model_name=.*{words}"):
        prepare_classifier(settings(make_classifier(tmp_path, **values)), KEY)


def test_a_broken_model_is_a_configuration_error(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no such type"}')
    with pytest.raises(ConfigError, match="no sequence classifier loads"):
        prepare_classifier(settings(tmp_path), KEY)


def test_the_metrics_of_a_group():
    assert group_metrics([1.0, 2.0, 6.0]) == {
        "reward_model_env/num_samples": 3.0,
        "reward_model_env/mean_reward": 3.0,
        "reward_model_env/std_reward": pytest.approx(math.sqrt(7.0)),
        "reward_model_env/min_reward": 1.0,
        "reward_model_env/max_reward": 6.0,
    }
    assert group_metrics([2.0])["reward_model_env/std_reward"] == 0.0
    assert group_metrics([]) == {}


async def test_a_group_is_scored_in_a_process_of_its_own(folder):
    environment = RewardModelEnvironment("rm", settings(folder))
    results = await environment.step(CHAT, episodes([completion(text) for text in ("4", "x" * 80)]))
    earlier = (Turn((1,), completion("5"), (Message("user", "sure?"),)),)
    (later,) = await environment.step(CHAT, [Episode(0, earlier, completion("4"))])
    (plain,) = await environment.step(text_prompt("1+1="), episodes([completion("2")]))
    await environment.close()
    score = alone(folder, chat_tokens("4"))
    assert results[0].reward == pytest.approx(score, abs=1e-5) and results[0].done
    assert results[0].metrics["reward_model_env/num_samples"] == 1.0
    assert results[0].metrics["reward_model_env/mean_reward"] == results[0].reward
    assert results[1].status is RolloutStatus.REWARD_INVALID and "sample 1: it has 87 tokens" in results[1].detail
    again = make_tiny_tokenizer()("<|user|>2+2?<|assistant|>5<|eos|><|user|>sure?<|assistant|>4<|eos|>")["input_ids"]
    assert later.reward == pytest.approx(alone(folder, again), abs=1e-5)
    assert plain.reward == pytest.approx(alone(folder, list(b"1+1=2")), abs=1e-5)


async def test_a_late_model_fails_the_samples(folder):
    environment = RewardModelEnvironment("rm", settings(folder, timeout_s=1e-3, micro_batch_size=1))
    results = await environment.step(CHAT, episodes([completion("4")] * 400))
    await environment.close()
    assert {result.status for result in results} == {RolloutStatus.REWARD_TIMEOUT} and len(results) == 400
