"""How the results of doctor and selftest look on the terminal."""

from collections.abc import Sequence

from rl.cli.console import EXIT_FAILURE, show
from rl.controller.checklist import Check, has_failed


def show_checks(checks: Sequence[Check]) -> int:
    """Print one line for each check, with advice below what is wrong; return the exit code."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        word, style = ("ok", "green") if check.ok else ("FAIL", "bold red") if check.required else ("warn", "yellow")
        show(f"{word:<4}  {check.name:<{width}}  {check.detail}", style="" if check.ok else style)
        if check.advice:
            show(f"      {'':<{width}}  -> {check.advice}")
    failed = sum(not check.ok and check.required for check in checks)
    warned = sum(not check.ok and not check.required for check in checks)
    show(f"{len(checks) - failed - warned} ok, {warned} warnings, {failed} failed")
    return EXIT_FAILURE if has_failed(checks) else 0
