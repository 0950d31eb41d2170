"""Prompts, datasets, tokenizers and pretrained model files."""
