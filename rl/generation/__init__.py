"""Generators: token ids in, token ids with log-probabilities and version spans out."""
