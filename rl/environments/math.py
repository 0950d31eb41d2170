"""MathEnvironment: 1 when a completion's answer equals the reference answer, else 0."""

from rl.core.types import Completion, FinishReason, Prompt
from rl.data.columns import ANSWER
from rl.environments.answers import Judgement, judge_answer, judge_literal_answer, prepare_math
from rl.environments.config import MathEnvConfig
from rl.environments.single_turn import SingleTurnEnvironment, Task, Unscorable


class MathEnvironment(SingleTurnEnvironment):
    """Scores with math-verify."""

    def __init__(self, name: str, config: MathEnvConfig) -> None:
        """Start the scoring processes in the background."""
        super().__init__(name, config, prepare_math, think_tags=config.think_tags)
        self._is_literal = config.literal_answer

    def task(self, prompt: Prompt, completion: Completion) -> Task | float:
        """Return the comparison; a literal answer that did not end by itself is wrong without one."""
        reference = prompt.metadata.get(ANSWER)
        if reference is None:
            raise Unscorable(f"prompt {prompt.prompt_id} has no reference answer; set answer_key")
        if self._is_literal and completion.finish_reason is not FinishReason.STOP:
            return 0.0
        return judge_literal_answer if self._is_literal else judge_answer, (completion.text, str(reference))

    def reward(self, value: Judgement) -> float:
        """Return 1 or 0."""
        if value.fault:
            raise Unscorable(value.fault)
        return float(value.is_correct)

    def metrics(self, reward: float) -> dict[str, float]:
        """The accuracy is the reward."""
        return {"accuracy": reward}
