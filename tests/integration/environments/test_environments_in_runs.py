"""Whole tiny runs whose rewards come from a classifier and from programs in the sandbox."""

import json

import pytest

from rl.core.errors import ConfigError
from rl.environments.sandbox import find_sandbox
from tests.support.tiny_classifier import make_classifier
from tests.support.tiny_run import make_tiny_run

GROUP = 4


def in_env(settings):
    return {"env": {"reward": settings}, "grpo": {"max_num_steps": 2}, "checkpointing": {"enabled": False}}


def test_a_classifier_trains_the_tiny_model(tmp_path):
    classifier = make_classifier(tmp_path / "classifier")
    setup = make_tiny_run(tmp_path, changes=in_env({"kind": "reward_model", "model_name": str(classifier)}))
    setup.run()
    lines = [line for line in setup.metrics() if "train/env/reward_model_env/mean_reward" in line]
    assert len(lines) == 2
    for line in lines:
        assert line["train/env/reward_model_env/num_samples"] == GROUP
        assert line["train/env/reward_model_env/mean_reward"] == pytest.approx(line["train/reward"], abs=1e-5)
        assert line["train/env/reward_model_env/std_reward"] > 0.0
        assert line["train/grad_norm"] > 0.0


def test_programs_are_tested_in_a_run(tmp_path):
    rows = [{"prompt": f"say {index}:", "tests": [{"stdin": "", "stdout": "1"}]} for index in range(4)]
    data = tmp_path / "programs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = in_env({"kind": "code", "open_tag": " ", "close_tag": "e"})
    setup = make_tiny_run(tmp_path, changes=changes)
    setup.run([f"data.train.path={data}", "data.train.answer_key=null", "data.validation=null"])
    lines = [line for line in setup.metrics() if "train/env/accuracy" in line]
    assert len(lines) == 2
    assert all(line["train/reward"] == 0.0 and line["train/num_reward_errors"] == 0 for line in lines)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "reward_model", "model_name": "/no/such/model"}, "env.reward.model_name=/no/such/model"),
        ({"kind": "code"}, "env.reward: .*apt-get install bubblewrap"),
    ],
)
def test_what_is_missing_is_found_before_anything_starts(tmp_path, monkeypatch, settings, words):
    setup = make_tiny_run(tmp_path, changes=in_env(settings))
    monkeypatch.setenv("PATH", str(tmp_path))
    find_sandbox.cache_clear()
    with pytest.raises(ConfigError, match=words):
        setup.run()
    find_sandbox.cache_clear()
