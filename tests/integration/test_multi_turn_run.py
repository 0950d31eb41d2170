"""Runs of several turns with the tiny model: what is trained on is what was sampled, and what is logged is that too."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rl.controller.reward_metrics import batch_metrics, reward_metrics
from rl.controller.rollout_metrics import rollout_metrics
from rl.controller.step_metrics import environment_metrics
from rl.core.batch import TrainBatch
from rl.core.errors import DataError, FatalError
from rl.core.types import RolloutEnd, TrainedSequence
from rl.telemetry.rollout_log import RolloutDump, read_rollouts
from rl.telemetry.rollout_view import rollout_text
from tests.support.letters_game import LettersGame
from tests.support.tiny_run import TinyRun, make_tiny_run

TURNS = {"num_prompts_per_step": 2, "num_generations_per_prompt": 4, "max_rollout_turns": 3}
# Answers of earlier turns are cut to their first character.
FORGETFUL = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|assistant|>{{ m['content'][:1] }}<|eos|>"
    "{% else %}<|user|>{{ m['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_game(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: dict[str, Any]) -> TinyRun:
    """A run of the letters game; an environment of tools stands for it in the configuration."""
    monkeypatch.setattr("rl.controller.setup.build_environments", lambda _: {"reward": LettersGame()})
    sections: dict[str, dict[str, Any]] = {
        "grpo": TURNS,
        "policy": {"max_total_sequence_length": 64},
        "data": {"prompt_format": "chat"},
        "env": {"reward": {"kind": "tools", "tools": {"calculator": {"kind": "calculator"}}}},
    }
    return make_tiny_run(folder, changes={name: values | changes.get(name, {}) for name, values in sections.items()})


def trained_batch(dump: RolloutDump) -> TrainBatch:
    """The batch of a step, from its dump alone."""
    batch = TrainBatch.from_groups(dump.groups)
    sequences = [made for group in dump.groups for r in group.rollouts for made in dump.trained[r.rollout_id]]
    advantages = torch.zeros(batch.num_tokens)
    advantages[batch.loss_mask] = torch.cat(
        [_sampled(made, int(n)) for made, n in zip(sequences, _sampled_tokens(batch), strict=True)]
    )
    return batch.with_columns(
        rewards=torch.tensor([made.reward for made in sequences]),
        sample_weights=torch.tensor([made.weight for made in sequences]),
        advantages=advantages,
    )


def _sampled(made: TrainedSequence, count: int) -> torch.Tensor:
    if isinstance(made.advantages, tuple):
        return torch.tensor(made.advantages)
    return torch.full((count,), made.advantages)


def _sampled_tokens(batch: TrainBatch) -> torch.Tensor:
    counts = torch.zeros(batch.num_sequences, dtype=torch.int64)
    return counts.index_add(0, batch.sequence_ids, batch.loss_mask.to(torch.int64))


def check_step(run: TinyRun, step: int) -> RolloutDump:
    """The metrics that a step logged are those of what it dumped."""
    logged = next(line for line in run.metrics() if line["step"] == step)
    dump = read_rollouts(run.log_dir / "exp_001" / "rollouts" / f"step_{step}.jsonl")
    batch = trained_batch(dump)
    rollouts = [rollout for group in dump.groups for rollout in group.rollouts]
    recomputed = (
        reward_metrics(dump.groups, batch)
        | batch_metrics(batch, step - 1)
        | rollout_metrics(dump.groups)
        | environment_metrics(rollouts)
        | {"global_valid_toks": batch.count().tokens}
    )
    assert recomputed == {name: pytest.approx(logged[f"train/{name}"], rel=1e-6, abs=1e-7) for name in recomputed}
    # The trainer computes the generator's log-probabilities, so it saw the same ids in the same order.
    assert logged["train/max_logprob_diff"] <= 1e-4
    return dump


def test_metrics_recomputed_from_the_dumped_rollouts_equal_the_logged_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_game(tmp_path, monkeypatch)
    run.run()
    for step in (1, 2, 3):
        dump = check_step(run, step)
        for group in dump.groups:
            assert [len(rollout.turns) for rollout in group.rollouts] == [1, 2, 3, 1]
            assert all(len(rollout.sequences) == 1 for rollout in group.rollouts)
    line = run.metrics()[-1]
    assert line["train/max_turns_per_sample"] == 3.0 and line["train/avg_turns_per_sample"] == 1.75
    assert line["train/num_forked_rollouts"] == 0.0 and line["train/mean_env_tokens_per_sample"] > 0.0
    assert line["train/reward/letters"] == pytest.approx(line["train/reward"])


def test_a_template_that_rewrites_history_forks_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections: dict[str, dict[str, Any]] = {
        "data": {"rewritten_history": "fork"},
        "policy": {"tokenizer": {"chat_template": FORGETFUL}},
    }
    run = make_game(tmp_path, monkeypatch, **sections)
    run.run(["grpo.max_num_steps=2"])
    for step in (1, 2):
        dump = check_step(run, step)
        forked = [r for group in dump.groups for r in group.rollouts if len(r.sequences) > 1]
        assert forked
        for rollout in forked:
            made = dump.trained[rollout.rollout_id]
            assert len(made) == len(rollout.sequences)
            assert len({(sequence.reward, sequence.weight, sequence.advantages) for sequence in made}) == 1
    line = run.metrics()[-1]
    assert line["train/num_sequences"] > line["train/num_rollouts"] == 8.0


def test_a_template_that_rewrites_history_ends_the_run_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_game(tmp_path, monkeypatch, policy={"tokenizer": {"chat_template": FORGETFUL}})
    with pytest.raises((FatalError, DataError), match="the chat template rewrites the history"):
        run.run()


def test_an_environment_of_several_turns_is_played_to_the_last_one(tmp_path: Path) -> None:
    sections: dict[str, dict[str, Any]] = {
        "grpo": TURNS,
        "policy": {"max_total_sequence_length": 480},
        "data": {"train": {"kind": "sliding_puzzle", "rows": 2, "columns": 2, "size": 4}, "validation": None},
        "env": {"reward": {"kind": "sliding_puzzle"}},
    }
    run = make_tiny_run(tmp_path, changes=sections)
    run.run(["grpo.max_num_steps=1"])
    dump = check_step(run, 1)
    rollout = dump.groups[0].rollouts[0]
    assert (len(rollout.turns), rollout.end) == (3, RolloutEnd.MAX_TURNS)
    text = rollout_text(dump.groups[0].prompt, rollout)
    assert text.count("[user] environment, ") == 3 and "No move found" in text
    # A random model makes no move: nothing is learned, and the step says so.
    line = run.metrics()[-1]
    assert line["train/max_turns_reached_rate"] == 1.0 and line["train/grad_norm"] == 0.0
