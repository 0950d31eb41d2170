import json
import math

from rl.core.types import Completion, FinishReason, Rollout, RolloutGroup, RolloutStatus, Turn, VersionSpan
from rl.telemetry.rollout_log import write_rollouts
from tests.support.completions import completion, text_prompt


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_line_per_rollout_with_all_that_was_trained_on(tmp_path):
    prompt = text_prompt("1+1=", {"answer": "2"})
    good = Rollout("7/0", (Turn(prompt.token_ids, completion("2\n"), reward=1.0),), 1.0)
    bad = Rollout(
        "7/1",
        (
            Turn(
                prompt.token_ids,
                completion("é"),
            ),
        ),
        math.nan,
        RolloutStatus.REWARD_TIMEOUT,
        {"x": math.inf},
    )
    path = tmp_path / "rollouts" / "step_3.jsonl"
    write_rollouts(path, [RolloutGroup(7, prompt, (good, bad))], 3, {"7/0": 0.5})
    first, second = read(path)
    assert first["step"] == 3 and first["group_id"] == 7 and first["rollout_id"] == "7/0" and first["prompt_id"] == "p0"
    assert first["prompt"] == [{"role": "text", "content": "1+1="}] and first["completion"] == "2\n"
    assert first["token_ids"] == list(b"1+1=2\n") and first["loss_mask"] == [False] * 4 + [True] * 2
    assert first["logprobs"] == [None] * 4 + [-0.5] * 2 and first["weight_versions"] == [[0, 4, 6]]
    assert (first["reward"], first["advantage"], first["status"]) == (1.0, 0.5, "ok")
    assert (second["reward"], second["advantage"], second["status"]) == (None, None, "reward_timeout")
    assert second["completion"] == "é" and second["metrics"] == {"x": None}
    assert [file.name for file in path.parent.iterdir()] == ["step_3.jsonl"]


def test_the_turns_of_one_rollout_are_one_sequence(tmp_path):
    def said(tokens, version):
        spans = (VersionSpan(version, 0, len(tokens)),)
        return Completion(tuple(tokens), (-1.0,) * len(tokens), FinishReason.STOP, spans, str(tokens))

    turns = (Turn((1, 2), said([3, 4], 5)), Turn((1, 2, 3, 4, 9), said([6], 6)))
    path = tmp_path / "step_1.jsonl"
    write_rollouts(path, [RolloutGroup(0, text_prompt(), (Rollout("0/0", turns, 1.0),))], 1)
    (record,) = read(path)
    assert record["token_ids"] == [1, 2, 3, 4, 9, 6]
    assert record["loss_mask"] == [False, False, True, True, False, True]
    assert record["weight_versions"] == [[5, 2, 4], [6, 5, 6]] and record["completion"] == ["[3, 4]", "[6]"]
