"""What the process needs before anything else is imported: open standard streams, and signals that end it quietly.

Importing the libraries takes seconds, and some of them turn a KeyboardInterrupt within an import into other errors. So
until a run puts its own handlers in place (`rl.controller.interrupts`), Ctrl-C and SIGTERM end the process at once;
whatever runs beside it then is ended by the run's reaper. It imports only the standard library.
"""

import io
import os
import signal
import sys
from types import FrameType
from typing import TextIO

EXIT_INTERRUPTED = 130
_STANDARD_DESCRIPTORS = (0, 1, 2)


def prepare_process() -> None:
    """Open what is closed of the standard streams, and let the first signal end the process."""
    for descriptor in _STANDARD_DESCRIPTORS:
        _open_if_closed(descriptor)
    sys.stdout = _writable(sys.stdout, 1)
    sys.stderr = _writable(sys.stderr, 2)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end_at_once)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    """Leave without unwinding: the code that is interrupted belongs to any library."""
    os.write(2, b"interrupted\n")
    os._exit(EXIT_INTERRUPTED)


def _open_if_closed(descriptor: int) -> None:
    """Without this the next file that is opened would get a standard stream's number, and what is written to that."""
    try:
        os.fstat(descriptor)
    except OSError:
        nowhere = os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
        if nowhere != descriptor:
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
        os.set_inheritable(descriptor, True)


def _writable(stream: TextIO | None, descriptor: int) -> TextIO:
    """Return a stream that takes every text: a character that its encoding lacks is written as its number."""
    if stream is None:
        return os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return stream
