"""The table of renamed keys is true: what it calls old does not exist, and what it names does."""

import re

from rl.controller.config import MasterConfig
from rl.core.config_schema import leaf_fields, sections
from rl.core.renamed_keys import RENAMED_KEYS, renamed

EXISTING = {section.key for section in sections(MasterConfig)} | {
    f"{section.key}.{name}" for section in sections(MasterConfig) for name, _ in leaf_fields(section.cls)
}


def test_no_old_key_exists() -> None:
    assert EXISTING.isdisjoint(RENAMED_KEYS)


def test_every_new_key_exists() -> None:
    named = {key for text in RENAMED_KEYS.values() for key in re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+\b", text)}
    assert named <= EXISTING


def test_what_lies_below_an_old_section_is_covered() -> None:
    assert renamed("grpo.async_grpo.something") == RENAMED_KEYS["grpo.async_grpo"]
    assert renamed("grpo.seed") is None
