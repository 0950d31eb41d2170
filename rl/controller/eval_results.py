"""What an evaluation found: samples judged one by one, and counts and metrics by task. Pure; free of torch.

A sample without a reward, and every sample of a prompt that was given up, counts as asked for and as wrong.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl.controller.pass_at_k import Vote, consensus_at_k, pass_at_k
from rl.core.types import Prompt, Rollout
from rl.environments.completion_form import tagged_answer

ALL = "all"
_BOX = "\\boxed{"
_BRACE = re.compile(r"[{}]")


@dataclass(frozen=True)
class Counting:
    """How samples are counted.

    Attributes:
        samples: Samples asked for of each prompt.
        ks: The k of pass@k and cons@k, each at most `samples`.
        correct_reward: A sample is right when its raw reward is at least this.
    """

    samples: int
    ks: tuple[int, ...]
    correct_reward: float


@dataclass(frozen=True)
class PromptResult:
    """The samples of one prompt.

    Attributes:
        task: Under which its results are counted.
        prompt: The prompt.
        rollouts: In sample order, without those that no engine could make; none when the prompt was given up.
        dropped: Why it was given up; "" = it was not.
    """

    task: str
    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    dropped: str = ""


@dataclass(frozen=True)
class Rows:
    """Rows of a task that gave no prompt: those too long, by id, with their tokens; and how many are faulty."""

    overlong: Mapping[str, int]
    faulty: int


@dataclass(frozen=True)
class TaskResult:
    """Counts and metrics of one task, or of all."""

    name: str
    counts: Mapping[str, int]
    metrics: Mapping[str, float]


def task_results(
    results: Sequence[PromptResult], rows: Mapping[str, Rows], counting: Counting
) -> tuple[TaskResult, ...]:
    """Return the results of each task, and where there are several, those of all prompts together.

    Args:
        results: All prompts.
        rows: The rows without a prompt, by the task of their dataset.
        counting: How.
    """
    tasks = sorted({result.task for result in results} | {name for name, left in rows.items() if _is_any(left)})
    parts = [
        _task_result(task, [r for r in results if r.task == task], [rows[task]] if task in rows else [], counting)
        for task in tasks
    ]
    return (*parts, _task_result(ALL, results, list(rows.values()), counting)) if len(parts) > 1 else tuple(parts)


def sample_records(results: Sequence[PromptResult], counting: Counting) -> Iterator[dict[str, Any]]:
    """Yield one record for each sample asked for, in order: what was asked, answered and judged."""
    for result in results:
        prompt = {
            "task": result.task,
            "prompt_id": result.prompt.prompt_id,
            "environment": result.prompt.environment,
            "prompt": [{"role": message.role, "content": message.content} for message in result.prompt.messages],
        }
        by_sample = {int(rollout.rollout_id.rpartition("/")[2]): rollout for rollout in result.rollouts}
        for sample in range(counting.samples):
            rollout = by_sample.get(sample)
            missing = {"status": "missing", "detail": result.dropped or "the engine gave no usable completion"}
            yield {**prompt, "sample": sample, **(missing if rollout is None else _judged(rollout, counting))}


def voting_answer(text: str) -> str | None:
    """Return what a completion votes for: its last box, else its last <answer>, else all of it; None when empty.

    White space at the ends and dollar signs around it do not count, and inner white space is one space.
    """
    found = next((part for part in (_last_box(text), tagged_answer(text)) if part is not None), text)
    answer = " ".join(found.split()).strip("$").strip()
    return answer or None


def _task_result(name: str, results: Sequence[PromptResult], rows: Sequence[Rows], counting: Counting) -> TaskResult:
    rollouts = [rollout for result in results for rollout in result.rollouts]
    valid = [rollout for rollout in rollouts if rollout.is_valid]
    asked = len(results) * counting.samples
    counts = {
        "prompts": len(results),
        "asked": asked,
        "scored": len(valid),
        "failed": asked - len(valid),
        "truncated": sum(rollout.is_truncated for rollout in rollouts),
        "dropped_prompts": sum(bool(result.dropped) for result in results),
        "skipped_prompts": sum(len(left.overlong) for left in rows),
        "faulty_prompts": sum(left.faulty for left in rows),
    }
    metrics: dict[str, float] = {}
    if results:
        votes = [_votes(result, counting) for result in results]
        metrics[f"avg@{counting.samples}"] = sum(rollout.reward for rollout in valid) / asked
        for k in counting.ks:
            metrics[f"pass@{k}"] = _mean([pass_at_k(len(v), sum(vote.is_correct for vote in v), k) for v in votes])
        for k in counting.ks:
            if k > 1:
                metrics[f"cons@{k}"] = _mean([consensus_at_k(v, k) for v in votes])
    if rollouts:
        metrics["avg_length"] = _mean([rollout.num_sampled_tokens for rollout in rollouts])
        metrics["truncation_rate"] = counts["truncated"] / len(rollouts)
        metrics |= _environment_means(rollouts)
    return TaskResult(name, counts, metrics)


def _environment_means(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the means of the environments' own numbers, each over the rollouts that have it."""
    names = sorted({name for rollout in rollouts for name in rollout.metrics})
    return {f"env/{name}": _mean([r.metrics[name] for r in rollouts if name in r.metrics]) for name in names}


def _votes(result: PromptResult, counting: Counting) -> list[Vote]:
    """Return a vote of each sample asked for; one without a reward has no voice."""
    votes = [_vote(rollout, counting) for rollout in result.rollouts]
    return votes + [Vote(None, False)] * (counting.samples - len(votes))


def _vote(rollout: Rollout, counting: Counting) -> Vote:
    if not rollout.is_valid:
        return Vote(None, False)
    return Vote(voting_answer(_final_text(rollout)), rollout.reward >= counting.correct_reward)


def _judged(rollout: Rollout, counting: Counting) -> dict[str, Any]:
    vote = _vote(rollout, counting)
    texts = [turn.completion.text for turn in rollout.turns]
    return {
        "completion": texts[0] if len(texts) == 1 else texts,
        "answer": vote.answer,
        "reward": rollout.reward if math.isfinite(rollout.reward) else None,
        "is_correct": vote.is_correct,
        "status": rollout.status.value,
        "finish_reason": rollout.turns[-1].completion.finish_reason.value,
        "is_truncated": rollout.is_truncated,
        "num_tokens": rollout.num_sampled_tokens,
        "metrics": {name: value for name, value in rollout.metrics.items() if math.isfinite(value)},
    }


def _last_box(text: str) -> str | None:
    """Return what the last \\boxed{...} that is closed holds, inner braces included; takes one pass over the text."""
    opened: list[int] = []
    last: tuple[int, int] | None = None
    for place in (match.start() for match in _BRACE.finditer(text)):
        if text[place] == "{":
            opened.append(place)
        elif opened:
            start = opened.pop()
            if text.endswith(_BOX, 0, start + 1) and (last is None or start > last[0]):
                last = (start, place)
    return None if last is None else text[last[0] + 1 : last[1]]


def _final_text(rollout: Rollout) -> str:
    return rollout.turns[-1].completion.text


def _is_any(left: Rows) -> bool:
    return bool(left.overlong) or left.faulty > 0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
