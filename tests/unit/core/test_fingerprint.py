"""The fingerprint changes with what a run computes, and with nothing else."""

import pytest

from rl.controller.config import MasterConfig
from rl.core.config_file import build, load
from rl.core.config_paths import find_config
from rl.core.fingerprint import semantic_fingerprint


def _config(*overrides: str) -> MasterConfig:
    return build(load(find_config("grpo_smollm2_cpu"), overrides, MasterConfig), MasterConfig, allow_unknown=False)


@pytest.mark.parametrize(
    "override",
    ["grpo.max_num_steps=7", "logger.log_dir=x", "cluster.threads.policy=1", "policy.generation.vllm_cfg.block_size=8"],
)
def test_operational_keys_do_not_count(override: str) -> None:
    assert semantic_fingerprint(_config(override)) == semantic_fingerprint(_config())


@pytest.mark.parametrize(
    "override",
    [
        "grpo.seed=7",
        "policy.optimizer.kwargs.betas=[0.8,0.99]",
        "env.math.literal_answer=false",
        "extras.note=x",
        "policy.generation.vllm_cfg.vllm_kwargs.seed=1",
    ],
)
def test_semantic_keys_count(override: str) -> None:
    assert semantic_fingerprint(_config(override)) != semantic_fingerprint(_config())


def test_the_fingerprint_is_stable_under_spelling() -> None:
    assert semantic_fingerprint(_config("policy.optimizer.kwargs.lr=0.00001")) == semantic_fingerprint(_config())
