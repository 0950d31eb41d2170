"""Read which modules a Python file imports, without running it. Shared by check_layers and build_files."""

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

_IMPORT_IN_TEXT = re.compile(r"\b(?:from|import) ([a-z_]\w*(?:\.\w+)+)")
_IMPORT_PATH = re.compile(r"^(?P<module>[a-z_]\w*(\.\w+)+)(:\w+)?$")


@dataclasses.dataclass(frozen=True)
class Import:
    """One imported name: `module` as written, with the imported name appended for `from module import name`."""

    module: str
    name: str | None
    line: int
    in_function: bool
    for_types_only: bool

    def candidates(self) -> list[str]:
        """Return the dotted names this may mean, the longest first: `from a import b` may mean module a.b or a."""
        return [f"{self.module}.{self.name}", self.module] if self.name else [self.module]


@dataclasses.dataclass(frozen=True)
class Module:
    """One Python file of the tree and what it refers to."""

    path: str  # from the root of the tree, with slashes
    imports: tuple[Import, ...]
    import_paths: tuple[str, ...]  # modules named in strings: for import_object, `python -m`, `python -c`

    @property
    def dotted(self) -> str:
        """The name by which Python imports it."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _is_type_checking(node: ast.AST) -> bool:
    if not isinstance(node, ast.If):
        return False
    test = node.test
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")
    return name == "TYPE_CHECKING"


def _walk(node: ast.AST, package: str, in_function: bool, for_types_only: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        inside = in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        types_only = for_types_only or _is_type_checking(child)
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, None, child.lineno, inside, types_only)
        elif isinstance(child, ast.ImportFrom):
            base = child.module or ""
            if child.level:
                parents = package.split(".")
                base = ".".join(parents[: len(parents) - child.level + 1] + ([child.module] if child.module else []))
            for alias in child.names:
                yield Import(base, alias.name, child.lineno, inside, types_only)
        yield from _walk(child, package, inside, types_only)


def _named_in_strings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if match := _IMPORT_PATH.match(node.value):
                yield match["module"]
            else:
                yield from _IMPORT_IN_TEXT.findall(node.value)
        elif isinstance(node, ast.List | ast.Tuple):
            values = [item.value if isinstance(item, ast.Constant) else None for item in node.elts]
            for flag, name in zip(values, values[1:], strict=False):
                if flag == "-m" and isinstance(name, str):
                    yield f"{name}.__main__"


def read_module(root: Path, path: Path) -> Module:
    """Parse one file below `root`.

    Raises:
        SyntaxError: it is no valid Python.
    """
    relative = path.relative_to(root).as_posix()
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=relative)
    package = relative.rsplit("/", 1)[0].replace("/", ".")
    imports = tuple(_walk(tree, package, in_function=False, for_types_only=False))
    return Module(relative, imports, tuple(sorted(set(_named_in_strings(tree)))))


def read_tree(root: Path, *folders: str) -> dict[str, Module]:
    """Parse every Python file below the named folders; keys are dotted names."""
    modules = {}
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            module = read_module(root, path)
            modules[module.dotted] = module
    return modules


def resolve(imported: Import, modules: dict[str, Module]) -> str | None:
    """Return the module of the tree that an import means, or None when it is somebody else's."""
    return next((name for name in imported.candidates() if name in modules), None)
