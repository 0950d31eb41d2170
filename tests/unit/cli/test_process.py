"""The process is prepared before anything heavy is imported."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tandem_command import ROOT, run_python, run_tandem

# Imports a module that waits inside its import, as a large library does, and says when it has begun.
WAITING_IMPORT = """
import sys
from rl.cli.process import prepare_process
prepare_process()
from rl.core.imports import import_object
import_object("slow_module:thing")
"""
SLOW_MODULE = """
import sys, threading
sys.stdout.write("importing\\n")
sys.stdout.flush()
try:
    threading.Event().wait(60)
except KeyboardInterrupt as error:
    raise ModuleNotFoundError("turned into another error", name="slow_module") from error
thing = 1
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_an_import_is_an_interruption(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "slow_module.py").write_text(SLOW_MODULE)
    paths = os.pathsep.join([str(ROOT), str(tmp_path), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING_IMPORT],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "interrupted\n"


def test_closed_standard_streams_are_opened_so_that_no_file_takes_their_place(tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "for number in (0, 1): os.close(number)\n"
        "sys.stdout = None\n"
        "from rl.cli.process import prepare_process\n"
        "prepare_process()\n"
        "print('into nowhere')\n"
        "file = open('some_file', 'w')\n"
        "assert file.fileno() > 2, file.fileno()\n"
    )
    result = run_python(["-c", program], tmp_path)
    assert (result.exit_code, result.stderr) == (0, "")
    assert (tmp_path / "some_file").read_text() == ""


def test_a_command_whose_output_is_ascii_does_not_fail(tmp_path: Path) -> None:
    arguments = ["train", "--dry-run", "logger.log_dir=größe"]
    result = run_tandem(arguments, tmp_path, PYTHONIOENCODING="ascii", LC_ALL="C.UTF-8")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "run folder: gr\\xf6\\xdfe" in result.stdout
