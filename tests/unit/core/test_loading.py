"""Tests of rl.core.loading."""

import threading

from rl.core.loading import model_loading


def test_threads_take_turns() -> None:
    inside: list[int] = []
    most: list[int] = []

    def load(index: int) -> None:
        with model_loading():
            inside.append(index)
            most.append(len(inside))
            inside.remove(index)

    threads = [threading.Thread(target=load, args=(index,)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 16
