"""The vLLM generator: worker, weight receiver and settings."""
