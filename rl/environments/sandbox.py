"""Run untrusted Python code in a sandbox of bubblewrap: namespaces, a system call filter and limits.

The program sees the interpreter with its standard library (read-only), its own file, two devices and an empty /tmp
of bounded size. It has no network, no environment, no capabilities, no other processes and none of the caller's files.
It ends, with everything that it started, at its deadline, at a limit, or when the caller dies. There is no weaker way:
where bubblewrap is missing or cannot isolate, `find_sandbox` raises. What the output means is the caller's business.

    outcome = run_code("print(input())", SandboxLimits(), stdin="hello")
    outcome.ending is Ending.EXITED and outcome.exit_code == 0 and outcome.stdout == "hello\\n"

A call blocks; call it in a scoring process or a thread. Consumes: the code. Produces: one SandboxOutcome. Waits for:
the start of the sandbox, the program's end, at most `wall_s`, then that of its processes. Unblocked by: its end, a
limit, the deadline.
"""

import fcntl
import functools
import json
import os
import secrets
import shutil
import signal
import subprocess
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import IO

from rl.core.errors import ConfigError, InfraError
from rl.environments.config import SandboxLimits
from rl.environments.interpreter_files import InterpreterFiles, find_interpreter_files
from rl.environments.sandbox_process import Ending, SandboxProcess, adopt_orphans, is_readable
from rl.environments.syscall_filter import build_filter

MISSING = "bubblewrap (the program bwrap) is not installed; install it (Debian: apt-get install bubblewrap)"
PROGRAM = "/main.py"
_PROBE_WALL_S = 30.0
_START_S = 30.0
_MIB = 1 << 20
_USERS = 1 << 30  # unused ones begin here
_NOBODY = "65534"
# Without /dev/zero: a shared mapping of it is memory that no limit counts.
_DEVICES = ("/dev/null", "/dev/urandom")
_CPU_SIGNAL_EXIT = 128 + signal.SIGXCPU

# The first program in the sandbox: it sets the limits for good, gives up what bubblewrap left (user 0, as root),
# says that all is in place, and becomes the untrusted one.
_LAUNCHER = """
import json, os, resource, sys
start = json.loads(sys.argv[1])
for name, value in start["limits"].items():
    resource.setrlimit(getattr(resource, name), tuple(value))
if start["user"]:
    os.setgroups([])
    os.setresgid(*[start["user"]] * 3)
    os.setresuid(*[start["user"]] * 3)
os.write(start["ready"], b"1")
os.closerange(3, start["descriptors"])
os.execve(sys.executable, [sys.executable, "-I", "-B", "-X", "utf8", start["program"]], {})
"""

# What a sandbox must keep its promise about before it is used; prints what is wrong.
_PROBE = """
import os, socket
if os.path.exists("/proc/self") or os.path.exists("/etc/passwd"):
    print("the caller's files can be seen")
try:
    socket.create_connection(("127.0.0.1", 9), 1)
except ConnectionError:
    print("sockets can be made")
except OSError:
    pass
try:
    if os.fork() == 0:
        os._exit(0)
    print("the number of processes is not limited")
except BlockingIOError:
    pass
"""


@dataclass(frozen=True)
class SandboxOutcome:
    """The end of one program.

    Attributes:
        ending: By itself, or at which limit. A program that exceeds another limit sees an error and mostly exits.
        exit_code: Its exit code, 128 + n when signal n ended it; None when the sandbox ended it.
        stdout: What it wrote, at most `output_kib` of both together; bytes that are no UTF-8 are replaced.
        stderr: As stdout.
        wall_s: How long it ran, in seconds, from its start to its end.
    """

    ending: Ending
    exit_code: int | None
    stdout: str
    stderr: str
    wall_s: float

    @property
    def is_success(self) -> bool:
        """Whether it ended by itself with exit code 0."""
        return self.ending is Ending.EXITED and self.exit_code == 0


@dataclass(frozen=True)
class Sandbox:
    """How this machine isolates.

    Attributes:
        program: Path of bwrap.
        as_root: Whether it needs no user namespace; the program then runs under an unused user of its own.
        files: What of the interpreter is shown.
        syscall_filter: The seccomp program.
    """

    program: str
    as_root: bool
    files: InterpreterFiles
    syscall_filter: bytes = field(repr=False)


def run_code(code: str, limits: SandboxLimits, stdin: str = "") -> SandboxOutcome:
    """Run a Python program until it ends or meets a limit.

    Args:
        code: The source of the program.
        limits: What it may use.
        stdin: What it reads on standard input.

    Raises:
        ConfigError: this machine has no sandbox.
        InfraError: the sandbox did not start, or something of it could not be ended.
    """
    return _run(find_sandbox(), code, limits, stdin)


def prepare_sandbox() -> None:
    """Get a scoring process ready for `run_code`, so that no deadline pays for it.

    Raises:
        ConfigError: this machine has no sandbox.
    """
    adopt_orphans()
    find_sandbox()


@functools.cache
def find_sandbox() -> Sandbox:
    """Find the way to isolate on this machine, and try that it does; once per process (about half a second).

    Raises:
        ConfigError: there is none; says why and what to do.
    """
    program = shutil.which("bwrap")
    if program is None:
        raise ConfigError(f"untrusted code cannot be run: {MISSING}")
    files, syscall_filter = find_interpreter_files(), build_filter()
    faults = []
    for as_root in (True, False) if os.geteuid() == 0 else (False,):
        sandbox = Sandbox(program, as_root, files, syscall_filter)
        fault = _fault(sandbox)
        if not fault:
            return sandbox
        faults.append(f"{'as root' if as_root else 'in a user namespace'}: {fault}")
    raise ConfigError(
        f"untrusted code cannot be run: {program} cannot isolate here ({'; '.join(faults)}). It needs version 0.7, and "
        "root with the right to mount (a container: --cap-add SYS_ADMIN), or another user and user namespaces (kernel "
        "5.14 or later, user.max_user_namespaces above 0, a container whose seccomp profile allows them); root inside "
        "another sandbox, such as Bazel's, has neither"
    )


def _fault(sandbox: Sandbox) -> str:
    """Return why a sandbox cannot be trusted; empty when it can."""
    try:
        outcome = _run(sandbox, _PROBE, SandboxLimits(processes=1, wall_s=_PROBE_WALL_S), "")
    except InfraError as error:
        return str(error)
    if outcome.is_success and not outcome.stdout:
        return ""
    return ", ".join(outcome.stdout.splitlines()) or f"its first program failed: {outcome.stderr.strip()[-200:]}"


def _run(sandbox: Sandbox, code: str, limits: SandboxLimits, stdin: str) -> SandboxOutcome:
    started = time.monotonic()
    with ExitStack() as stack:
        ready, ready_end = _pipe(stack)
        run = _start(sandbox, code, limits, stdin, ready_end, stack)
        ready_end.close()
        # Its own time begins where the program does: on a busy machine a start may take longer than a short deadline.
        is_ready = is_readable(ready.fileno(), started + _START_S)
        begun = time.monotonic()
        ending = run.watch(begun + (limits.wall_s if is_ready else 0.0), limits.memory_mib * _MIB, limits.scratch_files)
        exit_code = run.end()
        stdout, stderr = run.outputs()
        if not ready.read(1):
            raise InfraError(f"the sandbox did not start ({ending.value}): {stderr.strip()[-300:]}")
    if ending is Ending.EXITED:
        ending = _refined(run, exit_code, stderr)
    return SandboxOutcome(
        ending, exit_code if ending is Ending.EXITED else None, stdout, stderr, time.monotonic() - begun
    )


def _refined(run: SandboxProcess, exit_code: int, stderr: str) -> Ending:
    """Name the limit that the kernel kept for us, as far as it can be told."""
    if run.wrote_too_much:
        return Ending.OUTPUT
    if exit_code == _CPU_SIGNAL_EXIT:
        return Ending.TIMEOUT
    if exit_code and stderr.rstrip().rpartition("\n")[2].startswith("MemoryError"):
        return Ending.MEMORY
    return Ending.EXITED


def _start(
    sandbox: Sandbox, code: str, limits: SandboxLimits, stdin: str, ready_end: IO[bytes], stack: ExitStack
) -> SandboxProcess:
    """Start bubblewrap with the program; the stack ends it and closes its descriptors."""
    program = _sealed_file(code.encode(errors="replace"), stack)
    standard_input = _sealed_file(stdin.encode(errors="replace"), stack)
    syscall_filter = _sealed_file(sandbox.syscall_filter, stack)
    info, info_end = _pipe(stack)
    user = secrets.randbelow(_USERS) + _USERS if sandbox.as_root else 0
    passed = (program.fileno(), syscall_filter.fileno(), info_end.fileno(), ready_end.fileno())
    start = {
        "limits": _rlimits(limits, sandbox),
        "user": user,
        "ready": ready_end.fileno(),
        "descriptors": max(passed) + 1,
        "program": PROGRAM,
    }
    command = [
        *[sandbox.program, *_isolation(sandbox), "--seccomp", str(passed[1]), "--info-fd", str(passed[2])],
        *["--perms", "1777", "--size", str(limits.scratch_mib * _MIB), "--tmpfs", "/tmp", "--chdir", "/tmp"],
        *["--perms", "0444", "--ro-bind-data", str(passed[0]), PROGRAM, "--remount-ro", "/"],
        *["--", sandbox.files.executable, "-I", "-S", "-B", "-c", _LAUNCHER, json.dumps(start)],
    ]
    pipe = subprocess.PIPE
    process = stack.enter_context(
        subprocess.Popen(command, stdin=standard_input, stdout=pipe, stderr=pipe, pass_fds=passed, env={}, cwd="/")
    )
    run = SandboxProcess(process, info, limits.output_kib * 1024)
    stack.callback(run.end)
    info_end.close()
    return run


def _isolation(sandbox: Sandbox) -> list[str]:
    """The options of bwrap that do not depend on the program."""
    options = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    options += ["--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    if sandbox.as_root:
        options += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        options += ["--unshare-user", "--uid", _NOBODY, "--gid", _NOBODY]
    shown = [*sandbox.files.shown, *_DEVICES]
    # Parents before children, open to the program's user: bwrap would make them for root alone.
    for folder in sorted({str(parent) for path in shown for parent in PurePath(path).parents if parent.name}):
        options += ["--perms", "0755", "--dir", folder]
    for path in sandbox.files.shown:
        options += ["--ro-bind", path, path]
    for folder in sandbox.files.hidden:
        options += ["--tmpfs", folder, "--remount-ro", folder]
    for device in _DEVICES:
        options += ["--dev-bind", device, device]
    return options


def _rlimits(limits: SandboxLimits, sandbox: Sandbox) -> dict[str, tuple[int, int]]:
    """Soft and hard limits by their names in `resource`; they hold for each process, RLIMIT_NPROC for the user."""
    # In a user namespace the first process of the sandbox belongs to the same user.
    processes = limits.processes if sandbox.as_root else limits.processes + 1
    equal = {
        "RLIMIT_AS": limits.memory_mib * _MIB,
        "RLIMIT_NPROC": processes,
        "RLIMIT_NOFILE": limits.open_files,
        "RLIMIT_FSIZE": limits.file_mib * _MIB,
        "RLIMIT_CORE": 1,  # too little for a file, and no program of the machine gets a core either, as with 0
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
    }
    # A program may ignore the signal at the soft limit; the hard one kills.
    return {name: (value, value) for name, value in equal.items()} | {"RLIMIT_CPU": (limits.cpu_s, limits.cpu_s + 1)}


def _pipe(stack: ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    read, write = os.pipe()
    return stack.enter_context(os.fdopen(read, "rb", buffering=0)), stack.enter_context(
        os.fdopen(write, "wb", buffering=0)
    )


def _sealed_file(content: bytes, stack: ExitStack) -> IO[bytes]:
    """A file in memory that nobody can change or make grow, at its beginning."""
    descriptor = os.memfd_create("sandbox", os.MFD_ALLOW_SEALING)
    file = stack.enter_context(os.fdopen(descriptor, "r+b", buffering=0))
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return file
