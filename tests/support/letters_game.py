"""A game of several turns that a random model can play: every answer is worth its share of lower-case letters.

Sample i of a group has 1 + i % 3 turns, so siblings differ in length; an answer without a letter is flagged.
"""

from rl.core.types import Message, Prompt, TurnFlag
from rl.environments.base import Episode, StepResult


class LettersGame:
    """Scores in this process; holds nothing."""

    async def step(self, prompt: Prompt, episodes: list[Episode]) -> list[StepResult]:
        return [_score(episode) for episode in episodes]

    async def close(self) -> None:
        pass


def _score(episode: Episode) -> StepResult:
    text = episode.completion.text
    share = sum("a" <= character <= "z" for character in text) / max(len(text), 1)
    played = 1 + (episode.state or 0)
    done = played > episode.sample % 3
    return StepResult(
        messages=() if done else (Message("user", f"go {played}"),),
        reward=share,
        done=done,
        metrics={"played": float(played)},
        components={"letters": share, "turns": 0.0},
        flags=frozenset() if share else frozenset({TurnFlag.INVALID_TOOL_CALL}),
        state=played,
    )
