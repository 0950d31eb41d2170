"""The scorer pool with real processes."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from rl.core.errors import ConfigError, InfraError
from rl.environments.pool import OutcomeKind, ScorerPool
from tests.support.scoring_tasks import (
    add,
    fail_setup,
    fork_and_forget,
    give_a_function,
    give_a_wordless_value,
    huge_power,
    no_setup,
    own_pid,
    raise_a_long_error,
    raise_error,
    raise_without_words,
    signal_action,
    start_a_child_and_hang,
)
from tests.support.waiting import wait_for_exit


@pytest.fixture
async def pool():
    pool = ScorerPool("test", num_workers=2, timeout_s=0.4, setup=no_setup)
    yield pool
    await pool.close()


async def test_values_come_back_from_other_processes(pool):
    outcomes = await asyncio.gather(*(pool.run(add, i, 1) for i in range(20)))
    assert [outcome.value for outcome in outcomes] == list(range(1, 21))
    assert (await pool.run(own_pid)).value != os.getpid()


async def test_a_task_that_raises_is_an_error_with_its_place(pool):
    outcome = await pool.run(raise_error)
    assert outcome.kind is OutcomeKind.ERROR
    assert "RuntimeError: bad luck" in outcome.detail and "scoring_tasks.py" in outcome.detail


async def test_a_long_error_is_cut(pool):
    assert 2000 < len((await pool.run(raise_a_long_error)).detail) < 3000


async def test_a_fork_that_a_task_leaves_behind_never_answers_the_next_one():
    pool = ScorerPool("forks", num_workers=1, timeout_s=5, setup=no_setup)
    outcomes = [await pool.run(fork_and_forget, number) for number in range(10)]
    assert [outcome.value for outcome in outcomes] == list(range(10))
    await pool.close()


async def test_a_result_that_cannot_be_pickled_is_an_error(pool):
    outcome = await pool.run(give_a_function)
    assert outcome.kind is OutcomeKind.ERROR and "cannot be sent back" in outcome.detail
    assert (await pool.run(add, 1, 1)).value == 2


async def test_an_error_whose_text_fails_is_an_error_and_costs_no_process(pool):
    await pool.ready()
    before = pool.worker_pids()
    outcome = await pool.run(raise_without_words)
    assert outcome.kind is OutcomeKind.ERROR
    assert "WordlessError: (no text: its __str__ raised ValueError)" in outcome.detail
    outcome = await pool.run(give_a_wordless_value)
    assert outcome.kind is OutcomeKind.ERROR and "cannot be sent back: WordlessError" in outcome.detail
    assert pool.worker_pids() == before


async def test_fifty_bombs_end_at_the_deadline_and_do_not_shrink_the_pool():
    pool = ScorerPool("bombs", num_workers=2, timeout_s=0.1, setup=no_setup)
    await pool.ready()
    outcomes = await asyncio.gather(*(pool.run(huge_power) for _ in range(50)))
    assert {outcome.kind for outcome in outcomes} == {OutcomeKind.TIMEOUT}
    after = await asyncio.gather(*(pool.run(add, i, i) for i in range(8)))
    assert [outcome.value for outcome in after] == [2 * i for i in range(8)]
    assert len(pool.worker_pids()) == 2
    await pool.close()


async def test_a_worker_killed_while_idle_is_replaced_without_losing_a_task(pool):
    await pool.ready()
    victims = pool.worker_pids()
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(wait_for_exit, [pid])
    outcomes = await asyncio.gather(*(pool.run(add, i, 1) for i in range(6)))
    assert [outcome.value for outcome in outcomes] == [1, 2, 3, 4, 5, 6]
    assert not set(victims) & set(pool.worker_pids())


async def test_a_worker_that_dies_in_a_task_is_an_error_that_tells_how(pool):
    outcome = await pool.run(os._exit, 7)
    assert outcome.kind is OutcomeKind.ERROR and "exit code 7" in outcome.detail
    outcome = await pool.run(os.abort)
    assert outcome.kind is OutcomeKind.ERROR and "signal 6" in outcome.detail


async def test_workers_ignore_ctrl_c(pool):
    assert (await pool.run(signal_action, signal.SIGINT)).value


async def test_a_failing_setup_is_a_configuration_error():
    pool = ScorerPool("mine", num_workers=1, timeout_s=5, setup=fail_setup, setup_arguments=("no such file",))
    with pytest.raises(ConfigError, match="environment 'mine' cannot start: ValueError: no such file"):
        await pool.ready()
    assert "no such file" in (await pool.run(add, 1, 1)).detail
    await pool.close()


async def test_whoever_stops_waiting_for_the_start_or_a_result_disturbs_nobody():
    pool = ScorerPool("cancelled", num_workers=1, timeout_s=5, setup=no_setup)
    waiting = [asyncio.ensure_future(pool.ready()), asyncio.ensure_future(pool.run(add, 1, 1))]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await pool.ready()
    assert (await pool.run(add, 2, 2)).value == 4
    await pool.close()


async def test_a_closed_pool_leaves_no_process_and_takes_no_task():
    pool = ScorerPool("closing", num_workers=2, timeout_s=60, setup=no_setup)
    await pool.ready()
    pids = pool.worker_pids()
    running = asyncio.ensure_future(pool.run(huge_power))
    await pool.run(add, 1, 1)
    await pool.close()
    await pool.close()
    assert (await running).kind is OutcomeKind.ERROR
    wait_for_exit(pids)
    with pytest.raises(InfraError, match="closed"):
        await pool.run(add, 1, 1)


def test_it_works_from_a_thread_with_its_own_loop():
    values = []

    def work() -> None:
        async def use() -> None:
            pool = ScorerPool("threaded", num_workers=1, timeout_s=5, setup=no_setup)
            values.append((await pool.run(add, 2, 3)).value)
            await pool.close()

        asyncio.run(use())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert values == [5]


def test_workers_end_when_the_driver_is_killed_even_in_a_computation_that_never_returns(tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(
        textwrap.dedent(
            """
            import asyncio
            from rl.environments.pool import ScorerPool
            from tests.support import scoring_tasks

            async def main():
                pool = ScorerPool("orphan", num_workers=2, timeout_s=600, setup=scoring_tasks.no_setup)
                await pool.ready()
                asyncio.ensure_future(pool.run(scoring_tasks.huge_power))
                await pool.run(scoring_tasks.add, 1, 1)
                print(*pool.worker_pids(), flush=True)
                await asyncio.Event().wait()

            if __name__ == "__main__":
                asyncio.run(main())
            """
        )
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    driver = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, env=environment, text=True)
    assert driver.stdout is not None
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(pids) == 2
    driver.kill()
    driver.wait(10)
    wait_for_exit(pids)


async def test_what_a_late_task_started_ends_with_it(pool, tmp_path):
    outcome = await pool.run(start_a_child_and_hang, str(tmp_path / "pid"))
    assert outcome.kind is OutcomeKind.TIMEOUT
    wait_for_exit([int((tmp_path / "pid").read_text())])


async def test_no_trace_of_the_drivers_main_script_is_needed(monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/no/such/script.py", raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None, raising=False)
    pool = ScorerPool("interactive", num_workers=1, timeout_s=5, setup=no_setup)
    assert (await pool.run(add, 1, 1)).value == 2
    await pool.close()
