"""A random two-layer sequence classifier with the byte-level tokenizer, as a Hugging Face folder: a reward model."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from tests.support.tiny_model import EOS_ID, PAD_ID, VOCAB_SIZE, make_tiny_tokenizer

Kind = type[LlamaForSequenceClassification] | type[LlamaForCausalLM]


def make_classifier(
    folder: Path,
    kind: Kind = LlamaForSequenceClassification,
    pad: int | None = PAD_ID,
    labels: int = 1,
    template: bool = True,
    *,
    seed: int = 3,
) -> Path:
    """Write the model into `folder` and return it; it reads 64 tokens.

    Args:
        folder: Created when missing.
        kind: A classifier, or a language model that only looks like one.
        pad: Its padding token; None when it knows none.
        labels: Numbers that it gives.
        template: Whether its tokenizer has a chat template.
        seed: Of the weights.
    """
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        pad_token_id=pad,
        eos_token_id=EOS_ID,
        num_labels=labels,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config)
        if kind is LlamaForSequenceClassification:
            torch.nn.init.normal_(model.score.weight, std=2.0)
    model.save_pretrained(folder)
    tokenizer = make_tiny_tokenizer()
    if not template:
        tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    return folder
