"""`tandem config`: print the resolved configuration with the source of every value. The output is YAML."""

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from rl.cli.console import clean_errors, show
from rl.cli.train import DEFAULT_CONFIG
from rl.controller.checks import check_config
from rl.controller.config import MasterConfig
from rl.core.config_file import CLASS_DEFAULT, ConfigTree, build, load, unknown_keys
from rl.core.config_paths import find_config
from rl.core.config_view import resolved_lines, to_yaml


def config_command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE|NAME|KEY=VALUE", help=f"Configuration ({DEFAULT_CONFIG}) and overrides."),
    ] = None,
    config_name: Annotated[
        str | None,
        typer.Option("--config", "-c", metavar="FILE|NAME", help="The configuration, as other commands take it."),
    ] = None,
    allow_unknown_keys: Annotated[
        bool, typer.Option("--allow-unknown-keys", help="Ignore unknown keys, and list them.")
    ] = False,
) -> None:
    """Print the resolved configuration, with the file and line of every value."""
    with clean_errors():
        names = list(arguments or [])
        if config_name is None and names and "=" not in names[0] and not names[0].startswith("~"):
            config_name = names.pop(0)
        tree = load(find_config(config_name or DEFAULT_CONFIG), names, MasterConfig)
        config = build(tree, MasterConfig, allow_unknown_keys)
        for key, source in unknown_keys(tree, config):
            show(f"ignored unknown key {key} ({source})", "yellow", to_stderr=True)
        if sys.stdout.isatty():
            _show_in_colour(config, tree)
        else:
            typer.echo(to_yaml(config, tree), nl=False)
        check_config(config, tree)


def _show_in_colour(config: MasterConfig, tree: ConfigTree) -> None:
    """Print keys, values and sources in colours; class defaults are dim, what was written stands out."""
    console = Console(highlight=False, soft_wrap=True)
    for line in resolved_lines(config, tree):
        text = Text("  " * line.depth)
        text.append(f"{line.name}:", "cyan" if line.value is None else "")
        if line.value is not None:
            is_default = line.source == CLASS_DEFAULT
            text.append(f" {line.value}", "dim" if is_default else "bold green")
            text.append(" " * max(1, 52 - len(text)) + f"# {line.source}", "dim")
        console.print(text)
