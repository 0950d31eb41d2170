"""The python tool: run a program in the sandbox and give back what it printed. Runs inside scoring processes."""

from rl.environments.config import SandboxLimits
from rl.environments.sandbox import prepare_sandbox, run_code
from rl.environments.sandbox_process import Ending

_LAST_LINES = 3


class PythonToolError(ValueError):
    """How a program failed, in words for the model."""


def prepare_python() -> None:
    """Try the sandbox, so that no deadline pays for it.

    Raises:
        ConfigError: this machine has no sandbox.
    """
    prepare_sandbox()


def run_python(code: str, *, limits: SandboxLimits) -> str:
    """Run a program and return its standard output.

    Raises:
        PythonToolError: it met a limit, or ended with an error; the message has the last lines of what it wrote.
    """
    outcome = run_code(code, limits)
    if outcome.is_success:
        return outcome.stdout.strip() or "(no output)"
    if outcome.ending is not Ending.EXITED:
        raise PythonToolError(f"the program was ended: {outcome.ending.value}")
    lines = outcome.stderr.strip().splitlines()[-_LAST_LINES:]
    raise PythonToolError("\n".join(lines) or f"the program ended with exit code {outcome.exit_code}")
