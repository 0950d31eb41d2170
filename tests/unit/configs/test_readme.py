"""The shortest configuration in the README is one that loads and passes the checks."""

import re
from pathlib import Path

from rl.controller.checks import find_conflicts
from rl.controller.load import load_config

README = Path(__file__).parents[3] / "README.md"


def test_the_readmes_configuration_loads_and_passes_the_checks(tmp_path: Path) -> None:
    block = re.search(r"```yaml\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    path = tmp_path / "run.yaml"
    path.write_text(block.group(1), encoding="utf-8")
    config, _ = load_config(path, [])
    assert list(find_conflicts(config)) == []
    assert config.data.env_name == "mine"
