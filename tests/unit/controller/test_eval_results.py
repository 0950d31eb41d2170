"""Tests of rl.controller.eval_results: exact counts, metrics by task, and what a completion votes for."""

import math
from collections.abc import Sequence
from typing import Any

import pytest

from rl.controller.eval_results import Counting, PromptResult, Rows, sample_records, task_results, voting_answer
from rl.core.types import (
    Completion,
    FinishReason,
    Message,
    Prompt,
    Rollout,
    RolloutStatus,
    Turn,
    VersionSpan,
)

COUNTING = Counting(samples=4, ks=(1, 2, 4), correct_reward=1.0)


def rollout(sample: int, reward: float, text: str = "7", **changes: Any) -> Rollout:
    finish = FinishReason.LENGTH if changes.pop("truncated", False) else FinishReason.STOP
    completion = Completion((1, 2), (-0.1, -0.2), finish, (VersionSpan(0, 0, 2),), text)
    return Rollout(f"3/{sample}", (Turn((5,), completion, reward=reward),), reward, **changes)


def result(task: str, rewards: Sequence[float], texts: Sequence[str], **changes: Any) -> PromptResult:
    prompt = Prompt(f"{task}:0", (Message("user", "3+4="),), "math", {}, (5,))
    rollouts = [rollout(i, reward, text) for i, (reward, text) in enumerate(zip(rewards, texts, strict=True))]
    return PromptResult(task, prompt, tuple(rollouts), **changes)


def test_counts_are_exact_and_what_failed_counts_as_asked_for_and_as_wrong() -> None:
    failed = rollout(1, math.nan, status=RolloutStatus.REWARD_TIMEOUT)
    cut = rollout(2, 0.0, truncated=True)
    first = PromptResult("a", result("a", [], []).prompt, (rollout(0, 1.0), failed, cut, rollout(3, 1.0)))
    second = result("a", [], [], dropped="infra_error: gone")
    (only,) = task_results([first, second], {"a": Rows({"row:9": 70}, 2)}, COUNTING)
    assert dict(only.counts) == {
        "prompts": 2,
        "asked": 8,
        "scored": 3,
        "failed": 5,
        "truncated": 1,
        "dropped_prompts": 1,
        "skipped_prompts": 1,
        "faulty_prompts": 2,
    }
    assert only.metrics["avg@4"] == 2 / 8
    assert only.metrics["pass@1"] == pytest.approx(2 / 4 / 2)
    assert only.metrics["pass@2"] == pytest.approx((1 - 1 / 6) / 2)
    assert only.metrics["pass@4"] == pytest.approx(1 / 2)
    assert only.metrics["avg_length"] == 2.0
    assert only.metrics["truncation_rate"] == 1 / 4


def test_the_majority_is_over_answers_and_a_partial_reward_is_not_right() -> None:
    results = [result("a", [1.0, 1.0, 0.01, 0.5], [r"so \boxed{7}", "7", "8", "9"])]
    (only,) = task_results(results, {}, COUNTING)
    assert only.metrics["cons@4"] == 1.0
    assert only.metrics["pass@1"] == 0.5
    assert only.metrics["avg@4"] == pytest.approx(2.51 / 4)
    assert "cons@1" not in only.metrics


def test_several_tasks_have_a_row_each_and_one_for_all() -> None:
    results = [result("b", [1.0] * 4, ["7"] * 4), result("a", [0.0] * 4, ["8"] * 4)]
    tasks = task_results(results, {"c": Rows({"row:1": 99}, 0), "a": Rows({}, 0)}, COUNTING)
    assert [task.name for task in tasks] == ["a", "b", "c", "all"]
    assert [task.metrics.get("pass@1") for task in tasks] == [0.0, 1.0, None, 0.5]
    assert [task.counts["asked"] for task in tasks] == [4, 4, 0, 8]
    assert [task.counts["skipped_prompts"] for task in tasks] == [0, 0, 1, 1]


def test_there_is_a_record_for_each_sample_asked_for() -> None:
    unscored = rollout(2, math.nan, status=RolloutStatus.REWARD_ERROR)
    results = [
        PromptResult("a", result("a", [], []).prompt, (rollout(0, 1.0), unscored)),
        result("a", [], [], dropped="prompt_too_long: 99 tokens"),
    ]
    records = list(sample_records(results, COUNTING))
    assert [record["sample"] for record in records] == [0, 1, 2, 3] * 2
    assert [record["status"] for record in records[:4]] == ["ok", "missing", "reward_error", "missing"]
    assert {record["detail"] for record in records[4:]} == {"prompt_too_long: 99 tokens"}
    assert (records[0]["answer"], records[0]["is_correct"], records[0]["num_tokens"]) == ("7", True, 2)
    assert (records[2]["reward"], records[2]["answer"], records[2]["is_correct"]) == (None, None, False)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" 7\n", "7"),
        ("", None),
        (" \n\t", None),
        (r"first \boxed{6}, then \boxed{7}", "7"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} and \boxed{never closed", "1"),
        (r"\boxed{}", None),
        (r"\boxed{1 \boxed{2} 3}", "2"),
        (r"} \boxed{3} {", "3"),
        (r"\boxed{4}" + r"\boxed{" * 100_000, "4"),
        ("<answer>12</answer> or <answer> 13 </answer>", "13"),
        (r"<answer>\boxed{5}</answer>", "5"),
        ("$ 42 $", "42"),
        ("the answer\n is   7", "the answer is 7"),
    ],
)
def test_a_completion_votes_for_its_last_box_or_tag_or_for_its_whole_text(text: str, answer: str | None) -> None:
    assert voting_answer(text) == answer
