"""Tests of rl.rollout.unscored, through a runner and alone."""

import logging

import pytest

from rl.core.types import Prompt, RolloutStatus
from rl.environments.base import Episode, StepResult
from rl.generation.generator import SamplingParams
from rl.rollout.runner import Attempt, GroupRunner, RunnerLimits
from rl.rollout.unscored import REASONS_TOLD, Unscored
from tests.support.clock import FakeClock
from tests.support.fakes import EchoEnvironment, FakeGenerator, make_prompt, plain_conversations

SAMPLING = SamplingParams(1.0, 1.0, None, 8, (2,), (), 0)


class BrokenJudge(EchoEnvironment):
    """Fails every sample, with the words of a function environment."""

    async def step(self, prompt: Prompt, episodes: list[Episode]) -> list[StepResult]:
        detail = "mine:score, prompt p0, sample {}: RuntimeError: the judge is broken"
        failed = RolloutStatus.REWARD_ERROR
        return [StepResult((), float("nan"), True, failed, detail=detail.format(i)) for i in range(len(episodes))]


def levels(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.levelname for record in caplog.records]


async def test_the_reason_of_a_missing_reward_is_a_warning_once_and_in_the_log_always(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = FakeClock()
    limits = RunnerLimits(1, 64, 10.0, 5.0)
    runner = GroupRunner(
        FakeGenerator(clock), {"echo": BrokenJudge()}, SAMPLING, plain_conversations(), limits, clock, Unscored()
    )
    with caplog.at_level(logging.INFO):
        await clock.run(runner.run(make_prompt(0), 3, Attempt(1, 7, 0, 0, "train")))
    assert levels(caplog) == ["WARNING", "INFO", "INFO"]
    assert caplog.records[0].message == (
        "environment echo gave no reward for rollout 7/0: "
        "mine:score, prompt p0, sample 0: RuntimeError: the judge is broken"
    )


def test_only_so_many_reasons_are_shown(caplog: pytest.LogCaptureFixture) -> None:
    unscored = Unscored()
    with caplog.at_level(logging.INFO):
        for number in range(REASONS_TOLD + 5):
            unscored.tell("math", "rollout 0/0", f"mine:score, prompt p, sample 0: reason {number}")
    assert levels(caplog).count("WARNING") == REASONS_TOLD + 1
    assert "more are in run.log" in caplog.text
    assert levels(caplog).count("INFO") == 5


def test_exceptions_of_one_type_and_place_are_one_reason_whatever_they_say(caplog: pytest.LogCaptureFixture) -> None:
    unscored = Unscored()

    def tell(number: int, kind: str, line: int) -> None:
        error = f"{kind}: bad answer {number}: x (at /a/mine.py:{line} in score)"
        unscored.tell("math", f"rollout {number}/0", f"mine:score, prompt p{number}, sample 0: {error}")

    with caplog.at_level(logging.INFO):
        for number in range(5):
            tell(number, "ValueError", line=12)
        tell(6, "ValueError", line=20)
        tell(7, "KeyError", line=20)
    assert levels(caplog) == ["WARNING", *["INFO"] * 4, "WARNING", "WARNING"]
