"""Endless programs of the code environment end with their driver, also when it is killed, and with `close`."""

import os
import subprocess
import sys
import textwrap

import psutil

from tests.support.waiting import wait_until

DRIVER = textwrap.dedent(
    """
    import asyncio
    from rl.environments.code import CodeEnvironment
    from rl.environments.config import CodeEnvConfig, SandboxLimits
    from tests.support.completions import completion, episodes, text_prompt

    PROGRAM = '''```python
    import os, sys
    if os.fork() == 0:
        os.setsid()
        os.execv(sys.executable, [sys.executable, "-c", "while True: pass", "MARKER"])
    while True: pass
    ```'''

    async def main():
        limits = SandboxLimits(wall_s=600, cpu_s=600)
        environment = CodeEnvironment("code", CodeEnvConfig(kind="code", timeout_s=600, num_workers=2, limits=limits))
        prompt = text_prompt(metadata={"tests": [{"stdin": "", "stdout": ""}]})
        running = asyncio.ensure_future(environment.step(prompt, episodes([completion(PROGRAM)] * 3)))
        await asyncio.to_thread(sys.stdin.readline)
        await environment.close()
        print(sorted({result.status.value for result in await running}), flush=True)
        await asyncio.to_thread(sys.stdin.readline)

    import sys
    asyncio.run(main())
    """
)


def start(tmp_path, marker):
    """Start a driver with two endless programs and wait until both run."""
    script = tmp_path / "driver.py"
    script.write_text(DRIVER.replace("MARKER", marker))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    driver = subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    )
    wait_until(lambda: len(running(marker)) == 2, "two endless programs", 60.0)
    return driver


def running(marker):
    """Pids of the programs' daemons."""
    commands = {process.pid: process.info["cmdline"] for process in psutil.process_iter(["cmdline"])}
    return [pid for pid, command in commands.items() if marker in (command or [])]


def test_a_killed_driver_leaves_no_program(tmp_path):
    marker = f"endless-of-{os.getpid()}-killed"
    driver = start(tmp_path, marker)
    driver.kill()
    driver.communicate(timeout=10)
    wait_until(lambda: not running(marker), "the end of the programs")


def test_closing_ends_programs_that_run(tmp_path):
    marker = f"endless-of-{os.getpid()}-closed"
    driver = start(tmp_path, marker)
    assert driver.stdin is not None and driver.stdout is not None
    driver.stdin.write("close\n")
    driver.stdin.flush()
    wait_until(lambda: not running(marker), "the end of the programs")
    driver.communicate(timeout=20)
