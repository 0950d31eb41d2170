"""rollouts/step_N.jsonl: what was sampled in a step, one rollout per line, exactly as it is trained on.

A line holds the turns as text and, per sequence, token ids with mask, log-probabilities and versions, and what the
step made of it: reward, weight, advantage. The first (mostly the only) sequence stands in the line itself; those that
begin where a template rewrote the history stand under `forks`. What is read again gives the same batch and the same
metrics.

    write_rollouts(path, groups, step=3, trained=trained)
    dump = read_rollouts(path)
    dump.groups, dump.trained
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.core.errors import DataError
from rl.core.files import replace_atomically
from rl.core.types import (
    Completion,
    FinishReason,
    Message,
    Prompt,
    Rollout,
    RolloutEnd,
    RolloutGroup,
    RolloutStatus,
    TrainedSequence,
    Turn,
    TurnFlag,
    VersionSpan,
)

Trained = Mapping[str, tuple[TrainedSequence, ...]]


@dataclass(frozen=True)
class RolloutDump:
    """The contents of one file.

    Attributes:
        step: The step.
        groups: The trained groups; their prompts are without metadata.
        trained: What the step made of each rollout, by id; empty for a validation.
    """

    step: int
    groups: list[RolloutGroup]
    trained: dict[str, tuple[TrainedSequence, ...]]


def write_rollouts(path: Path, groups: Sequence[RolloutGroup], step: int, trained: Trained | None = None) -> None:
    """Write the rollouts of a step, atomically.

    Args:
        path: The file, for example <run>/rollouts/step_3.jsonl; its folder is made.
        groups: The trained groups.
        step: The step that trained them.
        trained: What the step made of each rollout, by id: one entry per sequence.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps(
            _record(step, group, rollout, (trained or {}).get(rollout.rollout_id)), ensure_ascii=False, allow_nan=False
        )
        for group in groups
        for rollout in group.rollouts
    ]
    replace_atomically(path, "".join(line + "\n" for line in lines))


def read_rollouts(path: Path) -> RolloutDump:
    """Read what `write_rollouts` wrote.

    Raises:
        OSError: there is no such file.
        DataError: it holds something else, or nothing.
    """
    try:
        records = [json.loads(line) for line in path.read_text().splitlines()]
        members: dict[int, list[Rollout]] = {}
        prompts: dict[int, Prompt] = {}
        trained = {}
        for record in records:
            members.setdefault(record["group_id"], []).append(_read_rollout(record))
            prompts.setdefault(record["group_id"], _read_prompt(record))
            sequences = [record, *record["forks"]]
            if record["weight"] is not None:
                trained[record["rollout_id"]] = tuple(_read_trained(sequence) for sequence in sequences)
        groups = [RolloutGroup(number, prompts[number], tuple(rollouts)) for number, rollouts in members.items()]
        return RolloutDump(records[0]["step"], groups, trained)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise DataError(f"{path} is no file of rollouts: {type(error).__name__}: {error}") from error


def _record(
    step: int, group: RolloutGroup, rollout: Rollout, trained: tuple[TrainedSequence, ...] | None
) -> dict[str, Any]:
    outcomes = trained or (None,) * len(rollout.sequences)
    first, *forks = [_sequence(turns, made) for turns, made in zip(rollout.sequences, outcomes, strict=True)]
    texts = [turn.completion.text for turn in rollout.turns]
    return {
        "step": step,
        "group_id": group.group_id,
        "rollout_id": rollout.rollout_id,
        "prompt_id": group.prompt.prompt_id,
        "environment": group.prompt.environment,
        "prompt": _messages(group.prompt.messages),
        "completion": texts[0] if len(texts) == 1 else texts,
        "finish_reason": rollout.turns[-1].completion.finish_reason.value,
        "end": rollout.end.value,
        "reward": _finite(rollout.reward),
        "reward_components": {name: _finite(value) for name, value in rollout.reward_components.items()},
        "status": rollout.status.value,
        "metrics": {name: _finite(value) for name, value in rollout.metrics.items()},
        "turns": [_turn(turn) for turn in rollout.turns],
        **first,
        "forks": forks,
    }


def _turn(turn: Turn) -> dict[str, Any]:
    """One turn; its completion is tokens [start, end) of its sequence."""
    start = len(turn.prompt_tokens)
    return {
        "completion": turn.completion.text,
        "finish_reason": turn.completion.finish_reason.value,
        "start": start,
        "end": start + len(turn.completion.tokens),
        "env_messages": _messages(turn.env_messages),
        "reward": _finite(turn.reward),
        "flags": sorted(flag.value for flag in turn.flags),
        "forked": turn.forked,
        "drifted": turn.drifted,
    }


def _sequence(turns: Sequence[Turn], trained: TrainedSequence | None) -> dict[str, Any]:
    """One sequence: a log-probability per sampled token and None elsewhere, [version, start, end] spans over it."""
    last = turns[-1]
    token_ids = [*last.prompt_tokens, *last.completion.tokens]
    logprobs: list[float | None] = [None] * len(token_ids)
    spans: list[list[int]] = []
    for turn in turns:
        start = len(turn.prompt_tokens)
        logprobs[start : start + len(turn.completion.tokens)] = turn.completion.logprobs
        spans += [[span.version, start + span.start, start + span.end] for span in turn.completion.version_spans]
    return {
        "token_ids": token_ids,
        "loss_mask": [logprob is not None for logprob in logprobs],
        "logprobs": logprobs,
        "weight_versions": spans,
        "trained_reward": None if trained is None else _finite(trained.reward),
        "weight": None if trained is None else trained.weight,
        "advantage": None if trained is None else _advantage(trained.advantages),
    }


def _advantage(advantages: float | tuple[float, ...]) -> float | None | list[float | None]:
    return [_finite(value) for value in advantages] if isinstance(advantages, tuple) else _finite(advantages)


def _messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Roles and texts; half of a surrogate pair, which an environment may send last of all, becomes a question mark."""
    return [{"role": m.role, "content": m.content.encode(errors="replace").decode()} for m in messages]


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _read_prompt(record: Mapping[str, Any]) -> Prompt:
    token_ids = tuple(record["token_ids"][: record["turns"][0]["start"]])
    messages = _read_messages(record["prompt"])
    return Prompt(record["prompt_id"], messages, record["environment"], {}, token_ids)


def _read_rollout(record: Mapping[str, Any]) -> Rollout:
    sequences = [record, *record["forks"]]
    turns: list[Turn] = []
    place = 0
    for turn in record["turns"]:
        place += bool(turn["forked"] and turns)
        turns.append(_read_turn(turn, sequences[place]))
    return Rollout(
        record["rollout_id"],
        tuple(turns),
        _number(record["reward"]),
        RolloutStatus(record["status"]),
        {name: _number(value) for name, value in record["metrics"].items()},
        {name: _number(value) for name, value in record["reward_components"].items()},
        RolloutEnd(record["end"]),
    )


def _read_turn(turn: Mapping[str, Any], sequence: Mapping[str, Any]) -> Turn:
    start, end = turn["start"], turn["end"]
    completion = Completion(
        tuple(sequence["token_ids"][start:end]),
        tuple(sequence["logprobs"][start:end]),
        FinishReason(turn["finish_reason"]),
        tuple(VersionSpan(v, a - start, b - start) for v, a, b in sequence["weight_versions"] if start <= a < end),
        turn["completion"],
    )
    return Turn(
        tuple(sequence["token_ids"][:start]),
        completion,
        _read_messages(turn["env_messages"]),
        _number(turn["reward"]),
        frozenset(TurnFlag(flag) for flag in turn["flags"]),
        turn["forked"],
        turn["drifted"],
    )


def _read_trained(sequence: Mapping[str, Any]) -> TrainedSequence:
    found = sequence["advantage"]
    advantages = tuple(_number(value) for value in found) if isinstance(found, list) else _number(found)
    return TrainedSequence(_number(sequence["trained_reward"]), sequence["weight"], advantages)


def _read_messages(messages: Sequence[Mapping[str, str]]) -> tuple[Message, ...]:
    return tuple(Message(message["role"], message["content"]) for message in messages)
