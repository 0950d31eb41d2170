"""Run pytest on the files named on the command line, inside a Bazel test.

Translates Bazel's test protocol: the JUnit report goes where Bazel wants it, shards take every n-th case, and
`--test_filter` becomes `-k`. It gives the tests a home folder of their own, because Bazel gives none.
"""

import os
import sys
from pathlib import Path

import pytest


class Shard:
    """Keeps the cases of one shard: those whose position modulo the number of shards is the shard's number."""

    def __init__(self, index: int, total: int) -> None:
        self.index = index
        self.total = total

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept = items[self.index :: self.total]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def main() -> int:
    """Return pytest's exit code; a shard without cases has passed."""
    root = Path.cwd()
    scratch = os.environ.get("TEST_TMPDIR")
    if scratch:
        os.environ["HOME"] = scratch
    arguments = ["-p", "no:cacheprovider", "--import-mode=importlib", f"--rootdir={root}", f"--confcutdir={root}"]
    arguments += ["-c", str(root / "pyproject.toml"), "-ra", "--durations=5", "--color=no"]
    # Property tests: the same examples in every run, and no verdict from the clock of a busy machine.
    arguments.append("--hypothesis-profile=ci")
    if report := os.environ.get("XML_OUTPUT_FILE"):
        arguments.append(f"--junitxml={report}")
    if wanted := os.environ.get("TESTBRIDGE_TEST_ONLY"):
        arguments += ["-k", wanted]
    plugins: list[object] = []
    total = int(os.environ.get("TEST_TOTAL_SHARDS", "1"))
    if total > 1:
        Path(os.environ["TEST_SHARD_STATUS_FILE"]).touch()
        plugins.append(Shard(int(os.environ["TEST_SHARD_INDEX"]), total))
    result = pytest.main([*arguments, *sys.argv[1:]], plugins=plugins)
    is_empty_shard = total > 1 and result == pytest.ExitCode.NO_TESTS_COLLECTED
    return 0 if is_empty_shard else int(result)


if __name__ == "__main__":
    sys.exit(main())
