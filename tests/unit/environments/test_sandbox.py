"""Programs that try to get out of the sandbox, or to stay in it for ever; each runs for real."""

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from rl.core.errors import ConfigError
from rl.environments.config import SandboxLimits
from rl.environments.sandbox import find_sandbox, run_code
from rl.environments.sandbox_process import Ending
from tests.support.waiting import wait_until

LIMITS = SandboxLimits(wall_s=20.0, cpu_s=5, processes=8, file_mib=1, scratch_mib=2)
BRIEF = LIMITS.model_copy(update={"wall_s": 0.5})


def run(code, limits=LIMITS, stdin="", **values):
    """Run a program in which $NAME stands for the representation of a value."""
    text = textwrap.dedent(code)
    for name, value in values.items():
        text = text.replace(f"${name}", repr(value))
    return run_code(text, limits, stdin)


def printed(code, **values):
    """What a program prints that must end well."""
    outcome = run(code, **values)
    assert outcome.is_success, outcome
    return outcome.stdout.strip()


def processes_with(marker):
    """Pids of all processes on this machine with the marker in their command line, but for the test's own."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        if any(marker in part for part in process.info["cmdline"] or ()) and process.pid != os.getpid():
            found.append(process.pid)
    return found


def test_a_program_reads_its_input_prints_and_has_an_exit_code():
    outcome = run("import sys; print(input() + 'ß'); print('oops', file=sys.stderr); sys.exit(3)", stdin="grüße\n")
    assert (outcome.ending, outcome.exit_code) == (Ending.EXITED, 3) and not outcome.is_success
    assert (outcome.stdout, outcome.stderr) == ("grüßeß\n", "oops\n")
    assert run("import os; os.abort()").exit_code == 134
    assert run("print('a\\0b'); 1 +").exit_code == 1
    assert run("import os; os.write(1, b'\\xff')").stdout == "\N{REPLACEMENT CHARACTER}"


def test_the_standard_library_is_there_and_nothing_else():
    assert printed("import ctypes, decimal, hashlib, json, re, sqlite3, ssl, zlib; print('ok')") == "ok"
    assert "ModuleNotFoundError" in run("import pydantic").stderr


def test_no_file_of_the_caller_can_be_read(tmp_path):
    (tmp_path / "secret").write_text("secret")
    paths = [
        "/etc/shadow",
        "/etc/passwd",
        "/proc/1/environ",
        "/proc/self/environ",
        "/sys/kernel",
        "/run",
        "/var",
        "/usr/bin/env",
    ]
    paths += [
        str(tmp_path / "secret"),
        __file__,
        os.getcwd(),
        str(Path.home() / ".bashrc"),
        str(Path.home() / ".cache"),
    ]
    seen = printed("import os; print([path for path in $PATHS if os.path.lexists(path)])", PATHS=paths)
    assert seen == "[]"


def test_links_lead_nowhere(tmp_path):
    (tmp_path / "secret").write_text("secret")
    code = """
        import os
        for number, target in enumerate($TARGETS):
            os.symlink(target, f"/tmp/link{number}")
            try:
                print(open(f"/tmp/link{number}/../" + target).read() or open(f"/tmp/link{number}").read())
            except OSError:
                pass
        """
    assert printed(code, TARGETS=["/etc/shadow", str(tmp_path / "secret"), "/proc/1/root/etc/shadow", "/"]) == ""


def test_only_tmp_can_be_written_and_it_is_private():
    code = """
        import os, sys
        for folder, _, files in os.walk("/"):
            for name in [*files[:3], "new-file"]:
                try:
                    open(os.path.join(folder, name), "a").write("x")
                    print(os.path.join(folder, name))
                except OSError:
                    pass
        """
    written = set(printed(code).split())
    assert written == {"/tmp/new-file", "/dev/null", "/dev/urandom"}
    assert not Path("/tmp/new-file").exists()


def test_the_network_is_out_of_reach():
    name = f"\0tandem-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(name)
        local.listen()
        code = """
            import socket
            for family, address in [(socket.AF_INET, ("127.0.0.1", $PORT)), (socket.AF_UNIX, $NAME)]:
                try:
                    socket.socket(family).connect(address)
                    print("connected")
                except OSError as error:
                    print(type(error).__name__)
            for family in (socket.AF_INET6, socket.AF_NETLINK, socket.AF_PACKET, socket.AF_VSOCK):
                try:
                    socket.socket(family, socket.SOCK_RAW)
                    print("made")
                except OSError:
                    pass
            """
        assert printed(code, PORT=server.getsockname()[1], NAME=name).split() == ["OSError", "ConnectionRefusedError"]


def test_no_variable_of_the_caller_leaks(monkeypatch):
    monkeypatch.setenv("TOKEN", "secret")
    assert set(printed("import os; print(*os.environ)").split()) <= {"LC_CTYPE"}


def test_no_descriptor_of_the_caller_leaks(tmp_path):
    with (tmp_path / "file").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        code = """
            import os
            def is_open(number):
                try:
                    return bool(os.fstat(number))
                except OSError:
                    return False
            print([number for number in range(1024) if is_open(number)])
            try:
                os.ftruncate(0, 1 << 20)
                print("grown")
            except OSError:
                pass
            """
        assert printed(code) == "[0, 1, 2]"


def test_no_process_outside_can_be_seen_or_signalled():
    code = """
        import os, signal
        for pid in ($CALLER, os.getppid(), 1):
            try:
                os.kill(pid, signal.SIGKILL)
                print(pid)
            except OSError:
                pass
        try:
            os.kill(-1, signal.SIGKILL)
        except OSError:
            pass
        """
    outcome = run(code, CALLER=os.getpid())
    # Inside a user namespace the signal to the sandbox's first process is allowed, and ignored by the kernel.
    assert outcome.is_success and set(outcome.stdout.split()) <= {"1"}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of system calls are those of x86_64")
@pytest.mark.parametrize(
    ("number", "arguments"),
    [
        (101, (16, 1, 0, 0)),  # ptrace(PTRACE_ATTACH)
        (310, (1, 0, 0, 0, 0, 0)),  # process_vm_readv
        (272, (0x10000000,)),  # unshare(CLONE_NEWUSER)
        (56, (0x10000000 | 17, 0, 0, 0, 0)),  # clone(CLONE_NEWUSER)
        (165, (0, 0, 0, 0, 0)),  # mount
        (319, (0, 0)),  # memfd_create
        (425, (1, 0)),  # io_uring_setup
        (321, (0, 0, 0)),  # bpf
        (29, (0, 4096, 0o1600)),  # shmget
        (105, (0,)),  # setuid(0)
        (106, (0,)),  # setgid(0)
    ],
)
def test_dangerous_system_calls_are_refused(number, arguments):
    code = """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        result = libc.syscall($NUMBER, *map(ctypes.c_long, $ARGUMENTS))
        print(result, ctypes.get_errno() in (1, 22))
        """
    assert printed(code, NUMBER=number, ARGUMENTS=arguments) == "-1 True"


def test_a_fork_bomb_meets_its_limit():
    code = """
        import os, time
        count = 0
        try:
            while True:
                if os.fork() == 0:
                    time.sleep(600)
                count += 1
        except BlockingIOError:
            print(count)
        """
    outcome = run(code)
    assert outcome.is_success and int(outcome.stdout) == LIMITS.processes - 1
    assert run("import os\nwhile True: os.fork()", BRIEF).ending in (Ending.EXITED, Ending.TIMEOUT, Ending.OUTPUT)


def test_threads_count_as_processes():
    code = """
        import threading
        event = threading.Event()
        try:
            for count in range(100):
                threading.Thread(target=event.wait, daemon=True).start()
        except RuntimeError:
            print(count)
        """
    assert int(printed(code)) == LIMITS.processes - 1


def test_a_memory_bomb_ends_in_one_process_and_over_several():
    assert run("x = bytearray(1 << 40)").ending is Ending.MEMORY
    many = """
        import os, time
        for _ in range(4):
            if os.fork() == 0:
                x = bytearray(b"x" * (100 << 20))
                time.sleep(600)
        time.sleep(600)
        """
    limits = LIMITS.model_copy(update={"memory_mib": 250})
    outcome = run(many, limits)
    assert outcome.ending is Ending.MEMORY and outcome.exit_code is None


def test_memory_cannot_be_hidden_in_objects_that_outlive_their_mappings():
    code = """
        import mmap
        for descriptor, flags in ((-1, mmap.MAP_SHARED), (-1, mmap.MAP_PRIVATE)):
            try:
                mmap.mmap(descriptor, 4096, flags)
                print("mapped")
            except PermissionError:
                print("refused")
        with open("/tmp/file", "w+b") as file:
            file.truncate(4096)
            mmap.mmap(file.fileno(), 4096)
        try:
            open("/dev/zero", "r+b")
        except FileNotFoundError:
            print("no zeros")
    """
    assert printed(code).split("\n") == ["refused", "mapped", "no zeros"]


def test_an_endless_loop_or_sleep_ends_at_the_deadline():
    for code in (
        "while True: pass",
        "import time; time.sleep(600)",
        "9**9**9**9",
        "input(); import os; os.close(1); os.close(2)\nwhile 1: pass",
    ):
        outcome = run(code, BRIEF, stdin="\n")
        assert outcome.ending is Ending.TIMEOUT and outcome.wall_s < 10.0


def test_processor_time_is_bounded_too():
    limits = LIMITS.model_copy(update={"cpu_s": 1})
    assert run("while True: pass", limits).ending is Ending.TIMEOUT
    stubborn = run("import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", limits)
    assert stubborn.exit_code == 137


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output_ends_at_its_bound(stream):
    outcome = run(f"import sys\nwhile True: sys.{stream}.write('x' * 100_000)")
    assert outcome.ending is Ending.OUTPUT
    assert len(outcome.stdout) + len(outcome.stderr) == LIMITS.output_kib * 1024


def test_a_huge_file_and_many_files_meet_their_limits():
    code = """
        for count in range(100):
            try:
                with open(f"/tmp/{count}", "wb") as file:
                    file.write(bytes($SIZE))
            except OSError as error:
                print(count, error.errno)
                break
        """
    assert printed(code, SIZE=(1 << 20) + 1) == "0 27"  # EFBIG
    assert printed(code, SIZE=1 << 19) == "4 28"  # ENOSPC


def test_endlessly_many_empty_files_end_the_program():
    outcome = run("import itertools\nfor n in itertools.count(): open(f'/tmp/{n}', 'w').close()")
    assert outcome.ending is Ending.MEMORY


DAEMON = """
    import os, sys
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 3)
            os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", $MARKER])
        os._exit(0)
    os.wait()
    """


@pytest.mark.parametrize("end", ["", "while True: pass", "import os; os.kill(os.getpid(), 9)"])
def test_a_daemon_does_not_outlive_its_program(end):
    marker = f"daemon-of-{os.getpid()}-{len(end)}"
    run(textwrap.dedent(DAEMON) + end, BRIEF, MARKER=marker)
    assert processes_with(marker) == []


def test_a_deadline_shorter_than_the_sandbox_s_own_start_is_the_program_s_alone():
    assert run("while True: pass", BRIEF.model_copy(update={"wall_s": 0.0001})).ending is Ending.TIMEOUT


def test_nothing_is_left_when_the_caller_is_killed(tmp_path):
    marker = f"orphan-of-{os.getpid()}"
    script = tmp_path / "caller.py"
    code = textwrap.dedent(DAEMON).replace("$MARKER", repr(marker)) + "while True: pass"
    script.write_text(
        "from rl.environments.config import SandboxLimits\nfrom rl.environments.sandbox import run_code\n"
        f"run_code({code!r}, SandboxLimits(wall_s=600, cpu_s=600))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    caller = subprocess.Popen([sys.executable, str(script)], env=environment)
    wait_until(lambda: bool(processes_with(marker)), "the program's daemon", 60.0)
    caller.kill()
    caller.wait(10)
    wait_until(lambda: not processes_with(marker), "the end of the daemon")


def test_a_process_that_prepared_itself_leaves_no_dead_process_behind(tmp_path):
    script = tmp_path / "caller.py"
    script.write_text(
        "import psutil\nfrom rl.environments.config import SandboxLimits\n"
        "from rl.environments.sandbox import prepare_sandbox, run_code\n"
        "prepare_sandbox()\n"
        "for code in ('pass', 'while True: pass', 'print(1)'):\n    run_code(code, SandboxLimits(wall_s=0.5))\n"
        "print(psutil.Process().children())\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done


@pytest.fixture
def fresh_search():
    find_sandbox.cache_clear()
    yield
    find_sandbox.cache_clear()


def test_without_bubblewrap_nothing_runs(monkeypatch, tmp_path, fresh_search):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="apt-get install bubblewrap"):
        run_code("print(1)", LIMITS)


def test_a_bubblewrap_that_does_not_isolate_is_not_used(monkeypatch, tmp_path, fresh_search):
    fake = tmp_path / "bwrap"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    fake.write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    with pytest.raises(ConfigError, match="cannot isolate here .*No permissions to create new namespace"):
        find_sandbox()
    fake.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done; shift\nexec "$@"\n')
    with pytest.raises(ConfigError, match="cannot isolate here"):
        find_sandbox()
