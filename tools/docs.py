"""Write docs/config.md, the reference of every configuration key, from the classes.

python3 tools/docs.py            # writes the file
python3 tools/docs.py --check    # exit code 1 when the file is not what the classes say
"""

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

INTRODUCTION = f"""\
# Configuration reference

Generated from the classes by `python3 tools/docs.py`; do not edit. How files, overrides and interpolation work is in
[configuration.md](configuration.md). `tandem config FILE` prints a resolved configuration with all its sources.

A *run* key says how a run is carried out; runs that differ only in such keys compute the same, and `--resume auto` goes
on across a change of them. Interpolation knows the functions {", ".join(f"`{name}`" for name in RESOLVER_NAMES)}.
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
        title = f"\n## {section.key}" + (f" with {section.variant}" if section.variant else "")
        if section.cls in described:
            if described[section.cls] != title.strip():
                first = described[section.cls]
                parts.append(f"{title}\n\nAs [{first.removeprefix('## ')}](#{_anchor(first)}).\n")
            continue
        described[section.cls] = title.strip()
        parts.append("\n".join([title, "", (section.cls.__doc__ or "").strip(), "", *_table(section)]))
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


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _prose(text: str) -> str:
    """Keep Markdown from taking <name> for HTML."""
    return re.sub(r"<(?=[a-z])", "&lt;", _cell(text))


def _anchor(title: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    kept = [character for character in title.removeprefix("## ").lower() if character.isalnum() or character in " -_"]
    return "".join(kept).replace(" ", "-")


def main() -> int:
    """Write the reference, or compare it."""
    file = Path(__file__).resolve().parent.parent / "docs" / "config.md"
    text = reference()
    if "--check" in sys.argv[1:]:
        if file.read_text(encoding="utf-8") == text:
            return 0
        print(f"{file.name} is not what the classes say; run python3 tools/docs.py")
        return 1
    file.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
