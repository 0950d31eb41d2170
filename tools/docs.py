"""Write the references: docs/config.md from the configuration classes, docs/metrics.md from the registry of metrics.

python3 tools/docs.py            # writes the files
python3 tools/docs.py --check    # exit code 1 when a file is not what the code says
"""

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rl.controller.config import MasterConfig
from rl.core.config_schema import SectionDoc, allowed, is_operational, leaf_fields, sections
from rl.core.config_view import scalar
from rl.core.interpolation import RESOLVER_NAMES
from rl.core.metric_registry import MetricSpec, metric_groups

INTRODUCTION = f"""\
# Configuration reference

Generated from the classes by `python3 tools/docs.py`; do not edit. How files, overrides and interpolation work is in
[configuration.md](configuration.md). `tandem config FILE` prints a resolved configuration with all its sources.

A *run* key says how a run is carried out; runs that differ only in such keys compute the same, and `--resume auto` goes
on across a change of them. Interpolation knows the functions {", ".join(f"`{name}`" for name in RESOLVER_NAMES)}.
"""
METRICS_INTRODUCTION = """\
# Metrics

Generated from `rl/core/metric_tables.py` by `python3 tools/docs.py`; do not edit. These are the names in
`metrics.jsonl` and of every tracker. A name that is not here is an error, except below a name that ends in `*`. A
metric over nothing (no valid rollout, no trained token) is left out rather than reported as 0. Where a step has several
optimizer steps, means are averaged over them, counts added, and extrema stay extrema.
"""
OWN_KEYS = """
## extras

A mapping of your own keys. Tandem does not read them; they are stored with the run and are part of its identity.
"""


def reference() -> str:
    """Return the text of docs/config.md."""
    described: dict[type, str] = {}
    parts = [INTRODUCTION]
    for section in sections(MasterConfig):
        title = section.key + (f" with {section.variant}" if section.variant else "")
        heading = f"\n## {_prose(title)}"
        if section.cls in described:
            first = described[section.cls]
            if first != title:
                parts.append(f"{heading}\n\nAs [{_prose(first)}](#{_anchor(first)}).\n")
            continue
        described[section.cls] = title
        meaning = _prose(inspect.cleandoc(section.cls.__doc__ or ""))
        parts.append("\n".join([heading, "", meaning, "", *_table(section)]))
    parts.append(OWN_KEYS)
    return "\n".join(part.strip("\n") + "\n" for part in parts)


def _table(section: SectionDoc) -> Iterator[str]:
    rows = list(leaf_fields(section.cls))
    if not rows:
        return
    yield "| key | allowed | default | | meaning |"
    yield "|---|---|---|---|---|"
    for name, info in rows:
        default = "required" if info.is_required() else f"`{scalar(info.get_default(call_default_factory=True))}`"
        kind = "run" if is_operational(info) else ""
        yield f"| `{name}` | `{_cell(allowed(info))}` | {_cell(default)} | {kind} | {_prose(info.description or '')} |"


def metrics_reference() -> str:
    """Return the text of docs/metrics.md."""
    parts = [METRICS_INTRODUCTION]
    for group, specs in metric_groups():
        heading = [
            "",
            f"## {group.title}",
            "",
            "| metric | unit | reduction | logged | meaning |",
            "|---|---|---|---|---|",
        ]
        parts.append("\n".join([*heading, *map(_metric_row, specs)]) + "\n")
    return "".join(parts)


def _metric_row(spec: MetricSpec) -> str:
    when = spec.when or "always"
    return f"| `{spec.name}` | {spec.unit} | {_cell(spec.reduction)} | {_cell(when)} | {_prose(spec.meaning)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _prose(text: str) -> str:
    """Keep Markdown from taking <name> or </name> for HTML."""
    return re.sub(r"<(?=/?[a-z])", "&lt;", _cell(text))


def _anchor(title: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    kept = [character for character in title.lower() if character.isalnum() or character in " -_"]
    return "".join(kept).replace(" ", "-")


def main() -> int:
    """Write the references, or compare them."""
    folder = Path(__file__).resolve().parent.parent / "docs"
    texts = {"config.md": reference(), "metrics.md": metrics_reference()}
    if "--check" not in sys.argv[1:]:
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        return 0
    stale = [name for name, text in texts.items() if _read(folder / name) != text]
    for name in stale:
        print(f"{name} is not what the code says; run python3 tools/docs.py")
    return 1 if stale else 0


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.exists() else ""


if __name__ == "__main__":
    sys.exit(main())
