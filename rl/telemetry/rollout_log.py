"""rollouts/step_N.jsonl: what was sampled in a step, one rollout per line, exactly as it is trained on."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl.core.files import replace_atomically
from rl.core.types import Rollout, RolloutGroup, Turn


def write_rollouts(
    path: Path, groups: Sequence[RolloutGroup], step: int, advantages: Mapping[str, float] | None = None
) -> None:
    """Write the rollouts of a step, atomically.

    Args:
        path: The file, for example <run>/rollouts/step_3.jsonl; its folder is made.
        groups: The trained groups.
        step: The step that trained them.
        advantages: Mean advantage over the sampled tokens, by rollout id.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps(_record(step, group, rollout, advantages or {}), ensure_ascii=False, allow_nan=False)
        for group in groups
        for rollout in group.rollouts
    ]
    replace_atomically(path, "".join(line + "\n" for line in lines))


def _record(step: int, group: RolloutGroup, rollout: Rollout, advantages: Mapping[str, float]) -> dict[str, Any]:
    last = rollout.turns[-1]
    token_ids = [*last.prompt_tokens, *last.completion.tokens]
    logprobs, spans = _sampled(rollout.turns, token_ids)
    return {
        "step": step,
        "group_id": group.group_id,
        "rollout_id": rollout.rollout_id,
        "prompt_id": group.prompt.prompt_id,
        "environment": group.prompt.environment,
        "prompt": [{"role": message.role, "content": message.content} for message in group.prompt.messages],
        "completion": last.completion.text if len(rollout.turns) == 1 else [t.completion.text for t in rollout.turns],
        "finish_reason": last.completion.finish_reason.value,
        "reward": _finite(rollout.reward),
        "status": rollout.status.value,
        "advantage": _finite(advantages.get(rollout.rollout_id, math.nan)),
        "weight_versions": spans,
        "metrics": {name: _finite(value) for name, value in rollout.metrics.items()},
        "token_ids": token_ids,
        "loss_mask": [logprob is not None for logprob in logprobs],
        "logprobs": logprobs,
    }


def _sampled(turns: Sequence[Turn], token_ids: list[int]) -> tuple[list[float | None], list[list[int]]]:
    """Return per token of the last turn's sequence its log-probability (None when it was not sampled), and
    [version, start, end] spans over the sequence. Turns whose history was rewritten later are not in that sequence.
    """
    logprobs: list[float | None] = [None] * len(token_ids)
    spans: list[list[int]] = []
    for turn in turns:
        start = len(turn.prompt_tokens)
        end = start + len(turn.completion.tokens)
        if token_ids[:end] != [*turn.prompt_tokens, *turn.completion.tokens]:
            continue
        logprobs[start:end] = turn.completion.logprobs
        spans += [[span.version, start + span.start, start + span.end] for span in turn.completion.version_spans]
    return logprobs, spans


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
