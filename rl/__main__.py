"""`python -m rl` is the `tandem` command, and so is the installed script."""

from collections.abc import Callable, Sequence
from typing import cast

from rl.cli.process import prepare_process
from rl.core.imports import import_object

_COMMAND = "rl.cli.app:main"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    Args:
        arguments: without the program's name; None = those of the process.
    """
    prepare_process()
    # By path: signals are handled from the first import on.
    cast(Callable[[Sequence[str] | None], None], import_object(_COMMAND))(arguments)


if __name__ == "__main__":
    main()
