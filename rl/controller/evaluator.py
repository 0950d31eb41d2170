"""Asks every prompt of an evaluation and collects what came back, over the same path as training rollouts.

consumes: the prompts of all tasks
produces: one PromptResult per prompt, in order
waits for: its own groups; a prompt that cannot be sampled is given up and counted
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rl.controller.config import MasterConfig
from rl.controller.eval_config import EvalTaskConfig
from rl.controller.eval_plan import EvalPlan
from rl.controller.eval_results import PromptResult, Rows
from rl.controller.pump import GroupRuns
from rl.core.concurrency import gather_or_cancel
from rl.core.errors import ConfigError, DataError
from rl.core.types import Dropped, PolicyVersion, Prompt
from rl.data.datasets import load_rows
from rl.data.prompts import PromptEncoder, PromptSettings, PromptSource
from rl.rollout.ticket import Ticket

# The weights that the engines load from their folder; no refit follows.
LOADED_VERSION: PolicyVersion = 0


@dataclass(frozen=True)
class Question:
    """One prompt and the task under which it is counted."""

    task: str
    prompt: Prompt


class Evaluator:
    """Samples every question.

    Args:
        manager: Rolls out the samples of a prompt.
        num_generations: Samples of each.
        progress: Told how many questions are done, of how many.
    """

    def __init__(self, manager: GroupRuns, num_generations: int, progress: Callable[[int, int], None]) -> None:
        self._manager = manager
        self._num_generations = num_generations
        self._progress = progress
        self._done = 0

    async def run(self, questions: Sequence[Question]) -> list[PromptResult]:
        """Ask all; results in order.

        Raises:
            FatalError: the evaluation cannot go on. Samples that fail otherwise are counted.
        """
        self._done = 0
        self._progress(0, len(questions))
        return await gather_or_cancel([self._ask(number, questions) for number in range(len(questions))])

    async def _ask(self, number: int, questions: Sequence[Question]) -> PromptResult:
        question = questions[number]
        ticket = Ticket(number, LOADED_VERSION)
        outcome = await self._manager.run_group(question.prompt, self._num_generations, ticket)
        self._done += 1
        self._progress(self._done, len(questions))
        if isinstance(outcome, Dropped):
            return PromptResult(question.task, question.prompt, (), f"{outcome.reason}: {outcome.detail}")
        return PromptResult(question.task, question.prompt, outcome.rollouts)


def build_questions(plan: EvalPlan, encoder: PromptEncoder) -> tuple[list[Question], dict[str, Rows]]:
    """Return the prompts of every task, in order, and by task the rows that gave none.

    Raises:
        ConfigError: a dataset is faulty, or none of its rows gives a prompt.
    """
    questions, rows = [], {}
    for name, task in plan.tasks.items():
        try:
            source = PromptSource(load_rows(task.dataset), encoder, prompt_settings(plan.config, task))
            held_out = source.held_out(plan.config.eval.max_samples)
        except (ConfigError, DataError) as error:
            raise ConfigError(f"task '{name}' of the evaluation: {error}") from error
        rows[name] = Rows(source.overlong_rows, held_out.skipped.faulty)
        key = plan.config.eval.task_key
        questions += [Question(_task_of(prompt, name, key), prompt) for prompt in held_out.prompts]
    return questions, rows


def prompt_settings(config: MasterConfig, task: EvalTaskConfig) -> PromptSettings:
    """A prompt may take what the context leaves beside the longest completion, at most data.max_input_seq_length."""
    own, limit = config.eval.max_new_tokens, config.data.max_input_seq_length
    room = config.policy.max_total_sequence_length - (config.policy.generation.max_new_tokens if own is None else own)
    return PromptSettings(
        environment=task.env_name or config.data.env_name,
        max_prompt_tokens=room if limit is None else min(limit, room),
        overlong=config.data.overlong_prompts,
        shuffle=False,
        seed=config.eval.seed,
    )


def _task_of(prompt: Prompt, dataset: str, key: str) -> str:
    """Return the dataset's name, followed by what the row's task column says."""
    value = prompt.metadata.get(key)
    return f"{dataset}/{value}" if isinstance(value, str | int) else dataset
