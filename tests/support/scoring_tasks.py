"""Tasks and set-ups for scoring processes, good and bad; imported by them, so kept light."""

import os
import signal
import subprocess
import sys
from pathlib import Path


def no_setup() -> None:
    pass


def fail_setup(text: str) -> None:
    raise ValueError(text)


def add(a: int, b: int) -> int:
    return a + b


def huge_power() -> int:
    return 9**9**9**9


def raise_error() -> None:
    raise RuntimeError("bad luck")


def own_pid() -> int:
    return os.getpid()


def signal_action(number: int) -> bool:
    return signal.getsignal(number) is signal.SIG_IGN


def give_a_function() -> object:
    return lambda: None


def start_a_child_and_hang(pid_file: str) -> None:
    child = subprocess.Popen(["sleep", "600"])
    Path(pid_file).write_text(str(child.pid))
    child.wait()


class WordlessError(Exception):
    """An error whose text cannot be made."""

    def __str__(self) -> str:
        raise ValueError("no words")


class WordlessValue:
    """A value that cannot be sent, for a reason that cannot be told."""

    def __reduce__(self) -> str:
        raise WordlessError


def raise_without_words() -> None:
    """Raise an error that has no text."""
    raise WordlessError


def give_a_wordless_value() -> object:
    """Return a value whose own code fails when it is pickled."""
    return WordlessValue()


def fork_and_forget(number: int) -> int:
    """Return the number, from a process that leaves a fork of itself behind, which leaves by an exception."""
    if os.fork() == 0:
        sys.exit(0)
    return number


def raise_a_long_error() -> None:
    """Raise an error with a text of a million characters."""
    raise RuntimeError("x" * 1_000_000)
