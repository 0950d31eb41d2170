"""The tiny model loads with the libraries' own loaders and its tokenizer is the identity on bytes."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.tiny_model import ASSISTANT_ID, EOS_ID, PAD_ID, USER_ID, VOCAB_SIZE, make_tiny_model


def test_tokenizer_maps_every_byte_to_its_own_id_and_back(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_tiny_model(tmp_path))
    text = "2+3=5\n é\t"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (EOS_ID, PAD_ID, VOCAB_SIZE)


def test_chat_template_marks_roles(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_tiny_model(tmp_path))
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    ids = rendered["input_ids"] if not isinstance(rendered, list) else rendered
    assert list(ids) == [USER_ID, *b"hi", ASSISTANT_ID]


@pytest.mark.parametrize("tied", [True, False])
def test_same_seed_gives_the_same_weights_and_tying_is_as_asked(tmp_path: Path, tied: bool) -> None:
    first = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path / "a", seed=3, tie_embeddings=tied))
    again = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path / "b", seed=3, tie_embeddings=tied))
    other = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path / "c", seed=4, tie_embeddings=tied))
    tokens = torch.tensor([[1, 2, 3, 250]])
    assert torch.equal(first(tokens).logits, again(tokens).logits)
    assert not torch.equal(first(tokens).logits, other(tokens).logits)
    assert first(tokens).logits.std() > 0.5
    assert (first.lm_head.weight is first.model.embed_tokens.weight) == tied
