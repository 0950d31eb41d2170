"""The math environment inside a Ray actor, where signals and main modules differ from a plain process."""

import asyncio

import pytest
import ray

from rl.core.types import RolloutStatus
from rl.environments.config import MathEnvConfig
from rl.environments.math import MathEnvironment
from tests.support.completions import completion, episodes, text_prompt


class Scorer:
    def score(self) -> list[tuple[float, str]]:
        async def run() -> list[tuple[float, str]]:
            environment = MathEnvironment("math", MathEnvConfig(timeout_s=1.0))
            texts = [r"\boxed{\frac13}", "2", r"\boxed{9^{9^{9^9}}}"]
            results = await environment.step(
                text_prompt(metadata={"answer": "1/3"}), episodes([completion(text) for text in texts])
            )
            await environment.close()
            return [(result.reward, result.status.value) for result in results]

        return asyncio.run(run())


@pytest.fixture
def cluster():
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_scores_and_deadlines_hold_in_a_ray_actor(cluster):
    actor = ray.remote(Scorer).remote()
    right, wrong, late = ray.get(actor.score.remote(), timeout=120)
    assert right == (1.0, "ok") and wrong == (0.0, "ok")
    assert late[1] == RolloutStatus.REWARD_TIMEOUT.value
