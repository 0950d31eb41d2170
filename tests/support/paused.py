"""Pausing and resuming every replica of a generator, as a refit does."""

import asyncio

from rl.weights.fleet import Refittable
from rl.weights.transport import PauseMode


async def pause(generator: Refittable, mode: PauseMode) -> None:
    """Stop all replicas."""
    await asyncio.gather(*(receiver.pause(mode) for receiver in generator.weight_receivers()))


async def resume(generator: Refittable) -> None:
    """Let all replicas generate again."""
    await asyncio.gather(*(receiver.resume() for receiver in generator.weight_receivers()))
