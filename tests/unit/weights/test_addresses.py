"""Which address is this host's own, also where the network speaks IPv6 alone."""

import os
import socket
import subprocess
import sys

import pytest

from rl.weights.addresses import check_own_host, own_address

# In a network of its own: a cable whose other end nobody holds stands for the one that leads outside.
_IN_A_NETWORK = """
import subprocess
from rl.weights.addresses import own_address
def ip(*commands):
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True)
ip("link set lo up")
print("none:", own_address())
ip("link add out0 type veth peer name out1", "link set out0 up", "link set out1 up")
ip("addr add fd00::7/64 dev out0 nodad", "-6 route add default via fd00::1 dev out0")
print("IPv6 alone:", own_address())
ip("addr add 10.9.8.7/24 dev out0", "route add default via 10.9.8.1")
print("both:", own_address())
"""


def test_the_own_address_is_that_of_the_network_that_leads_outside() -> None:
    work = ["unshare", "--net", sys.executable, "-c", _IN_A_NETWORK]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(work, capture_output=True, text=True, timeout=60, env=environment)
    if "Operation not permitted" in done.stderr:
        pytest.skip("a network of its own needs root")
    assert done.stdout.splitlines() == ["none: 127.0.0.1", "IPv6 alone: fd00::7", "both: 10.9.8.7"], done.stderr


def test_the_own_address_can_be_listened_at() -> None:
    check_own_host(own_address())


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_an_address_of_this_host_passes(host: str) -> None:
    if host == "::1" and not _has_ipv6():
        pytest.skip("this machine has no IPv6 loopback")
    check_own_host(host)


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "no-such-host.invalid"])
def test_an_address_of_another_host_or_of_none_is_refused(host: str) -> None:
    with pytest.raises(OSError):
        check_own_host(host)


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
