"""Tests of rl.controller.evaluator: exactly the samples asked for, and rows that give none by their ids."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from rl.controller.eval_plan import EvalOptions, EvalPlan, plan_evaluation
from rl.controller.evaluator import Evaluator, Question, build_questions
from rl.controller.load import load_config
from rl.core.errors import ConfigError
from rl.core.types import Dropped, Message, Prompt, RolloutGroup
from rl.rollout.ticket import Ticket
from tests.support.fakes import make_prompt
from tests.support.rollouts import make_completion, make_group, make_rollout
from tests.support.tiny_run import make_tiny_run


class Manager:
    """Answers every group but those of the given numbers."""

    def __init__(self, dropped: Sequence[int] = ()) -> None:
        self.asked: list[tuple[str, int, Ticket]] = []
        self._dropped = dropped

    async def run_group(self, prompt: Prompt, n: int, ticket: Ticket) -> RolloutGroup | Dropped:
        self.asked.append((prompt.prompt_id, n, ticket))
        if ticket.seq in self._dropped:
            return Dropped("infra_error", 3, "the engine died")
        rollouts = [make_rollout([((1,), make_completion([2, 3]))], 1.0) for _ in range(n)]
        return make_group(ticket.seq, rollouts)


class Characters:
    """One token per character."""

    def messages(self, row_messages: Sequence[Message]) -> tuple[Message, ...]:
        return tuple(row_messages)

    def encode(self, row_messages: Sequence[Message]) -> tuple[int, ...]:
        return tuple(range(sum(len(message.content) for message in row_messages)))


async def test_every_prompt_is_asked_once_for_all_its_samples() -> None:
    manager, seen = Manager(dropped=[1]), []
    evaluator = Evaluator(manager, 4, lambda done, total: seen.append((done, total)))
    results = await evaluator.run([Question("a", make_prompt(0)), Question("b", make_prompt(1))])
    assert [(name, n, ticket.seq) for name, n, ticket in manager.asked] == [("p0", 4, 0), ("p1", 4, 1)]
    assert [(r.task, len(r.rollouts), r.dropped) for r in results] == [
        ("a", 4, ""),
        ("b", 0, "infra_error: the engine died"),
    ]
    assert seen == [(0, 2), (1, 2), (2, 2)]


def make_plan(folder: Path, rows: Sequence[object], *overrides: str) -> EvalPlan:
    run = make_tiny_run(folder)
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    (folder / "heldout.jsonl").write_text(text)
    config, _ = load_config(run.config, list(overrides))
    return plan_evaluation(config, EvalOptions("tiny", None, None))


def test_over_long_rows_are_counted_by_id_and_the_limit_is_that_of_the_evaluation(tmp_path: Path) -> None:
    rows = [{"prompt": "x" * size, "answer": "x"} for size in (20, 16, 17)]
    plan = make_plan(tmp_path, rows, "eval.max_new_tokens=16")
    questions, left = build_questions(plan, Characters())
    assert [question.prompt.prompt_id for question in questions] == ["heldout:2"]
    assert left["reward"].overlong == {"heldout:1": 20, "heldout:3": 17}


def test_the_task_column_tells_results_apart_and_max_samples_bounds_each_dataset(tmp_path: Path) -> None:
    rows = [{"prompt": f"{index}", "answer": "x", "task": "even" if index % 2 == 0 else "odd"} for index in range(4)]
    dataset = f"{{dataset: {{kind: jsonl, path: {tmp_path / 'heldout.jsonl'}}}}}"
    plan = make_plan(tmp_path, rows, f"eval.tasks={{mine: {dataset}, again: {dataset}}}", "eval.max_samples=3")
    questions, _ = build_questions(plan, Characters())
    assert [question.task for question in questions] == [
        "mine/even",
        "mine/odd",
        "mine/even",
        "again/even",
        "again/odd",
        "again/even",
    ]


def test_a_dataset_without_a_usable_row_is_refused_with_its_task(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, [{"prompt": "x" * 40, "answer": "x"}])
    with pytest.raises(ConfigError, match=r"task 'reward' of the evaluation: all 1 prompts are longer than 26 tokens"):
        build_questions(plan, Characters())
