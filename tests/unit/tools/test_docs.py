"""The configuration reference is what the classes say."""

from pathlib import Path

from rl.controller.config import MasterConfig
from rl.core.config_schema import leaf_fields, sections
from tools import docs

ROOT = Path(docs.__file__).resolve().parent.parent


def test_the_reference_is_up_to_date() -> None:
    assert (ROOT / "docs" / "config.md").read_text() == docs.reference(), "run: python3 tools/docs.py"


def test_every_key_has_a_meaning() -> None:
    choices = {"kind", "backend", "name"}
    silent = [
        f"{section.key}.{name}"
        for section in sections(MasterConfig)
        for name, info in leaf_fields(section.cls)
        if not info.description and name not in choices
    ]
    assert silent == []
