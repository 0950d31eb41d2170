"""Chat templates as models have them, and a byte tokenizer that knows their special tokens. For tests of conversations.

The templates are shortened to what matters for turns: headers, ends, separators, defaults, trimming, old reasoning.
"""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rl.data.chat import PromptTokenizer
from rl.data.config import DataConfig
from rl.trainer.config import TokenizerConfig

SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|bos|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"
)  # fmt: skip
FIRST_SPECIAL_ID = 256

# A default system prompt when there is none, and a newline after each end of turn.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# A first token of the whole text; every message trimmed; nothing between two messages.
LLAMA3 = (
    "{% for message in messages %}{% if loop.first %}{{ '<|bos|>' }}{% endif %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# Reasoning stays in the answers after the user's last message, and goes from those before it.
QWEN3 = (
    "{% set ns = namespace(last=0) %}"
    "{% for message in messages %}{% if message['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for message in messages %}{% set content = message['content'] %}"
    "{% if message['role'] == 'assistant' and loop.index0 < ns.last and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# ChatML whose assistant text is marked.
MARKED = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{{ '\n' }}{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# No end token at all: turns end where the next begins.
PLAIN = (
    "{% for message in messages %}{{ '### ' + message['role'] + '\n' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant\n' }}{% endif %}"
)


def special_id(token: str) -> int:
    """The id of a special token."""
    return FIRST_SPECIAL_ID + SPECIAL.index(token)


def make_prompt_tokenizer(
    folder: Path, template: str, eos: str = "<|im_end|>", pad: str | None = None, merges: bool = False
) -> PromptTokenizer:
    """A PromptTokenizer over bytes: id b is byte b, then the special tokens, then "ab" where `merges` is set."""
    characters = pre_tokenizers.ByteLevel.alphabet()
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    assert set(vocabulary) == set(characters)
    vocabulary |= {token: special_id(token) for token in SPECIAL} | {"ab": FIRST_SPECIAL_ID + len(SPECIAL)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")] if merges else []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos, pad_token=pad, chat_template=template, bos_token="<|bos|>"
    )
    folder.mkdir(parents=True, exist_ok=True)
    made.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    data = DataConfig.model_validate({"train": {"kind": "few_shot_addition"}})
    return PromptTokenizer(folder, TokenizerConfig(), data, trust_remote_code=False)
