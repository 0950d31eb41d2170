"""Tests of rl.telemetry.rollout_log."""

import json
import math
from dataclasses import replace

import pytest

from rl.core.errors import DataError
from rl.core.types import (
    Completion,
    FinishReason,
    Message,
    Rollout,
    RolloutEnd,
    RolloutGroup,
    RolloutStatus,
    TrainedSequence,
    Turn,
    TurnFlag,
    VersionSpan,
)
from rl.telemetry.rollout_log import read_rollouts, write_rollouts
from tests.support.completions import completion, text_prompt


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def said(tokens, *versions):
    """A completion whose last token was sampled by the last version."""
    cut = len(tokens) - len(versions) + 1
    bounds = [0, *range(cut, len(tokens) + 1)]
    spans = tuple(VersionSpan(v, a, b) for v, a, b in zip(versions, bounds[:-1], bounds[1:], strict=True))
    return Completion(tuple(tokens), (-1.0,) * len(tokens), FinishReason.STOP, spans, str(tokens))


def test_one_line_per_rollout_with_all_that_was_trained_on(tmp_path):
    prompt = text_prompt("1+1=", {"answer": "2"})
    good = Rollout("7/0", (Turn(prompt.token_ids, completion("2\n"), reward=1.0),), 1.0)
    turns = (Turn(prompt.token_ids, completion("é")),)
    bad = Rollout("7/1", turns, math.nan, RolloutStatus.REWARD_TIMEOUT, {"x": math.inf})
    path = tmp_path / "rollouts" / "step_3.jsonl"
    write_rollouts(path, [RolloutGroup(7, prompt, (good, bad))], 3, {"7/0": (TrainedSequence(0.75, 1.0, 0.5),)})
    first, second = read(path)
    assert first["step"] == 3 and first["group_id"] == 7 and first["rollout_id"] == "7/0" and first["prompt_id"] == "p0"
    assert first["prompt"] == [{"role": "text", "content": "1+1="}] and first["completion"] == "2\n"
    assert first["token_ids"] == list(b"1+1=2\n") and first["loss_mask"] == [False] * 4 + [True] * 2
    assert first["logprobs"] == [None] * 4 + [-0.5] * 2 and first["weight_versions"] == [[0, 4, 6]]
    assert (first["reward"], first["advantage"], first["status"]) == (1.0, 0.5, "ok")
    assert (first["trained_reward"], first["weight"], first["forks"]) == (0.75, 1.0, [])
    assert (second["reward"], second["advantage"], second["status"]) == (None, None, "reward_timeout")
    assert second["completion"] == "é" and second["metrics"] == {"x": None}
    assert [file.name for file in path.parent.iterdir()] == ["step_3.jsonl"]


def test_the_turns_of_one_rollout_are_one_sequence(tmp_path):
    flags = frozenset({TurnFlag.INVALID_TOOL_CALL})
    first = Turn((1, 2), said([3, 4], 5), (Message("tool", "ok"),), 0.5, flags)
    turns = (first, Turn((1, 2, 3, 4, 9), said([6], 6)))
    path = tmp_path / "step_1.jsonl"
    write_rollouts(path, [RolloutGroup(0, text_prompt(), (Rollout("0/0", turns, 1.0, end=RolloutEnd.MAX_TURNS),))], 1)
    (record,) = read(path)
    assert record["token_ids"] == [1, 2, 3, 4, 9, 6] and record["end"] == "max_turns"
    assert record["loss_mask"] == [False, False, True, True, False, True]
    assert record["weight_versions"] == [[5, 2, 4], [6, 5, 6]] and record["completion"] == ["[3, 4]", "[6]"]
    assert record["turns"][0] == {
        "completion": "[3, 4]",
        "finish_reason": "stop",
        "start": 2,
        "end": 4,
        "env_messages": [{"role": "tool", "content": "ok"}],
        "reward": 0.5,
        "flags": ["invalid_tool_call"],
        "forked": False,
        "drifted": False,
    }


def test_a_fork_has_a_sequence_of_its_own(tmp_path):
    turns = (Turn((1, 2), said([3, 4], 5)), Turn((1, 9), said([6], 6), forked=True))
    path = tmp_path / "step_1.jsonl"
    made = (TrainedSequence(1.0, 1.0, 0.5), TrainedSequence(1.0, 1.0, (0.25,)))
    write_rollouts(path, [RolloutGroup(0, text_prompt(), (Rollout("0/0", turns, 1.0),))], 1, {"0/0": made})
    (record,) = read(path)
    assert record["token_ids"] == [1, 2, 3, 4] and record["advantage"] == 0.5
    (fork,) = record["forks"]
    assert fork["token_ids"] == [1, 9, 6] and fork["loss_mask"] == [False, False, True]
    assert fork["weight_versions"] == [[6, 2, 3]] and fork["advantage"] == [0.25]


def test_what_was_written_is_read_again(tmp_path):
    prompt = text_prompt("1+1=")
    turns = (
        Turn(prompt.token_ids, said([3, 4, 5], 5, 6), (Message("tool", "é"),), 0.5, frozenset(TurnFlag)),
        Turn((*prompt.token_ids, 3, 4, 5, 9), said([6], 6), (Message("user", "x"),), 0.5, drifted=True),
        Turn((8, 8), said([7], 6), forked=True),
        Turn((8, 8, 7, 1), said([7], 7)),
    )
    good = Rollout("7/0", turns, 1.0, metrics={"m": 1.0}, reward_components={"a": 2.0}, end=RolloutEnd.CONTEXT)
    bad = Rollout("7/1", (Turn(prompt.token_ids, said([1], 1)),), 0.0, RolloutStatus.OK, end=RolloutEnd.LENGTH)
    other = Rollout("9/0", (Turn(prompt.token_ids, said([1], 1)),), 0.0)
    groups = [RolloutGroup(7, prompt, (good, bad)), RolloutGroup(9, replace(prompt, prompt_id="p1"), (other,))]
    trained = {
        "7/0": (TrainedSequence(1.0, 1.0, 0.5), TrainedSequence(1.0, 1.0, (0.5, 0.25))),
        "7/1": (TrainedSequence(0.0, 0.0, -0.5),),
        "9/0": (TrainedSequence(0.0, 1.0, 0.0),),
    }
    path = tmp_path / "step_2.jsonl"
    write_rollouts(path, groups, 2, trained)
    dump = read_rollouts(path)
    assert (dump.step, dump.groups, dump.trained) == (2, groups, trained)
    write_rollouts(path, groups, 4)
    assert read_rollouts(path).trained == {}


def test_half_a_character_of_an_environment_does_not_end_the_run(tmp_path):
    turns = (Turn((1,), said([3], 5), (Message("tool", "a\ud83d"),)),)
    path = tmp_path / "step_1.jsonl"
    write_rollouts(path, [RolloutGroup(0, text_prompt(), (Rollout("0/0", turns, 1.0),))], 1)
    assert read(path)[0]["turns"][0]["env_messages"] == [{"role": "tool", "content": "a?"}]


@pytest.mark.parametrize("text", ["", "{}\n", "no json\n", "[1]\n"])
def test_another_file_is_told_apart(tmp_path, text):
    path = tmp_path / "step_1.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match="is no file of rollouts"):
        read_rollouts(path)
