import json
import shutil
import sys

import pytest

from rl.core.errors import ConfigError, DataError
from rl.core.types import Message
from rl.data.chat import PromptTokenizer
from rl.data.config import DataConfig
from rl.trainer.config import TokenizerConfig
from tests.support.tiny_model import ASSISTANT_ID, EOS_ID, USER_ID, make_tiny_tokenizer

TRAIN = {"kind": "few_shot_addition"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tiny_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": EOS_ID}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS_ID, 99]}))
    return folder


def tokenizer(folder, chat_template=None, **data):
    tokenizer = TokenizerConfig(chat_template=chat_template)
    return PromptTokenizer(folder, tokenizer, DataConfig(train=TRAIN, **data), trust_remote_code=False)


def test_raw_text_is_tokenized_as_it_is(folder):
    raw = tokenizer(folder, prompt_format="raw")
    assert raw.encode([Message("text", "a=1\n")]) == tuple(b"a=1\n")
    assert raw.messages([Message("user", "a")]) == (Message("text", "a"),)
    with pytest.raises(DataError, match="2 messages"):
        raw.encode([Message("user", "a"), Message("assistant", "b")])


def test_chat_ends_with_the_generation_prompt_and_plain_text_is_the_users(folder):
    chat = tokenizer(folder)
    expected = (USER_ID, *b"hi", ASSISTANT_ID)
    assert chat.encode([Message("text", "hi")]) == chat.encode([Message("user", "hi")]) == expected


def test_a_system_prompt_comes_first(folder):
    chat = tokenizer(folder, system_prompt="be brief")
    assert chat.messages([Message("text", "hi")]) == (Message("system", "be brief"), Message("user", "hi"))
    with pytest.raises(ConfigError, match="data.system_prompt needs data.prompt_format: chat"):
        tokenizer(folder, system_prompt="x", prompt_format="raw")


def test_a_row_with_a_system_message_of_its_own_gets_no_second_one(folder):
    conversation = [Message("system", "be long"), Message("user", "hi")]
    assert tokenizer(folder).messages(conversation) == tuple(conversation)
    with pytest.raises(DataError, match="begins with a system message of its own"):
        tokenizer(folder, system_prompt="be brief").messages(conversation)


def test_an_own_chat_template_replaces_that_of_the_tokenizer(folder):
    chat = tokenizer(folder, chat_template="{% for m in messages %}[{{ m['content'] }}]{% endfor %}>")
    assert chat.encode([Message("text", "hi")]) == tuple(b"[hi]>")


def test_a_template_that_refuses_the_messages_is_an_error_of_the_row(folder):
    chat = tokenizer(folder, chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match="roles must alternate"):
        chat.encode([Message("user", "a")])


def test_chat_without_a_template_says_what_to_do(folder, tmp_path):
    plain = make_tiny_tokenizer()
    plain.chat_template = None
    plain.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="use data.prompt_format: raw"):
        tokenizer(tmp_path)
    assert tokenizer(tmp_path, prompt_format="raw").encode([Message("text", "a")]) == (97,)


def test_a_folder_without_tokenizer_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot load a tokenizer"):
        tokenizer(tmp_path)


def test_the_models_own_stop_tokens_come_from_its_files(folder, tmp_path):
    assert tokenizer(folder).stop_token_ids == (EOS_ID, 99)
    data = DataConfig(train=TRAIN)
    other = PromptTokenizer(tmp_path, TokenizerConfig(), data, tokenizer_path=folder, trust_remote_code=False)
    assert other.stop_token_ids == (EOS_ID,)


def test_code_of_the_folder_runs_only_when_it_is_trusted(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", list(sys.path))
    own = shutil.copytree(folder, tmp_path / "own")
    settings = json.loads((own / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own_tokenizer.OwnTokenizer"]}}
    (own / "tokenizer_config.json").write_text(json.dumps(settings))
    (own / "config.json").write_text(json.dumps({"eos_token_id": EOS_ID}))
    (own / "own_tokenizer.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n\n\n"
        "class OwnTokenizer(PreTrainedTokenizerFast):\n"
        "    def __call__(self, *args, **kwargs):\n"
        "        return {'input_ids': [7]}\n"
    )
    data = DataConfig(train=TRAIN, prompt_format="raw")
    with pytest.raises(ConfigError, match="own code needs policy.trust_remote_code=true"):
        PromptTokenizer(own, TokenizerConfig(), data, trust_remote_code=False)
    assert PromptTokenizer(own, TokenizerConfig(), data, trust_remote_code=True).encode_text("a") == (7,)


@pytest.mark.parametrize("prompt_format", ["raw", "chat"])
def test_half_a_character_is_an_error_of_the_data(folder, prompt_format):
    with pytest.raises(DataError, match=r"character 3 of the \w+ message is '.ud83d'"):
        tokenizer(folder, prompt_format=prompt_format).encode([Message("text", "ab \ud83d")])
