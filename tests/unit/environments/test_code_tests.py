import pytest

from rl.environments.code_tests import AssertTest, InputOutputTest, judge_code
from rl.environments.config import SandboxLimits

LIMITS = SandboxLimits(wall_s=10.0)
ADD = "a, b = map(int, input().split())\nprint(a + b)"
SUMS = [InputOutputTest("1 2\n", "3\n"), InputOutputTest("2 2\n", "5\n"), InputOutputTest("4 5", "9")]


def judge(code, tests, limits=LIMITS, budget_s=60.0, stop_early=False):
    return judge_code(code, tests, limits, budget_s, stop_early)


def test_what_is_printed_is_compared_without_space_at_the_ends():
    judgement = judge("print('1  \\n2\\n\\n')", [InputOutputTest("", "1\n2")])
    assert (judgement.passed, judgement.total, judgement.failure) == (1, 1, "")
    assert judge("print(' 1')", [InputOutputTest("", "1")]).passed == 0


def test_all_tests_run_unless_the_first_failure_is_enough():
    judgement = judge(ADD, SUMS)
    assert (judgement.passed, judgement.total, judgement.timed_out) == (2, 3, False)
    assert judgement.failure == "With this input:\n2 2\nit printed:\n4"
    assert judge(ADD, SUMS, stop_early=True).passed == 1


def test_right_output_and_then_an_error_is_a_failure():
    judgement = judge(f"{ADD}\n1/0", SUMS[:1])
    assert judgement.passed == 0 and "ZeroDivisionError" in judgement.failure


@pytest.mark.parametrize(
    ("code", "passed"),
    [
        ("def add(a, b): return a + b", 1),
        ("from __future__ import annotations\ndef add(a: A, b): return a + b\nprint('no newline', end='')", 1),
        ("def add(a, b): return a - b", 0),
        ("def add(a, b): return a + b\nimport sys; sys.exit(0)", 0),
        ("def add(a, b): __import__('os')._exit(0)", 0),
        ("class Same:\n def __eq__(self, other): return False\ndef add(a, b): return Same()", 0),
        ("def add(a, b: return", 0),
    ],
)
def test_assert_code_runs_after_the_program_and_must_be_reached(code, passed):
    assert judge(code, [AssertTest("assert add(1, 2) == 3")]).passed == passed


def test_an_endless_program_fails_and_is_told_apart():
    brief = LIMITS.model_copy(update={"wall_s": 0.3})
    judgement = judge("while True: pass", SUMS, brief)
    assert (judgement.passed, judgement.total, judgement.timed_out) == (0, 3, True)
    assert "It was ended: timeout." in judgement.failure


def test_the_budget_bounds_all_tests_together():
    judgement = judge("import time; time.sleep(0.4); print(1)", [InputOutputTest("", "1")] * 50, budget_s=1.0)
    assert 0 < judgement.passed < 5 and judgement.total == 50 and judgement.timed_out
