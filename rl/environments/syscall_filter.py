"""The seccomp filter of the sandbox: which system calls untrusted code may not make.

Python programs need none of them. They are the kernel's large surfaces (io_uring, bpf, user namespaces, mounts), other
processes' memory, memory that no limit counts (memfd, System V segments, shared memory without a file, which outlives
its mapping, pages given to pipes), and sockets of any family but unix: virtual sockets reach the host of a virtual
machine even from an own network namespace. The filter is classic BPF, see seccomp(2); namespaces and limits stand in
`rl.environments.sandbox`.
"""

import errno
import platform
import struct

from rl.core.errors import ConfigError

# audit(7) numbers of the machine, and of what differs between machines; from 424 on all machines agree.
_AUDIT_MACHINE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SOCKET = {"x86_64": 41, "aarch64": 198}
_CLONE = {"x86_64": 56, "aarch64": 220}
_MMAP = {"x86_64": 9, "aarch64": 222}
_CLONE3 = 435
# Numbers on x86_64 and on aarch64.
_REFUSED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "memfd_create": (319, 279),
    "vmsplice": (278, 75),
    "io_setup": (206, 0),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "quotactl": (179, 60),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "syslog": (103, 116),
    "personality": (135, 92),
    "vhangup": (153, 58),
    "fanotify_init": (300, 262),
}
_REFUSED_ON = {"x86_64": {"iopl": 172, "ioperm": 173, "modify_ldt": 154}, "aarch64": {}}
_REFUSED_EVERYWHERE = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "mount_setattr": 442,
    "memfd_secret": 447,
}

_CLONE_NEW_NAMESPACES = 0x7E020000
_AF_UNIX = 1
_MAP_SHARED = 0x01
_MAP_ANONYMOUS = 0x20
_X32_BIT = 0x40000000

# Offsets in struct seccomp_data, operations of classic BPF, verdicts of seccomp.
_NUMBER, _MACHINE, _ARGUMENT_0, _ARGUMENT_3 = 0, 4, 16, 40
_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000


def build_filter(machine: str | None = None) -> bytes:
    """Return the filter program as an array of struct sock_filter.

    Args:
        machine: As `platform.machine()`; None is this one.

    Raises:
        ConfigError: its system calls are not known here.
    """
    machine = machine if machine is not None else platform.machine()
    if machine not in _AUDIT_MACHINE:
        raise ConfigError(
            f"the sandbox has no system call filter for a {machine} machine, only for {', '.join(_AUDIT_MACHINE)}; "
            "use an environment without a sandbox here"
        )
    program = [
        _step(_LOAD, _MACHINE),
        _step(_JUMP_EQUAL, _AUDIT_MACHINE[machine], when_true=1),
        _step(_RETURN, _KILL_PROCESS),
        _step(_LOAD, _NUMBER),
        *_when(_JUMP_GREATER_EQUAL, _X32_BIT, _refusal(errno.ENOSYS)),
        # The C library falls back to clone, whose flags a filter can read.
        *_when(_JUMP_EQUAL, _CLONE3, _refusal(errno.ENOSYS)),
    ]
    column = list(_AUDIT_MACHINE).index(machine)
    refused = [numbers[column] for numbers in _REFUSED.values()]
    for number in [*refused, *_REFUSED_ON[machine].values(), *_REFUSED_EVERYWHERE.values()]:
        program += _when(_JUMP_EQUAL, number, _refusal(errno.EPERM))
    program += [
        _step(_JUMP_EQUAL, _SOCKET[machine], when_false=4),
        _step(_LOAD, _ARGUMENT_0),
        _step(_JUMP_EQUAL, _AF_UNIX, when_true=1),
        _refusal(errno.EAFNOSUPPORT),
        _step(_RETURN, _ALLOW),
        _step(_JUMP_EQUAL, _MMAP[machine], when_false=5),
        _step(_LOAD, _ARGUMENT_3),
        _step(_JUMP_ANY_BIT, _MAP_SHARED, when_false=2),
        _step(_JUMP_ANY_BIT, _MAP_ANONYMOUS, when_false=1),
        _refusal(errno.EPERM),
        _step(_RETURN, _ALLOW),
        _step(_JUMP_EQUAL, _CLONE[machine], when_false=3),
        _step(_LOAD, _ARGUMENT_0),
        _step(_JUMP_ANY_BIT, _CLONE_NEW_NAMESPACES, when_false=1),
        _refusal(errno.EPERM),
        _step(_RETURN, _ALLOW),
    ]
    return b"".join(program)


def _step(operation: int, value: int, when_true: int = 0, when_false: int = 0) -> bytes:
    """One struct sock_filter; the jumps count the steps that are passed over."""
    return struct.pack("=HBBI", operation, when_true, when_false, value)


def _when(comparison: int, value: int, verdict: bytes) -> list[bytes]:
    return [_step(comparison, value, when_false=1), verdict]


def _refusal(error: int) -> bytes:
    return _step(_RETURN, _ERRNO | error)
