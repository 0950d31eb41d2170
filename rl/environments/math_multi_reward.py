"""MathMultiRewardEnvironment: correctness, integer and format as separate components, for GDPO.

All three are comparisons of text, each 0 or 1, so no scoring process is needed:

| component   | answer_form: tags                                        | answer_form: line                   |
|-------------|----------------------------------------------------------|-------------------------------------|
| correctness | the text in <answer> equals the reference                | the completion equals the reference |
| integer     | the text in <answer> is a whole number                   | the completion is a whole number    |
| format      | one pair of think tags, one of answer tags, nothing else | it ended by itself, and is one word |

Space around a text does not count. Without <answer> tags all three are 0.
"""

import math
import re

from rl.core.types import Completion, FinishReason, Prompt, RolloutStatus
from rl.data.columns import ANSWER
from rl.environments.base import Episode, StepResult
from rl.environments.completion_form import tagged_answer, thinking_flags
from rl.environments.config import MATH_COMPONENTS, MathMultiRewardEnvConfig
from rl.environments.outcomes import failed

_STRICT = re.compile(r"\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)
_TAG = re.compile(r"</?(?:think|answer)>")
_TAGS_OF_STRICT_FORMAT = 4
_INTEGER = re.compile(r"[-+]?\d+")


class MathMultiRewardEnvironment:
    """Scores with three components and their weights."""

    def __init__(self, name: str, config: MathMultiRewardEnvConfig) -> None:
        """Take the settings; nothing is started."""
        self.name = name
        self._config = config
        weights = {str(component): weight for component, weight in config.weights.items()}
        self._weights = dict.fromkeys(MATH_COMPONENTS, 1.0) | weights

    async def step(self, prompt: Prompt, episodes: list[Episode]) -> list[StepResult]:
        """Score all siblings; one result each, in order."""
        return [self._score(prompt, episode.completion) for episode in episodes]

    async def close(self) -> None:
        """Nothing to end."""

    def _score(self, prompt: Prompt, completion: Completion) -> StepResult:
        reference = prompt.metadata.get(ANSWER)
        if reference is None:
            detail = f"prompt {prompt.prompt_id} has no reference answer; set answer_key"
            return failed(RolloutStatus.REWARD_ERROR, detail)
        ended = completion.finish_reason is FinishReason.STOP
        score = score_tags if self._config.answer_form == "tags" else score_line
        components = score(completion.text, str(reference), ended)
        return StepResult(
            messages=(),
            reward=math.fsum(self._weights[name] * value for name, value in components.items()),
            done=True,
            metrics={"accuracy": components["correctness"], "properly_ended": float(ended)},
            components=components,
            flags=thinking_flags(completion.text, self._config.think_tags),
        )


def score_tags(text: str, reference: str, ended: bool) -> dict[str, float]:
    """Return the components of an answer in tags; the last pair of <answer> tags counts."""
    is_strict = len(_TAG.findall(text)) == _TAGS_OF_STRICT_FORMAT and _STRICT.fullmatch(text) is not None
    return _components(tagged_answer(text) or "", reference, is_strict)


def score_line(text: str, reference: str, ended: bool) -> dict[str, float]:
    """Return the components of an answer that stands alone."""
    return _components(text, reference, ended and len(text.split()) == 1)


def _components(answer: str, reference: str, is_well_formed: bool) -> dict[str, float]:
    answer = answer.strip()
    is_right = bool(answer) and answer == reference.strip()
    values = (is_right, _INTEGER.fullmatch(answer) is not None, is_well_formed)
    return dict(zip(MATH_COMPONENTS, map(float, values), strict=True))
