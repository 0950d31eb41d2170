"""Write the BUILD files of the Python code from its imports, or check that they are up to date.

One py_library per module, with exactly the libraries it imports; one binary per entry point; one test per folder of
unit tests, because loading torch takes longer than most of their files, and one per file of the heavier tests.
Visibility follows the layers. What cannot be read from imports stands in build_extras.toml. Lines of a BUILD file below
the marker `# Written by hand:` are kept. A module that is named only in a string (for import_object) cannot be a
dependency of the library that names it, as that could close a circle: binaries and tests take it up instead.

    python3 tools/build_files.py             # write
    python3 tools/build_files.py --check     # exit code 1 and the list of files that are out of date
"""

import argparse
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.python_imports import Module, read_tree, resolve

# The files of one folder below this one are one test.
GROUPED_TESTS = "tests/unit/"
ROOTS = ["rl", "tests", "tools", "docs/examples"]
# Folders whose BUILD file is written by hand.
NOT_OURS = {"tools/bazel_rules", "tools/wheel"}
HEADER = "# Made by tools/build_files.py from the imports; see there how to change it."
MARKER = "# Written by hand:"

# Who may use a package's modules, besides its own subpackages; the groups are declared in the root BUILD.bazel.
VISIBILITY = {
    "core": ["//:rl"],
    "ops": ["//:algorithms", "//:l2"],
    "algorithms": ["//:l2"],
    "cluster": ["//:l2"],
    "weights": ["//:l2"],
    "telemetry": ["//:l2"],
    "data": ["//:l2"],
    "trainer": ["//:l4"],
    "generation": ["//:l4"],
    "environments": ["//:l4"],
    "rollout": ["//:l4"],
    "controller": ["//:l4"],
    "cli": ["//:l4"],
}
# The protocol modules that the rollout layer sees of the layer below it.
PROTOCOLS = {"rl.generation.generator", "rl.environments.base"}
ATTRIBUTE_ORDER = ["name", "size", "timeout", "testonly", "srcs"]
ATTRIBUTES_AT_THE_END = ["deps"]


def _is_entry_point(path: str) -> bool:
    folder, _, name = path.rpartition("/")
    return folder == "rl" and (name == "__main__.py" or name.startswith("train_"))


def _is_test(path: str) -> bool:
    return path.rpartition("/")[2].startswith("test_") and path.startswith("tests/")


def _binary_name(path: str) -> str:
    stem = Path(path).stem
    return "tandem" if stem == "__main__" else stem


def _library_name(path: str) -> str:
    if _is_entry_point(path):
        return _binary_name(path) + "_lib"
    return Path(path).stem


def _label(path: str) -> str:
    folder, name = path.rpartition("/")[0], _library_name(path)
    return f"//{folder}" if folder.rpartition("/")[2] == name else f"//{folder}:{name}"


def _local(label: str, folder: str) -> str:
    """Shorten a label for use inside its own package, as buildifier wants it."""
    if label == f"//{folder}":
        return f":{folder.rpartition('/')[2]}"
    return label.removeprefix(f"//{folder}") if label.startswith(f"//{folder}:") else label


def _order(label: str) -> tuple[int, str]:
    rank = 1 if label.startswith(":") else 2 if label.startswith("//") else 3 if label.startswith("@") else 0
    return rank, label.replace(":", "!")


def _merge(attributes: dict[str, Any], more: dict[str, Any]) -> None:
    """Add attributes of a rule: lists and dictionaries grow, single values are replaced."""
    for key, value in more.items():
        if isinstance(value, list):
            attributes[key] = sorted({*attributes.get(key, []), *value}, key=_order)
        else:
            attributes[key] = {**attributes.get(key, {}), **value} if isinstance(value, dict) else value


class Generator:
    """Knows every module of the tree and renders BUILD files from them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules = read_tree(root, *[folder for folder in ROOTS if (root / folder).is_dir()])
        extras = tomllib.loads((root / "tools/build_extras.toml").read_text())
        self.rules: list[dict[str, Any]] = extras["rule"]

    def extras(self, path: str) -> dict[str, Any]:
        """Merge the rules of build_extras.toml that match a file."""
        merged: dict[str, Any] = {}
        for rule in self.rules:
            if any(fnmatch(path, pattern) for pattern in rule["match"]):
                _merge(merged, {key: value for key, value in rule.items() if key != "match"})
        return merged

    def imported(self, module: Module) -> set[str]:
        """Return the modules of the tree that a module imports when it runs, and the package that it stands in."""
        names = {resolve(item, self.modules) for item in module.imports if not item.for_types_only}
        names.add(module.dotted.rpartition(".")[0])
        if _is_test(module.path):
            folder = module.path.split("/")[:-1]
            names |= {".".join([*folder[:count], "conftest"]) for count in range(1, len(folder) + 1)}
        found = {name for name in names if name in self.modules} - {module.dotted}
        tests = sorted(name for name in found if _is_test(self.modules[name].path))
        if tests:
            raise SystemExit(
                f"{module.path} imports the test {tests[0]}, which no target holds by itself; move what both need to "
                "tests/support"
            )
        return found

    def named_in_strings(self, module: Module) -> set[str]:
        """Return the modules that a test can reach only through strings, directly or through what it imports."""
        by_import, by_string, queue = set(), set(), [(module.dotted, False)]
        while queue:
            dotted, through_string = queue.pop()
            seen = by_string if through_string else by_import
            if dotted in seen:
                continue
            seen.add(dotted)
            queue += [(name, through_string) for name in self.imported(self.modules[dotted])]
            queue += [(name, True) for name in self.modules[dotted].import_paths if name in self.modules]
        return by_string - by_import

    def render_test(self, name: str, modules: list[Module]) -> str:
        """Return the rule of one or more test files of a folder."""
        attributes: dict[str, Any] = {"name": name}
        for module in modules:
            names = self.imported(module) | self.named_in_strings(module)
            deps = sorted(_label(self.modules[name].path) for name in names)
            _merge(attributes, {"srcs": [Path(module.path).name], "deps": deps})
            _merge(attributes, self.extras(module.path))
        if "//rl:modules" in attributes["deps"]:
            others = [label for label in attributes["deps"] if not label.startswith("//rl")]
            attributes["deps"] = ["//rl:modules", *others]
        return _render("rl_pytest", attributes, modules[0].path.rpartition("/")[0])

    def render_tests(self, folder: str, modules: list[Module]) -> list[str]:
        """Return the rules of the test files of one folder."""
        if modules and folder.startswith(GROUPED_TESTS):
            return [self.render_test(Path(folder).name, modules)]
        return [self.render_test(Path(module.path).stem, [module]) for module in modules]

    def render_module(self, module: Module) -> list[str]:
        """Return the rules of one Python file that is no test."""
        folder, _, file = module.path.rpartition("/")
        extras = self.extras(module.path)
        deps = {_label(self.modules[name].path) for name in self.imported(module)} | set(extras.pop("deps", []))
        library: dict[str, Any] = {"name": _library_name(module.path), "srcs": [file], "deps": deps, **extras}
        parts = module.dotted.split(".")
        if module.dotted in PROTOCOLS:
            library["visibility"] = ["//:l3", f"//rl/{parts[1]}:__subpackages__"]
        elif parts[0] == "rl" and len(parts) == 1:
            library["visibility"] = ["//:rl"]
        rules = [_render("py_library", library, folder)]
        if _is_entry_point(module.path):
            binary = {"name": _binary_name(module.path), "srcs": [file], "deps": [":modules"]}
            rules.append(_render("rl_binary", {**binary, "visibility": ["//visibility:public"]}, folder))
        return rules

    def render_folder(self, folder: str, modules: list[Module]) -> str:
        """Return the text of one BUILD file, without what is written by hand."""
        tests = [module for module in modules if _is_test(module.path)]
        rules = [text for module in modules if module not in tests for text in self.render_module(module)]
        rules += self.render_tests(folder, tests)
        if folder == "rl":
            every = {_label(module.path) for name, module in self.modules.items() if name.split(".")[0] == "rl"}
            everything = {"name": "modules", "deps": every, "visibility": ["//:tools_and_tests"]}
            rules.insert(0, _render("py_library", everything, folder))
        helpers = sorted({text.split("(")[0] for text in rules} & {"rl_binary", "rl_pytest"})
        loads = ", ".join(f'"{helper}"' for helper in helpers)
        parts = [f'load("//tools/bazel_rules:python.bzl", {loads})'] if helpers else []
        visibility = self.package_visibility(folder)
        if visibility:
            parts.append(f"package(default_visibility = {_value(visibility, 0)})")
        return "\n\n".join([f"{HEADER}\n{parts[0]}" if parts else HEADER, *parts[1:], *rules]) + "\n"

    def package_visibility(self, folder: str) -> list[str]:
        """Return who sees a folder's libraries by default."""
        parts = folder.split("/")
        if parts[0] != "rl":
            return ["//:tools_and_tests"]
        if len(parts) == 1:
            return ["//:l4"]
        return sorted([*VISIBILITY[parts[1]], f"//rl/{parts[1]}:__subpackages__"], key=_order)

    def files(self) -> dict[Path, str]:
        """Return the wanted content of every BUILD file."""
        by_folder: dict[str, list[Module]] = defaultdict(list)
        for module in self.modules.values():
            by_folder[module.path.rpartition("/")[0]].append(module)
        for folder in NOT_OURS:
            by_folder.pop(folder, None)
        wanted = {}
        for folder, modules in by_folder.items():
            path = self.root / folder / "BUILD.bazel"
            text = self.render_folder(folder, sorted(modules, key=lambda module: module.path))
            present = path.read_text(encoding="utf-8") if path.exists() else ""
            if MARKER in present:
                text += "\n" + present[present.index(MARKER) :]
            wanted[path] = text
        return wanted


def _value(value: Any, indent: int) -> str:
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, dict):
        inner = [f'"{key}": {_value(item, indent + 4)}' for key, item in sorted(value.items())]
        opening, closing = "{", "}"
    else:
        inner = [_value(item, indent + 4) for item in value]
        opening, closing = "[", "]"
    if len(inner) == 1:
        return f"{opening}{inner[0]}{closing}"
    pad = " " * (indent + 4)
    return opening + "\n" + "".join(f"{pad}{item},\n" for item in inner) + " " * indent + closing


def _render(rule: str, attributes: dict[str, Any], folder: str) -> str:
    def rank(key: str) -> tuple[int, str]:
        if key in ATTRIBUTE_ORDER:
            return ATTRIBUTE_ORDER.index(key), key
        return (len(ATTRIBUTE_ORDER) + (key in ATTRIBUTES_AT_THE_END)), key

    lines = []
    for key in sorted(attributes, key=rank):
        value = attributes[key]
        if isinstance(value, Iterable) and not isinstance(value, str | dict):
            value = sorted({_local(item, folder) for item in value}, key=_order)
        if value or isinstance(value, bool):
            lines.append(f"    {key} = {_value(value, 4)},\n")
    return f"{rule}(\n{''.join(lines)})"


def main() -> int:
    """Write or check the BUILD files of the tree that this file stands in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file is out of date")
    options = parser.parse_args()
    root = Path(__file__).resolve().parent.parent
    stale = 0
    for path, text in Generator(root).files().items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale += 1
        print(f"{'out of date' if options.check else 'wrote'}: {path.relative_to(root)}")
        if not options.check:
            path.write_text(text, encoding="utf-8")
    if options.check and stale:
        print("run: python3 tools/build_files.py")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
