"""Waiting for several coroutines as one. It knows no workers, no deadlines and no retries."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

R = TypeVar("R")


async def gather_or_cancel(work: Sequence[Coroutine[Any, Any, R]]) -> list[R]:
    """Run coroutines together; results in order.

    Nothing that was started outlives the call: the first failure, and a cancellation from outside, cancel the others
    and wait for their end before they are raised.

    Raises:
        BaseException: what the first failing coroutine raised; of several that fail at once, the first in order.
    """
    tasks = [asyncio.ensure_future(one) for one in work]
    if not tasks:
        return []
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        ended = [task for task in tasks if task.done()]
        for task in ended:
            task.result()
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        # Every result is either taken or moot by now; reading the late failures keeps asyncio from reporting them.
        await asyncio.gather(*tasks, return_exceptions=True)
