"""Addresses of this host: which one others reach it by, and whether one is its own. Free of torch."""

import socket
from contextlib import suppress

# Any address that is not of this host tells which network leads outside; nothing is sent to these two.
_OUTSIDE = ((socket.AF_INET, ("192.0.2.1", 9)), (socket.AF_INET6, ("2001:db8::1", 9)))


def own_address() -> str:
    """Return this host's address on the network that leads outside, or the loopback's where none does."""
    for family, outside in _OUTSIDE:
        # No such network, or not even its protocol: the next.
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(outside)  # a datagram socket: nothing is sent
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def check_own_host(host: str) -> None:
    """Refuse an address at which no process of this host can listen.

    Raises:
        OSError: it is another host's, or a name that is not known.
        UnicodeError: it is no name.
    """
    failure: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except OSError as error:
            failure = error
        else:
            return
    if failure is not None:
        raise failure
