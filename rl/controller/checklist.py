"""The result of one look at the machine, shared by doctor and selftest. It does not print."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: What was looked at, in a word or two.
        ok: Whether it is as it should be.
        detail: What was found.
        advice: What to do when it is not ok; empty otherwise.
        required: Whether a run cannot work without it; a check that is neither ok nor required is a warning.
    """

    name: str
    ok: bool
    detail: str
    advice: str = ""
    required: bool = True


def has_failed(checks: Sequence[Check]) -> bool:
    """Whether something that a run needs is not as it should be."""
    return any(not check.ok and check.required for check in checks)
