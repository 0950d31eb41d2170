"""Tensor functions without state: log-probabilities, masks, KL estimators, packing."""
