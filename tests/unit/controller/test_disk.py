"""Tests of rl.controller.disk."""

from pathlib import Path

import pytest

from rl.controller import disk
from rl.controller.disk import check_disk, needed_bytes
from rl.controller.load import load_config
from rl.core.errors import FatalError
from tests.support.tiny_run import make_tiny_run

HALF = "policy.precision=bfloat16"
NO_CHECKPOINTS, NO_EXPORT = "checkpointing.enabled=false", "checkpointing.export_hf=false"


@pytest.mark.parametrize(
    ("overrides", "bytes_per_parameter"),
    [
        ([], 2 * 12 + 4),
        ([HALF], 2 * 12 + 2),
        (["checkpointing.save_optimizer=false"], 2 * 4 + 4),
        ([NO_EXPORT], 2 * 12),
        ([NO_CHECKPOINTS], 4),
        ([NO_CHECKPOINTS, HALF], 2),
        ([NO_CHECKPOINTS, NO_EXPORT], 0),
    ],
)
def test_two_checkpoints_and_the_export_are_on_the_disk_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], bytes_per_parameter: int
) -> None:
    config, _ = load_config(make_tiny_run(tmp_path).config, overrides)
    monkeypatch.setattr(disk, "parameter_count", lambda _: 10**15)
    assert needed_bytes(config, tmp_path) == bytes_per_parameter * 10**15
    if bytes_per_parameter:
        with pytest.raises(FatalError, match="MiB free"):
            check_disk(config, tmp_path, tmp_path)
    else:
        check_disk(config, tmp_path, tmp_path)


def test_a_model_of_unknown_size_is_let_through(tmp_path: Path) -> None:
    config, _ = load_config(make_tiny_run(tmp_path).config, [])
    assert needed_bytes(config, tmp_path) is None
    check_disk(config, tmp_path, tmp_path)
