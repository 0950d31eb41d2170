"""Refit: how trained weights reach the generators, and the proof that they did."""
