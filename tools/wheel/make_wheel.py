"""Pack files into a wheel (PEP 427) whose bytes depend on nothing but its content.

The metadata come from pyproject.toml; which file goes where comes from a list that the Bazel rule writes, one
`source<TAB>place in the wheel` per line. Standard library only. It builds nothing and checks no imports.

    python3.11 make_wheel.py --pyproject pyproject.toml --files files.txt --tag cp311-cp311-linux_x86_64 --output x.whl
"""

import argparse
import base64
import hashlib
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip file can carry
MODE_FILE = 0o100644 << 16
MODE_LIBRARY = 0o100755 << 16


def metadata(project: dict[str, Any], readme: str) -> str:
    """Render the METADATA file (core metadata 2.1) of a [project] table."""
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {project['name']}",
        f"Version: {project['version']}",
        f"Summary: {project['description']}",
        f"License: {project['license']['text']}",
        f"Requires-Python: {project['requires-python']}",
        "Description-Content-Type: text/markdown",
    ]
    lines += [f"Requires-Dist: {requirement}" for requirement in project["dependencies"]]
    for extra, requirements in project.get("optional-dependencies", {}).items():
        lines.append(f"Provides-Extra: {extra}")
        lines += [f'Requires-Dist: {requirement} ; extra == "{extra}"' for requirement in requirements]
    return "\n".join([*lines, "", readme])


def entry_points(project: dict[str, Any]) -> str:
    """Render the console commands and the plug-ins of a [project] table."""
    groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
    lines = []
    for group, targets in groups.items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in targets.items()), ""]
    return "\n".join(lines)


def write_wheel(output: Path, project: dict[str, Any], tag: str, files: dict[str, bytes], readme: str = "") -> None:
    """Write the wheel.

    Args:
        output: path of the wheel.
        project: the [project] table of pyproject.toml.
        tag: the compatibility tag, for example cp311-cp311-linux_x86_64.
        files: content by place in the wheel.
        readme: the long description.
    """
    folder = f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    wheel = ["Wheel-Version: 1.0", "Generator: tandem", "Root-Is-Purelib: false", f"Tag: {tag}", ""]
    everything = {
        **files,
        f"{folder}/METADATA": metadata(project, readme).encode(),
        f"{folder}/WHEEL": "\n".join(wheel).encode(),
        f"{folder}/entry_points.txt": entry_points(project).encode(),
    }
    record = []
    with zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(everything):
            digest = base64.urlsafe_b64encode(hashlib.sha256(everything[name]).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(everything[name])}")
            _add(archive, name, everything[name])
        record.append(f"{folder}/RECORD,,")
        _add(archive, f"{folder}/RECORD", "\n".join([*record, ""]).encode())


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    info = zipfile.ZipInfo(name, date_time=EPOCH)
    info.compress_type = zipfile.ZIP_DEFLATED
    info.create_system = 3  # Unix, so that the mode below counts
    info.external_attr = MODE_LIBRARY if name.endswith(".so") else MODE_FILE
    archive.writestr(info, content, compresslevel=6)


def main() -> int:
    """Read the list and the metadata, and write the wheel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pyproject", type=Path, required=True)
    parser.add_argument("--readme", type=Path)
    parser.add_argument("--license", type=Path, required=True)
    parser.add_argument("--files", type=Path, required=True, help="lines of `source<TAB>place in the wheel`")
    parser.add_argument("--tag", required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    project = tomllib.loads(options.pyproject.read_text(encoding="utf-8"))["project"]
    name = f"{project['name'].replace('-', '_')}-{project['version']}"
    if options.output.name != f"{name}-{options.tag}.whl":
        parser.error(f"pyproject.toml says {name}, the wheel is to be called {options.output.name}; change tools/wheel")
    pairs = [line.split("\t") for line in options.files.read_text(encoding="utf-8").splitlines()]
    files = {place: Path(source).read_bytes() for source, place in pairs}
    files[f"{name}.dist-info/LICENSE"] = options.license.read_bytes()
    readme = options.readme.read_text(encoding="utf-8") if options.readme else ""
    write_wheel(options.output, project, options.tag, files, readme)
    return 0


if __name__ == "__main__":
    sys.exit(main())
