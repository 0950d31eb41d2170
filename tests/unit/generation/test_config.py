"""Sampling settings that training cannot follow are refused with the key, the value, the reason and what to do."""

import pytest

from rl.controller.load import load_config
from rl.core.config_paths import find_config
from rl.core.errors import ConfigError

WHOLE = "the trainer computes those of the whole one, and every ratio would be wrong; remove it"


@pytest.mark.parametrize("backend", ["vllm", "hf"])
@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("top_p", "0.9", [WHOLE, "training takes 1.0 alone", "grpo.val_top_p, eval.top_p"]),
        ("top_p", "1.1", ["training takes 1.0 alone"]),
        ("top_k", "5", [WHOLE, "training takes null alone", "grpo.val_top_k, eval.top_k"]),
        ("temperature", "0", ["above 0", "no ratio and no gradient", "grpo.val_temperature=0"]),
        ("temperature", "-1.0", ["above 0"]),
    ],
)
def test_what_training_cannot_follow_is_refused(backend: str, key: str, value: str, words: list[str]) -> None:
    section = f"policy.generation={{_override_: true, backend: {backend}, {key}: {value}}}"
    with pytest.raises(ConfigError) as refused:
        load_config(find_config("grpo_smollm2_cpu"), [section])
    message = str(refused.value)
    assert f"policy.generation.{key}={value}:" in message
    assert [part for part in words if part not in message] == []


def test_validation_and_evaluation_may_be_greedy_or_truncated() -> None:
    overrides = ["grpo.val_temperature=0.5", "grpo.val_top_p=0.9", "grpo.val_top_k=5"]
    overrides += ["eval.temperature=0.5", "eval.top_p=0.9", "eval.top_k=5"]
    config, _ = load_config(find_config("grpo_smollm2_cpu"), overrides)
    assert (config.grpo.val_top_p, config.eval.top_k) == (0.9, 5)
