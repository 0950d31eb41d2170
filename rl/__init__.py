"""Tandem: reinforcement-learning post-training for large language models.

Importing this package imports nothing else: no torch, ray, vllm or transformers.
"""

__version__ = "0.1.0"
