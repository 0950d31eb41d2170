"""`tandem config` prints YAML that loads again, with the source of every value."""

from pathlib import Path

from rl.controller.load import load_config
from rl.core.config_paths import find_config
from tests.support.tandem_command import quickest_tandem, run_tandem


def test_the_resolved_configuration_is_printed_with_sources(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: base.yaml\ngrpo:\n  seed: 3\n")
    (tmp_path / "base.yaml").write_text(find_config("smollm2_cpu").read_text().replace("defaults: base.yaml", ""))
    overrides = ["grpo.max_num_steps=2", "async_rl.sampler.max_lookahead_versions=0", "env.math.kind=math"]
    result = run_tandem(["config", "mine.yaml", *overrides], tmp_path)
    assert result.exit_code == 0, result.stderr
    # Of a name that several sections have, the first counts: grpo comes first.
    lines = {line.split(":")[0].strip(): line for line in reversed(result.stdout.splitlines())}
    assert lines["seed"].endswith("# mine.yaml:3")
    assert "# base.yaml:" in lines["num_prompts_per_step"]
    assert lines["max_num_steps"].endswith("# command line")
    assert lines["val_period"].endswith("# class default")
    (tmp_path / "printed.yaml").write_text(result.stdout)
    printed, _ = load_config(tmp_path / "printed.yaml", [])
    assert (printed.grpo.seed, printed.grpo.max_num_steps) == (3, 2)


def test_the_configuration_may_be_an_option_as_it_is_of_other_commands(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: smollm2_cpu\n")
    printed = [
        run_tandem([*form, "grpo.seed=3"], tmp_path)
        for form in (["config", "mine.yaml"], ["config", "-c", "mine.yaml"])
    ]
    assert printed[0].exit_code == printed[1].exit_code == 0, printed[1].stderr
    assert printed[0].stdout == printed[1].stdout


def test_without_a_file_it_prints_the_default_at_once(tmp_path: Path) -> None:
    result = quickest_tandem(["config", "grpo.seed=9"], tmp_path, 2.0)
    assert result.exit_code == 0
    assert result.seconds < 2.0
    assert "seed: 9" in result.stdout


def test_settings_that_exclude_each_other_are_printed_and_refused(tmp_path: Path) -> None:
    result = run_tandem(["config", "grpo_smollm2_cpu", "policy.train_global_batch_size=48"], tmp_path)
    assert result.exit_code == 2
    assert "train_global_batch_size: 48" in result.stdout
    assert "policy.train_global_batch_size=48 does not divide" in result.stderr


def test_a_bad_key_is_refused(tmp_path: Path) -> None:
    result = run_tandem(["config", "grpo_smollm2_cpu", "grpo.sed=3"], tmp_path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "did you mean seed?" in result.stderr
