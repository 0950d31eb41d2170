"""How an abort reaches a process of an engine while it receives: its event loop is in the transfer and hears nothing.

Each process listens on an abstract Unix datagram socket, which has a name but no file: it ends with its process,
also with one that is killed. The driver's side sends the reason there. It works on one host; elsewhere the sender's own
abort crosses the link.
"""

import logging
import secrets
import socket
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)

_MAX_BYTES = 8192


def new_name() -> str:
    """Return a name that no other engine has."""
    return f"tandem-refit-{secrets.token_hex(8)}"


def send_abort(name: str, reader: int, reason: str) -> bool:
    """Tell one reader to give up; False when nobody listens there any more."""
    return _send(_address(name, reader), reason.encode()[:_MAX_BYTES] or b"aborted")


class AbortLine:
    """Listens for aborts, in a thread, until it is closed.

    Args:
        name: Of the engine, from `new_name`.
        reader: This process.
        abort: Called with each reason, in the listening thread.
    """

    def __init__(self, name: str, reader: int, abort: Callable[[str], None]) -> None:
        self._address = _address(name, reader)
        self._abort = abort
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self._address)
        self._thread = threading.Thread(target=self._listen, name=f"refit-abort-{reader}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; idempotent."""
        if self._socket.fileno() >= 0:
            self._socket.shutdown(socket.SHUT_RD)  # the thread hears of the end after what is queued, however full
            self._thread.join()
            self._socket.close()

    def _listen(self) -> None:
        while reason := self._socket.recv(_MAX_BYTES):
            try:
                self._abort(reason.decode(errors="replace"))
            except Exception:
                _log.exception("a refit could not be aborted")


def _address(name: str, reader: int) -> bytes:
    return f"\0{name}-{reader}".encode()


def _send(address: bytes, message: bytes) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        try:
            sender.sendto(message, address)
        except (ConnectionRefusedError, BrokenPipeError, BlockingIOError):
            # Nobody is there, or not for long any more, or unread aborts fill its queue already.
            return False
    return True
