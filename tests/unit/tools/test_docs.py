"""The references are what the code says."""

import re
from pathlib import Path

from rl.controller.config import MasterConfig
from rl.core.config_schema import leaf_fields, sections
from rl.core.metric_registry import metric_groups
from tools import docs

ROOT = Path(docs.__file__).resolve().parent.parent


def test_the_references_are_up_to_date() -> None:
    assert (ROOT / "docs" / "config.md").read_text() == docs.reference(), "run: python3 tools/docs.py"
    assert (ROOT / "docs" / "metrics.md").read_text() == docs.metrics_reference(), "run: python3 tools/docs.py"


def test_every_metric_has_a_row() -> None:
    rows = [line for line in docs.metrics_reference().splitlines() if line.startswith("| `")]
    specs = [spec for _, specs in metric_groups() for spec in specs]
    assert [row.split("`")[1] for row in rows] == [spec.name for spec in specs]
    assert all(row.replace("\\|", "").count("|") == 6 for row in rows)


def test_every_key_has_a_meaning() -> None:
    choices = {"kind", "backend", "name"}
    silent = [
        f"{section.key}.{name}"
        for section in sections(MasterConfig)
        for name, info in leaf_fields(section.cls)
        if not info.description and name not in choices
    ]
    assert silent == []


def test_no_prose_looks_like_html_which_readers_would_not_show() -> None:
    prose = re.sub("`[^`]*`", "", docs.reference() + docs.metrics_reference())
    assert re.findall(r"</?[a-z]+", prose) == []


def test_links_between_sections_lead_to_headings() -> None:
    text = docs.reference().replace("&lt;", "<")
    headings = {docs._anchor(line.removeprefix("## ")) for line in text.splitlines() if line.startswith("## ")}
    links = set(re.findall(r"\]\(#([^)]+)\)", text))
    assert links and links <= headings
