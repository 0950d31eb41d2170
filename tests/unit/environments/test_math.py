import asyncio
import math
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import pytest

from rl.core.types import FinishReason, RolloutStatus
from rl.environments.config import MathEnvConfig
from rl.environments.math import MathEnvironment
from tests.support.completions import completion, episodes, text_prompt

BOMB = r"\boxed{9^{9^{9^9}}}"


@pytest.fixture
async def environment():
    environment = MathEnvironment("math", MathEnvConfig(num_workers=2, timeout_s=1.0))
    yield environment
    await environment.close()


async def test_rewards_come_in_the_order_of_the_completions(environment):
    prompt = text_prompt(metadata={"answer": "1/3"})
    results = await environment.step(
        prompt, episodes([completion(text) for text in (r"\boxed{\frac13}", "2", "1/3", "no idea")])
    )
    assert [result.reward for result in results] == [1.0, 0.0, 1.0, 0.0]
    assert all(result.done and result.status is RolloutStatus.OK and result.messages == () for result in results)


async def test_a_bomb_times_out_alone_and_its_siblings_are_scored(environment):
    prompt = text_prompt(metadata={"answer": "7"})
    await environment.step(prompt, episodes([completion("7")]))
    start = time.monotonic()
    results = await environment.step(
        prompt, episodes([completion(BOMB), completion("7"), completion(BOMB), completion("8")])
    )
    assert time.monotonic() - start < 10
    assert [result.status for result in results] == [
        RolloutStatus.REWARD_TIMEOUT,
        RolloutStatus.OK,
        RolloutStatus.REWARD_TIMEOUT,
        RolloutStatus.OK,
    ]
    assert math.isnan(results[0].reward) and "no result within 1 s" in results[0].detail
    assert [results[1].reward, results[3].reward] == [1.0, 0.0]
    assert (await environment.step(prompt, episodes([completion("7")])))[0].reward == 1.0


async def test_a_prompt_without_reference_answer_is_an_error_and_no_zero(environment):
    (result,) = await environment.step(text_prompt(), episodes([completion("7")]))
    assert result.status is RolloutStatus.REWARD_ERROR and math.isnan(result.reward)
    assert "no reference answer" in result.detail


async def test_a_literal_answer_must_have_ended_by_itself():
    environment = MathEnvironment("math", MathEnvConfig(literal_answer=True))
    texts = [
        ("8\n", FinishReason.STOP),
        ("8", FinishReason.LENGTH),
        ("3+5\n", FinishReason.STOP),
        ("8 ok", FinishReason.STOP),
    ]
    results = await environment.step(
        text_prompt(metadata={"answer": "8"}), episodes([completion(*text) for text in texts])
    )
    assert [result.reward for result in results] == [1.0, 0.0, 0.0, 0.0]
    assert [result.metrics["properly_ended"] for result in results] == [1.0, 0.0, 1.0, 1.0]
    await environment.close()


async def test_fifty_bombs_are_timeouts_and_do_not_shrink_the_pool():
    environment = MathEnvironment("math", MathEnvConfig(num_workers=2, timeout_s=0.1))
    prompt = text_prompt(metadata={"answer": "1/3"})
    results = await environment.step(prompt, episodes([completion(BOMB)] * 50))
    assert {result.status for result in results} == {RolloutStatus.REWARD_TIMEOUT}
    after = await environment.step(prompt, episodes([completion(r"\boxed{\frac13}")] * 8))
    assert [result.reward for result in after] == [1.0] * 8
    await environment.close()


def score_by_itself() -> list[tuple[float, str]]:
    """Score a right answer, a wrong one and a bomb in an event loop of its own."""

    async def run() -> list[tuple[float, str]]:
        environment = MathEnvironment("math", MathEnvConfig(timeout_s=1.0))
        texts = [r"\boxed{\frac13}", "2", BOMB]
        try:
            results = await environment.step(
                text_prompt(metadata={"answer": "1/3"}), episodes([completion(text) for text in texts])
            )
        finally:
            await environment.close()
        return [(result.reward, result.status.value) for result in results]

    return asyncio.run(run())


@pytest.mark.parametrize("where", ["main thread", "worker thread", "subprocess"])
def test_scores_and_deadlines_hold_everywhere(where):
    if where == "main thread":
        scored = score_by_itself()
    elif where == "worker thread":
        with ThreadPoolExecutor(1) as pool:
            scored = pool.submit(score_by_itself).result(60)
    else:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            scored = pool.submit(score_by_itself).result(60)
    assert scored[:2] == [(1.0, "ok"), (0.0, "ok")]
    assert math.isnan(scored[2][0]) and scored[2][1] == "reward_timeout"
