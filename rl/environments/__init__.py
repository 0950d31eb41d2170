"""Environments: they observe a completion and give the reward."""
