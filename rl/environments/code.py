"""CodeEnvironment: the program in a completion is run in a sandbox against the tests of its dataset row.

    {"prompt": "Read two numbers, print their sum.", "tests": [{"stdin": "1 2", "stdout": "3"}]}
    {"prompt": "Write add(a, b).", "tests": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]}

Such rows need `answer_key: null`. The program is the last fenced block, or what stands between `open_tag` and
`close_tag`. The policy answers for what its program does: no program, an error, a limit or endless computation fails
the test, with a metric that tells. What the policy does not answer for is a failed sample: a row without tests, a
sandbox that does not start, a process that dies. With max_attempts above 1 a program that fails is answered with the
first failing test; the last attempt counts.
"""

import asyncio
import re
from collections.abc import Mapping
from typing import Any

from rl.core.types import FinishReason, Message, Prompt, RolloutStatus
from rl.environments.base import Episode, StepResult
from rl.environments.code_tests import AssertTest, CodeJudgement, CodeTest, InputOutputTest, judge_code
from rl.environments.completion_form import thinking_flags
from rl.environments.config import CodeEnvConfig
from rl.environments.outcomes import failed, failed_task
from rl.environments.pool import OutcomeKind, ScorerPool
from rl.environments.sandbox import prepare_sandbox
from rl.environments.single_turn import Unscorable

TESTS = "tests"
# For what is not the program's time: starting and ending sandboxes on a busy machine.
GRACE_S = 30.0
_FENCED = re.compile(r"^```(?:python|py|python3)?[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE | re.IGNORECASE)
_NO_PROGRAM = "There is no program in the answer."


class CodeEnvironment:
    """Runs programs in sandboxes, at most `num_workers` at a time."""

    def __init__(self, name: str, config: CodeEnvConfig) -> None:
        """Start the scoring processes in the background; each tries its sandbox first."""
        self._config = config
        self._pool = ScorerPool(name, config.num_workers, config.timeout_s + GRACE_S, prepare_sandbox)

    async def step(self, prompt: Prompt, episodes: list[Episode]) -> list[StepResult]:
        """Run and test the programs of all siblings; one result each, in order.

        Raises:
            ConfigError: this machine has no sandbox.
        """
        await self._pool.ready()
        try:
            tests = read_tests(prompt.metadata)
        except Unscorable as error:
            detail = f"prompt {prompt.prompt_id}: {error}"
            return [failed(RolloutStatus.REWARD_ERROR, detail) for _ in episodes]
        return list(await asyncio.gather(*(self._judge(prompt, tests, episode) for episode in episodes)))

    async def close(self) -> None:
        """End the scoring processes with the programs that they run; idempotent."""
        await self._pool.close()

    async def _judge(self, prompt: Prompt, tests: tuple[CodeTest, ...], episode: Episode) -> StepResult:
        config = self._config
        code = find_code(episode.completion.text, config.open_tag, config.close_tag)
        if code is None:
            return self._result(episode, CodeJudgement(0, len(tests), False, _NO_PROGRAM), has_code=False)
        stop_early = config.reward == "all"
        outcome = await self._pool.run(judge_code, code, tests, config.limits, config.timeout_s, stop_early)
        if outcome.kind is not OutcomeKind.OK:
            return failed_task(outcome, f"running the program of prompt {prompt.prompt_id}, sample {episode.sample}")
        return self._result(episode, outcome.value, has_code=True)

    def _result(self, episode: Episode, judgement: CodeJudgement, *, has_code: bool) -> StepResult:
        share = judgement.passed / judgement.total
        is_right = judgement.passed == judgement.total
        attempt = len(episode.turns) + 1
        ended = episode.completion.finish_reason is FinishReason.STOP
        flags = thinking_flags(episode.completion.text, self._config.think_tags)
        metrics = {
            "accuracy": float(is_right),
            "timed_out": float(judgement.timed_out),
            "has_code": float(has_code),
            "properly_ended": float(ended),
        }
        if self._config.reward == "share":
            metrics["tests_passed"] = share
        if self._config.max_attempts > 1:
            metrics["attempts"] = float(attempt)
        if not is_right and ended and attempt < self._config.max_attempts:
            return StepResult(
                messages=(self._feedback(judgement),), reward=0.0, done=False, metrics=metrics, flags=flags
            )
        reward = share if self._config.reward == "share" else float(is_right)
        return StepResult(messages=(), reward=reward, done=True, metrics=metrics, flags=flags)

    def _feedback(self, judgement: CodeJudgement) -> Message:
        limit = self._config.max_feedback_chars
        words = judgement.failure
        if len(words) > limit:  # the question stands at the beginning, the error at the end
            words = f"{words[: limit // 2]}\n...\n{words[-(limit - limit // 2) :]}"
        return Message(self._config.feedback_role, words)


def find_code(text: str, open_tag: str, close_tag: str) -> str | None:
    """Return the last program in a text; None when there is none.

    Args:
        text: The completion.
        open_tag: Stands before it; empty: it is a fenced block, of Python or of no language.
        close_tag: Stands after it.
    """
    if not open_tag:
        blocks = _FENCED.findall(text)
        return blocks[-1] if blocks else None
    before, found, _ = text.rpartition(close_tag)
    start = before.rfind(open_tag)
    return before[start + len(open_tag) :] if found and start >= 0 else None


def read_tests(metadata: Mapping[str, Any]) -> tuple[CodeTest, ...]:
    """Return the tests of a row: a list of {stdin, stdout} or assert code, or one piece of assert code.

    Raises:
        Unscorable: there are none, or one is neither.
    """
    found = metadata.get(TESTS)
    tests = [found] if isinstance(found, str) else found
    if not isinstance(tests, list) or not tests:
        raise Unscorable(
            f"the row has no tests; its column '{TESTS}' must be a list of {{stdin, stdout}} or assert code"
        )
    return tuple(_read_test(test, index) for index, test in enumerate(tests))


def _read_test(test: object, index: int) -> CodeTest:
    if isinstance(test, str) and test.strip():
        return AssertTest(test)
    if isinstance(test, Mapping) and set(test) == {"stdin", "stdout"}:
        stdin, stdout = test["stdin"], test["stdout"]
        if isinstance(stdin, str) and isinstance(stdout, str):
            return InputOutputTest(stdin, stdout)
    raise Unscorable(f"{TESTS}[{index}] is {test!r:.100}, neither {{stdin: text, stdout: text}} nor assert code")
