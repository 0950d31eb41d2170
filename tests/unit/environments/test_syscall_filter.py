"""The filter as a program: every step is run by a small interpreter of classic BPF."""

import errno
import struct

import pytest

from rl.core.errors import ConfigError
from rl.environments.syscall_filter import build_filter

ALLOWED, REFUSED, KILLED = 0x7FFF0000, 0x00050000, 0x80000000
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def verdict(program, machine, number, *arguments):
    """Run the filter on one system call."""
    call = struct.pack("=IIQ6Q", number, machine, 0, *arguments, *[0] * (6 - len(arguments)))
    steps = [struct.unpack_from("=HBBI", program, offset) for offset in range(0, len(program), 8)]
    value, position = 0, 0
    while True:
        operation, when_true, when_false, operand = steps[position]
        position += 1
        match operation:
            case 0x20:
                value = struct.unpack_from("=I", call, operand)[0]
            case 0x06:
                return operand
            case _:
                holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[operation]
                position += when_true if holds else when_false


@pytest.mark.parametrize(
    ("machine", "number", "argument", "expected"),
    [
        ("x86_64", 0, 0, ALLOWED),  # read
        ("x86_64", 231, 0, ALLOWED),  # exit_group
        ("x86_64", 101, 0, REFUSED | errno.EPERM),  # ptrace
        ("x86_64", 154, 0, REFUSED | errno.EPERM),  # modify_ldt
        ("x86_64", 447, 0, REFUSED | errno.EPERM),  # memfd_secret
        ("x86_64", 41, 1, ALLOWED),  # socket(AF_UNIX)
        ("x86_64", 41, 2, REFUSED | errno.EAFNOSUPPORT),  # socket(AF_INET)
        ("x86_64", 41, 40, REFUSED | errno.EAFNOSUPPORT),  # socket(AF_VSOCK)
        ("x86_64", 56, 17, ALLOWED),  # fork
        ("x86_64", 56, 0x3D0F00, ALLOWED),  # a thread
        ("x86_64", 56, 0x10000011, REFUSED | errno.EPERM),  # clone(CLONE_NEWUSER)
        ("x86_64", 435, 0, REFUSED | errno.ENOSYS),  # clone3
        ("x86_64", 0x40000000, 0, REFUSED | errno.ENOSYS),  # the second set of calls
        ("aarch64", 63, 0, ALLOWED),  # read
        ("aarch64", 117, 0, REFUSED | errno.EPERM),  # ptrace
        ("aarch64", 101, 0, ALLOWED),  # nanosleep
        ("aarch64", 198, 2, REFUSED | errno.EAFNOSUPPORT),
        ("aarch64", 198, 1, ALLOWED),
        ("aarch64", 220, 0x20000000, REFUSED | errno.EPERM),
        ("aarch64", 220, 17, ALLOWED),
    ],
)
def test_each_call_gets_its_verdict(machine, number, argument, expected):
    assert verdict(build_filter(machine), MACHINES[machine], number, argument) == expected


@pytest.mark.parametrize(("machine", "mmap"), [("x86_64", 9), ("aarch64", 222)])
def test_memory_is_shared_through_files_alone(machine, mmap):
    shared, private, anonymous = 0x01, 0x02, 0x20
    verdicts = [
        verdict(build_filter(machine), MACHINES[machine], mmap, 0, 4096, 3, flags)
        for flags in (private | anonymous, shared, private, shared | anonymous)
    ]
    assert verdicts == [ALLOWED, ALLOWED, ALLOWED, REFUSED | errno.EPERM]


def test_calls_of_another_machine_end_the_program():
    assert verdict(build_filter("x86_64"), 0x40000003, 4) == KILLED


def test_an_unknown_machine_is_refused():
    with pytest.raises(ConfigError, match="riscv64"):
        build_filter("riscv64")
