"""ReasoningGymEnvironment: scores with the reasoning-gym task that made the prompt.

The answer is what stands in the last <answer> tags of the completion, or else the whole text.
"""

from rl.core.types import Completion, Prompt
from rl.environments.config import ReasoningGymEnvConfig
from rl.environments.reasoning_gym_scorer import prepare_reasoning_gym, score_entry
from rl.environments.single_turn import SingleTurnEnvironment, Task, Unscorable

_RECIPE = "reasoning_gym"


class ReasoningGymEnvironment(SingleTurnEnvironment):
    """Scores with the task's own function."""

    def __init__(self, name: str, config: ReasoningGymEnvConfig) -> None:
        """Start the scoring processes in the background."""
        super().__init__(name, config, prepare_reasoning_gym, think_tags=config.think_tags)

    def task(self, prompt: Prompt, completion: Completion) -> Task:
        """Return the scoring of the prompt's own entry."""
        recipe = prompt.metadata.get(_RECIPE)
        if recipe is None:
            raise Unscorable(
                f"prompt {prompt.prompt_id} was made by no reasoning-gym task; use a dataset of kind reasoning_gym"
            )
        return score_entry, (dict(recipe), completion.text)

    def reward(self, value: float) -> float:
        """Return the task's score."""
        return value
