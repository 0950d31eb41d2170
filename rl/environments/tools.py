"""ToolsEnvironment: the model calls tools turn by turn; a completion without a call is its final answer.

    user:       What is 37*48?
    assistant:  <tool_call>{"name": "calculator", "arguments": {"expression": "37*48"}}</tool_call>
    tool:       1776
    assistant:  1776

Every call is answered: with the tool's result, or with `error: ...` where the call is malformed, names no tool, has
wrong arguments, exceeds max_tool_calls, or the tool fails or is late. Calls that are no fault of the tool are flagged
INVALID_TOOL_CALL and counted. A completion that was cut off by its length bound ends the rollout as the answer that it
is. Turns are bounded by the run (grpo.max_rollout_turns); a rollout that ends there has no answer and reward 0.
It holds no rollout's state: counts travel with the episode. Scoring is another environment's business.
"""

import asyncio
from dataclasses import dataclass, replace

from rl.core.types import FinishReason, Message, Prompt, TurnFlag
from rl.environments.base import Episode, StepResult
from rl.environments.completion_form import thinking_flags
from rl.environments.config import RESULT_PLACE, ToolsEnvConfig
from rl.environments.pool import Outcome, OutcomeKind, ScorerPool
from rl.environments.registry import build_environment
from rl.environments.tool_calls import CallFault, ToolCall, parse_calls
from rl.environments.toolbox import Tool, ToolOutcome, prepare_tools, use_tool

_CUT = " ... (cut)"


@dataclass(frozen=True)
class ToolCounts:
    """Calls of one rollout so far.

    Attributes:
        calls: All of them.
        invalid: Those that could not be made: malformed, unknown tool, wrong arguments, beyond the bound.
        failed: Those whose tool gave an error or was late.
    """

    calls: int = 0
    invalid: int = 0
    failed: int = 0

    def plus(self, outcomes: list[ToolOutcome]) -> "ToolCounts":
        """Return the counts after further calls."""
        invalid = sum(not outcome.is_valid for outcome in outcomes)
        failed = sum(outcome.is_valid and not outcome.is_ok for outcome in outcomes)
        return ToolCounts(self.calls + len(outcomes), self.invalid + invalid, self.failed + failed)

    def metrics(self) -> dict[str, float]:
        """Return the numbers to report."""
        numbers = {"tool_calls": self.calls, "invalid_tool_calls": self.invalid, "failed_tool_calls": self.failed}
        return {name: float(number) for name, number in numbers.items()}


class ToolsEnvironment:
    """Answers tool calls in processes of its own, and hands final answers to its scorer."""

    def __init__(self, name: str, config: ToolsEnvConfig) -> None:
        """Start the processes of tools and scorer in the background."""
        self._config = config
        self._tools = {key: Tool(key, tool.target, tool.settings()) for key, tool in config.tools.items()}
        targets = tuple(tool.target for tool in config.tools.values())
        preparations = tuple({tool.preparation for tool in config.tools.values() if tool.preparation})
        self._pool = ScorerPool(name, config.num_workers, config.timeout_s, prepare_tools, (targets, preparations))
        self._scorer = build_environment(f"{name}.scorer", config.scorer)

    async def step(self, prompt: Prompt, episodes: list[Episode]) -> list[StepResult]:
        """Answer the calls, or score the answers, of all siblings; one result each, in order."""
        await self._pool.ready()
        calls = [self._calls(episode) for episode in episodes]
        finals = [episode for episode, found in zip(episodes, calls, strict=True) if self._is_final(episode, found)]
        answered, scored = await asyncio.gather(
            asyncio.gather(
                *(
                    self._answer(episode, found)
                    for episode, found in zip(episodes, calls, strict=True)
                    if not self._is_final(episode, found)
                )
            ),
            self._score(prompt, finals),
        )
        results = {result_of: result for result_of, result in (*answered, *scored)}
        return [results[episode.sample] for episode in episodes]

    async def close(self) -> None:
        """End the processes; idempotent."""
        await self._pool.close()
        await self._scorer.close()

    def _calls(self, episode: Episode) -> list[ToolCall | CallFault]:
        return parse_calls(episode.completion.text, self._config.call_open, self._config.call_close)

    def _is_final(self, episode: Episode, calls: list[ToolCall | CallFault]) -> bool:
        return not calls or episode.completion.finish_reason is FinishReason.LENGTH

    async def _answer(self, episode: Episode, calls: list[ToolCall | CallFault]) -> tuple[int, StepResult]:
        counts = episode.state or ToolCounts()
        room = max(0, self._config.max_tool_calls - counts.calls)
        outcomes = list(await asyncio.gather(*(self._use(call) for call in calls[:room])))
        beyond = f"no more than {self._config.max_tool_calls} tool calls are allowed; give the answer"
        outcomes += [ToolOutcome(beyond, is_valid=False, is_ok=False)] * len(calls[room:])
        counts = counts.plus(outcomes)
        flags = thinking_flags(episode.completion.text, self._config.scorer.think_tags)
        if not all(outcome.is_valid for outcome in outcomes):
            flags |= {TurnFlag.INVALID_TOOL_CALL}
        return episode.sample, StepResult(
            messages=tuple(self._message(outcome) for outcome in outcomes),
            reward=0.0,
            done=False,
            metrics=counts.metrics(),
            components=dict.fromkeys(self._config.component_names, 0.0),
            flags=flags,
            state=counts,
        )

    async def _use(self, call: ToolCall | CallFault) -> ToolOutcome:
        if isinstance(call, CallFault):
            return ToolOutcome(call.words, is_valid=False, is_ok=False)
        if call.name not in self._tools:
            words = f"there is no tool {call.name!r:.40}, only {', '.join(self._tools)}"
            return ToolOutcome(words, is_valid=False, is_ok=False)
        outcome: Outcome = await self._pool.run(
            use_tool, self._tools[call.name], call.arguments, self._config.max_result_chars + 1
        )
        if outcome.kind is OutcomeKind.OK:
            result: ToolOutcome = outcome.value
            return result
        late = outcome.kind is OutcomeKind.TIMEOUT
        words = f"no result within {self._config.timeout_s:g} s" if late else "it broke down"
        return ToolOutcome(f"{call.name}: {words}", is_ok=False)

    def _message(self, outcome: ToolOutcome) -> Message:
        text = outcome.text if outcome.is_ok else f"error: {outcome.text}"
        limit = self._config.max_result_chars
        shown = text if len(text) <= limit else text[:limit] + _CUT
        return Message(self._config.result_role, self._config.result_template.replace(RESULT_PLACE, shown))

    async def _score(self, prompt: Prompt, episodes: list[Episode]) -> list[tuple[int, StepResult]]:
        if not episodes:
            return []
        results = await self._scorer.step(prompt, [self._answer_alone(episode) for episode in episodes])
        return [
            (episode.sample, self._final(episode, result)) for episode, result in zip(episodes, results, strict=True)
        ]

    def _answer_alone(self, episode: Episode) -> Episode:
        """Reduce the completion's text to the answer, as the scorer sees it."""
        prefix, text = self._config.answer_prefix, episode.completion.text
        if prefix:
            text = text.rpartition(prefix)[2] if prefix in text else ""
        return replace(episode, completion=replace(episode.completion, text=text))

    def _final(self, episode: Episode, result: StepResult) -> StepResult:
        """Add what is known of the whole rollout; a call in a completion that was cut off is an invalid one."""
        counts, flags = episode.state or ToolCounts(), result.flags
        if cut := self._calls(episode):
            flags |= {TurnFlag.INVALID_TOOL_CALL}
            counts = counts.plus([ToolOutcome("cut off", is_valid=False, is_ok=False)] * len(cut))
        return replace(result, metrics={**result.metrics, **counts.metrics()}, flags=flags, state=counts)
