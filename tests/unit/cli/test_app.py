"""The command starts at once, imports nothing heavy, and speaks in exit codes."""

from pathlib import Path

import pytest

import rl
from tests.support.tandem_command import run_python, run_tandem

HEAVY = ["torch", "ray", "vllm", "transformers"]


def _imports_after(statements: str, folder: Path) -> list[str]:
    """Run statements that may exit, and return the heavy packages imported by then."""
    script = f"import sys\ntry:\n    {statements}\nexcept SystemExit:\n    pass\n"
    script += f"print('HEAVY', [name for name in {HEAVY} if name in sys.modules])"
    result = run_python(["-c", script], folder)
    assert result.exit_code == 0, result.stderr
    return [line for line in result.stdout.splitlines() if line.startswith("HEAVY")]


@pytest.mark.parametrize(
    "statements",
    [
        "import rl",
        "from rl.cli.app import main; main(['config'])",
        "from rl.cli.app import main; main(['train', '--dry-run'])",
        "from rl.cli.app import main; main(['train', '--help'])",
        "from rl.cli.app import main; main(['train', 'grpo.sed=1'])",
    ],
)
def test_nothing_heavy_is_imported(tmp_path: Path, statements: str) -> None:
    assert _imports_after(statements, tmp_path) == ["HEAVY []"]


def test_importing_the_package_imports_nothing_else_of_ours(tmp_path: Path) -> None:
    result = run_python(["-c", "import sys, rl; print([n for n in sys.modules if n.startswith('rl.')])"], tmp_path)
    assert result.stdout.strip() == "[]"


def test_the_version_is_printed(tmp_path: Path) -> None:
    result = run_tandem(["--version"], tmp_path)
    assert (result.exit_code, result.stdout) == (0, f"tandem {rl.__version__}\n")


@pytest.mark.parametrize("arguments", [["nonsense"], ["train", "--nonsense"], ["train", "--config"], []])
def test_bad_usage_is_exit_code_2(tmp_path: Path, arguments: list[str]) -> None:
    assert run_tandem(arguments, tmp_path).exit_code == 2


def test_under_bazel_run_paths_are_relative_to_where_the_user_stands(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "mine.yaml").write_text("grpo: {sed: 1}\n")
    result = run_tandem(
        ["train", "--config", "mine.yaml"], tmp_path / "elsewhere", BUILD_WORKING_DIRECTORY=str(tmp_path)
    )
    assert result.exit_code == 2
    assert "mine.yaml:1: unknown key grpo.sed" in result.stderr


def test_the_bazel_entry_point_is_the_train_command(tmp_path: Path) -> None:
    result = run_python(["-m", "rl.train_grpo", "--dry-run", "--", "grpo.max_num_steps=2"], tmp_path)
    assert result.exit_code == 0, result.stderr
    assert "grpo_smollm2_cpu can run" in result.stdout
