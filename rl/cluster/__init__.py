"""Processes and devices: where workers run and how they are called. Knows nothing about RL."""
