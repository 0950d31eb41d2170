"""Run a program against the tests of its dataset row, in the sandbox; runs inside scoring processes.

A test is {"stdin": ..., "stdout": ...}: the program reads the one and must print the other; or Python code with
asserts, which runs after the program in the same process. What a program should print never enters the sandbox. Assert
code has to: a program that reads its own file could forge its success, so use it for what is not worth cheating.
"""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rl.environments.config import SandboxLimits
from rl.environments.sandbox import run_code
from rl.environments.sandbox_process import Ending


@dataclass(frozen=True)
class InputOutputTest:
    """What the program reads on standard input and must print; space at the ends of lines and text does not count."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class AssertTest:
    """Code that uses the program's names and raises when something is wrong."""

    code: str


CodeTest = InputOutputTest | AssertTest


@dataclass(frozen=True)
class CodeJudgement:
    """What the tests found.

    Attributes:
        passed: Tests that passed.
        total: All of them, those included that no time was left for.
        timed_out: Whether a test met the time limit or none was left for it.
        failure: The first test that failed, in words for the model; empty when none did.
    """

    passed: int
    total: int
    timed_out: bool
    failure: str


@dataclass(frozen=True)
class _Verdict:
    is_passed: bool
    timed_out: bool
    failure: str


def judge_code(
    code: str, tests: Sequence[CodeTest], limits: SandboxLimits, budget_s: float, stop_early: bool
) -> CodeJudgement:
    """Run the tests one after the other.

    Args:
        code: The program.
        tests: At least one.
        limits: Of each run.
        budget_s: Time for all of them; tests that none is left for fail.
        stop_early: Leave the others out once a test has failed.
    """
    deadline = time.monotonic() + budget_s
    verdicts: list[_Verdict] = []
    for test in tests:
        left = deadline - time.monotonic()
        if left <= 0:
            verdicts.append(_Verdict(False, True, "no time was left for the other tests"))
            break
        verdicts.append(_run_test(code, test, limits.model_copy(update={"wall_s": min(limits.wall_s, left)})))
        if stop_early and not verdicts[-1].is_passed:
            break
    return CodeJudgement(
        passed=sum(verdict.is_passed for verdict in verdicts),
        total=len(tests),
        timed_out=any(verdict.timed_out for verdict in verdicts),
        failure=next((verdict.failure for verdict in verdicts if not verdict.is_passed), ""),
    )


def _run_test(code: str, test: CodeTest, limits: SandboxLimits) -> _Verdict:
    # Without it a program that leaves by sys.exit(0) before the asserts would pass.
    proof = secrets.token_hex(16)
    match test:
        case InputOutputTest(stdin, expected):
            outcome = run_code(code, limits, stdin)
            is_right = _normal(outcome.stdout) == _normal(expected)
            subject = f"With this input:\n{stdin.rstrip()}\nit printed:\n{outcome.stdout.rstrip()}"
        case AssertTest(asserts):
            outcome = run_code(f"{code}\n\n{asserts}\n\n__import__('os').write(1, b'\\n{proof}')\n", limits)
            is_right = proof in outcome.stdout
            subject = f"This failed:\n{asserts}"
    timed_out = outcome.ending is Ending.TIMEOUT
    if outcome.is_success and is_right:
        return _Verdict(True, False, "")
    if outcome.ending is not Ending.EXITED:
        return _Verdict(False, timed_out, f"{subject}\nIt was ended: {outcome.ending.value.replace('_', ' ')}.")
    return _Verdict(False, timed_out, f"{subject}\n{outcome.stderr}".rstrip())


def _normal(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
