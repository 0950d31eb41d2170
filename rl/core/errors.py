"""The error kinds of the system; a fault's owner decides by kind, never by message.

InfraError: a machine, process or network failed; the same work may succeed elsewhere.
DataError: the input or an environment is at fault; a retry is unlikely to help.
FatalError: the run cannot go on.
"""


class RLError(Exception):
    """Base of every error that Tandem raises on purpose."""


class InfraError(RLError):
    """A process, engine, device or connection failed; retry elsewhere."""


class CompletionError(InfraError):
    """An engine answered one request with a completion that cannot be used; others may be well."""


class DataError(RLError):
    """A sample, prompt or environment is faulty; deterministic, so retry little."""


class FatalError(RLError):
    """The run must stop."""


class ConfigError(FatalError):
    """The configuration cannot work. The command line exits with status 2."""


class WeightSyncError(FatalError):
    """A refit did not complete on every generator; nothing may be generated until one does."""


class StallError(FatalError):
    """Something that should have moved within its deadline did not."""


def first_line(error: BaseException) -> str:
    """Return the first line of a foreign error's text, or its type when it has none: libraries add pages of advice."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip() if lines else type(error).__name__
