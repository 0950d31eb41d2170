"""Whole tiny runs of several turns: tools whose calls a random model gets wrong, and a puzzle."""

import json

from tests.support.tiny_run import make_tiny_run

FUNCTION = {"kind": "function", "target": "tests.support.tiny_rewards:share_of_letters"}
# Bytes that a random model writes often enough open and close a call.
TOOLS = {
    "kind": "tools",
    "tools": {"calculator": {"kind": "calculator"}},
    "scorer": FUNCTION,
    "call_open": "e",
    "call_close": "a",
    "max_result_chars": 8,
}


def changes(settings, **grpo):
    return {
        "env": {"reward": settings},
        "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 4, "max_num_steps": 2, "val_period": 0}
        | grpo,
        "checkpointing": {"enabled": False},
    }


def test_malformed_calls_are_answered_counted_and_trained_on_in_a_run(tmp_path):
    setup = make_tiny_run(tmp_path, changes=changes(TOOLS, max_rollout_turns=3, invalid_tool_call_advantage=-1.0))
    report = setup.run(["policy.max_total_sequence_length=96", "policy.generation.max_new_tokens=16"])
    assert (report.steps, setup.status()) == (2, "finished")
    lines = [line for line in setup.metrics() if line["step"] > 0]
    assert sum(line["train/num_invalid_tool_calls"] for line in lines) > 0
    assert all(line["train/grad_norm"] > 0 and line["train/num_reward_errors"] == 0 for line in lines)
    for line in lines:
        assert line["train/env/invalid_tool_calls"] <= line["train/env/tool_calls"] <= 4.0 * 3


def test_a_puzzle_is_played_for_as_many_turns_as_the_run_allows(tmp_path):
    setup = make_tiny_run(tmp_path, changes=changes({"kind": "sliding_puzzle"}, max_rollout_turns=2))
    board = {"_override_": True, "kind": "sliding_puzzle", "rows": 2, "columns": 2, "shuffle_moves": 3}
    setup.run(
        [
            f"data.train={json.dumps(board)}",
            "data.validation=null",
            "policy.max_total_sequence_length=500",
            "policy.generation.max_new_tokens=4",
        ]
    )
    for line in setup.metrics():
        assert line["train/avg_turns_per_sample"] == 2.0 and line["train/env/moves"] == 2.0
        assert line["train/reward"] == line["train/env/solved"] == 0.0
