import json

import pytest

from rl.core.errors import ConfigError
from rl.environments.config import CodeEnvConfig, MathEnvConfig, PythonToolConfig, RewardModelEnvConfig, ToolsEnvConfig
from rl.environments.machine_checks import check_machine
from rl.environments.registry import check_environments
from rl.environments.sandbox import find_sandbox

RUNS_CODE = [
    CodeEnvConfig(kind="code"),
    ToolsEnvConfig(kind="tools", tools={"py": PythonToolConfig(kind="python")}, scorer=MathEnvConfig()),
]


def reward_model(folder, **values):
    return RewardModelEnvConfig(kind="reward_model", model_name=str(folder), **values)


@pytest.fixture
def no_bubblewrap(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    find_sandbox.cache_clear()
    yield
    find_sandbox.cache_clear()


@pytest.mark.parametrize("config", RUNS_CODE)
def test_what_runs_code_needs_a_sandbox(config):
    check_machine(config, "env.mine")


@pytest.mark.parametrize("config", RUNS_CODE)
def test_without_one_nothing_is_started(config, no_bubblewrap):
    with pytest.raises(ConfigError, match=r"env\.mine.*apt-get install bubblewrap"):
        check_environments({"mine": config})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "gives 2 numbers"),
        ({"id2label": {"0": "a", "1": "b", "2": "c"}}, "gives 3 numbers"),
        ({"id2label": {"0": "a"}, "architectures": ["LlamaForCausalLM"]}, "is a language model"),
        ({"id2label": 5}, "id2label an object"),
        ({"id2label": {"0": "a"}, "architectures": "LlamaForCausalLM"}, "must be a list"),
        ({"architectures": [None]}, "gives 2 numbers"),
    ],
)
def test_a_model_that_gives_no_reward_is_found_before_it_is_loaded(tmp_path, settings, words):
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=rf"env\.mine\.model_name=.*{words}"):
        check_machine(reward_model(tmp_path), "env.mine")


def test_a_model_that_is_not_there_or_not_for_this_is_reported_with_its_own_key(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"env\.mine\.model_name=.*neither an existing folder"):
        check_machine(reward_model(tmp_path / "missing"), "env.mine")
    with pytest.raises(ConfigError, match=r"env\.mine\.model_name=package.*not installed"):
        check_machine(reward_model("package:nothing_here/x.gguf"), "env.mine")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"env\.mine\.model_name=no/body.*cannot be downloaded"):
        check_machine(reward_model("no/body"), "env.mine")


def test_a_gpu_that_is_not_there_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "config.json").write_text(json.dumps({"id2label": {"0": "a"}}))
    check_machine(reward_model(tmp_path), "env.mine")
    with pytest.raises(ConfigError, match=r"env\.mine\.device=cuda:1.*no GPU"):
        check_machine(reward_model(tmp_path, device="cuda:1"), "env.mine")
