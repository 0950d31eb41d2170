"""Read from a module's source which dataset columns a reward function needs. Nothing is imported or run.

What the source does not say plainly (a decorated function, one that is imported or made, a compiled module) is not
known, and whoever asks must do without.
"""

import ast
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec

# Given to every reward function, whatever the dataset holds.
_GIVEN = frozenset({"prompts", "completions"})


def needed_columns(spec: ModuleSpec, function: str) -> frozenset[str] | None:
    """Return the columns without which `function` cannot be called; None when the source does not tell.

    Args:
        spec: Of its module, whose source compiles.
        function: Its name.
    """
    source = spec.loader.get_source(spec.name) if isinstance(spec.loader, InspectLoader) else None
    if source is None:
        return None
    found = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Name | ast.alias) and _binds(node, function)
    ]
    if len(found) != 1 or not isinstance(found[0], ast.FunctionDef | ast.AsyncFunctionDef) or found[0].decorator_list:
        return None
    arguments = found[0].args
    named = arguments.args[: max(0, len(arguments.args) - len(arguments.defaults))]
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    named += [argument for argument, default in pairs if default is None]
    return frozenset(argument.arg for argument in named) - _GIVEN


def _binds(node: ast.AST, name: str) -> bool:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return node.name == name
        case ast.alias():
            return (node.asname or node.name) == name
        case ast.Name(ctx=ast.Store()):
            return node.id == name
    return False
