"""Resolve `module:attribute` strings, the way in which torch-free configuration names what it builds."""

import importlib

from rl.core.errors import ConfigError


def import_object(target: str) -> object:
    """Import and return the object named by `target`.

    Args:
        target: `package.module:attribute`.

    Raises:
        ConfigError: the string has the wrong form, or the module or attribute does not exist.
    """
    module_name, separator, attribute = target.partition(":")
    if not separator or not module_name or not attribute:
        raise ConfigError(f"'{target}' is not of the form module:attribute; write for example my_rewards:score")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not _is_or_holds(error.name, module_name):
            raise
        message = f"cannot import module '{module_name}' of '{target}': {error}; is it on PYTHONPATH?"
        raise ConfigError(message) from error
    if attribute not in vars(module):
        raise ConfigError(f"module '{module_name}' has no attribute '{attribute}' (needed by '{target}')")
    return vars(module)[attribute]


def _is_or_holds(name: str | None, module_name: str) -> bool:
    """Whether the missing `name` is the module or a package above it; else something that it imports is missing."""
    return name is not None and (module_name == name or module_name.startswith(f"{name}."))
