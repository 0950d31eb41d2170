"""Aborts reach a process beside whatever it does, and go nowhere when it is gone."""

import queue
import subprocess
import sys
import threading

from rl.generation.vllm.abort_line import AbortLine, new_name, send_abort

WAIT_S = 10.0


def test_a_reason_arrives_at_the_right_reader_until_the_line_is_closed() -> None:
    name = new_name()
    heard: list[queue.Queue[str]] = [queue.Queue(), queue.Queue()]
    lines = [AbortLine(name, reader, heard[reader].put) for reader in (0, 1)]
    try:
        assert send_abort(name, 1, "the trainer is gone")
        assert heard[1].get(timeout=WAIT_S) == "the trainer is gone"
        assert send_abort(name, 1, "")
        assert heard[1].get(timeout=WAIT_S) == "aborted"
        assert heard[0].empty()
    finally:
        for line in lines:
            line.close()
            line.close()
    assert not send_abort(name, 0, "too late")
    assert [thread for thread in threading.enumerate() if thread.name.startswith("refit-abort")] == []


def test_an_abort_that_fails_does_not_end_the_line() -> None:
    name = new_name()
    heard: queue.Queue[str] = queue.Queue()

    def abort(reason: str) -> None:
        heard.put(reason)
        raise RuntimeError("planted")

    line = AbortLine(name, 0, abort)
    try:
        assert send_abort(name, 0, "one") and send_abort(name, 0, "two")
        assert [heard.get(timeout=WAIT_S), heard.get(timeout=WAIT_S)] == ["one", "two"]
    finally:
        line.close()


def test_a_line_whose_queue_is_full_of_aborts_can_be_closed() -> None:
    name = new_name()
    heard: queue.Queue[str] = queue.Queue()
    go_on = threading.Event()

    def abort(reason: str) -> None:
        heard.put(reason)
        go_on.wait(WAIT_S)

    line = AbortLine(name, 0, abort)
    assert send_abort(name, 0, "first")
    assert heard.get(timeout=WAIT_S) == "first"
    while send_abort(name, 0, "more"):
        pass
    closing = threading.Thread(target=line.close, daemon=True)
    closing.start()
    go_on.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert heard.qsize() > 1
    assert not send_abort(name, 0, "too late")


def test_a_killed_process_leaves_no_line() -> None:
    name = new_name()
    code = (
        "import sys\nfrom rl.generation.vllm.abort_line import AbortLine\n"
        f"AbortLine({name!r}, 0, lambda reason: None)\nprint('up', flush=True)\nsys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        assert send_abort(name, 0, "still there")
    finally:
        process.kill()
        process.communicate(timeout=WAIT_S)
    assert not send_abort(name, 0, "gone")
