"""A tiny random Llama with a byte-level tokenizer, as a Hugging Face folder: the model of all fast tests.

Token id b is byte b for b < 256, so that tests can write token ids by hand; ids 256-259 are special. The head size is
32, the smallest that vLLM's CPU attention takes, so the same folder serves the trainer and both generators. It knows
nothing about the world: what it says is noise of a fixed seed.

    folder = make_tiny_model(tmp_path / "tiny")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("a=1") == [97, 61, 49]
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EOS_TOKEN, PAD_TOKEN, USER_TOKEN, ASSISTANT_TOKEN = "<|eos|>", "<|pad|>", "<|user|>", "<|assistant|>"
EOS_ID, PAD_ID, USER_ID, ASSISTANT_ID = 256, 257, 258, 259
VOCAB_SIZE = 260
HIDDEN_SIZE, NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 32, 2, 2, 1, 32
MAX_POSITIONS = 512

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{% else %}<|user|>{% endif %}"
    "{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|eos|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tiny_model(
    folder: Path,
    *,
    seed: int = 0,
    tie_embeddings: bool = True,
    num_heads: int = NUM_HEADS,
    num_kv_heads: int = NUM_KV_HEADS,
) -> Path:
    """Write the model, its tokenizer and its generation configuration into `folder` and return it.

    Args:
        folder: Created when missing; files in it are overwritten.
        seed: Seed of the weights; the caller's random state stays as it was.
        tie_embeddings: Whether the output layer is the embedding matrix.
        num_heads: Attention heads; tensor-parallel engines need a multiple of their processes.
        num_kv_heads: Heads of keys and values.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(_config(tie_embeddings, num_heads, num_kv_heads)).to(torch.float32).eval()
    model.generation_config = GenerationConfig(
        eos_token_id=EOS_ID, pad_token_id=PAD_ID, do_sample=True, temperature=1.0, top_p=1.0, top_k=0
    )
    model.save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
    return folder


def make_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Build the byte-level tokenizer: no merges, one token per byte, four special tokens."""
    vocabulary = {character: byte for byte, character in _byte_characters().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS_TOKEN, PAD_TOKEN, USER_TOKEN, ASSISTANT_TOKEN])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        additional_special_tokens=[USER_TOKEN, ASSISTANT_TOKEN],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def _config(tie_embeddings: bool, num_heads: int, num_kv_heads: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=2 * HIDDEN_SIZE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=HEAD_SIZE,
        max_position_embeddings=MAX_POSITIONS,
        # Wide enough that the logits of a random model differ by about 1, so that tests see real ratios.
        initializer_range=0.2,
        tie_word_embeddings=tie_embeddings,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        dtype="float32",
    )


def _byte_characters() -> dict[int, str]:
    """Return the printable character that byte-level tokenizers write for each byte (the GPT-2 table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}
