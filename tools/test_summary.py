"""Print one closing line, in pytest's own form, for everything that one or more `bazel test` ran.

The line counts the cases in the JUnit reports that these build events name; results that Bazel took from a cache,
and reports of earlier runs, do not count. A test that died before it could write a report, or that could not be built,
counts as one error.

    bazel test //... --build_event_json_file=events.json; python3 tools/test_summary.py events.json
    ===== 123 passed, 1 skipped in 456.78s =====
"""

import argparse
import json
import sys
import urllib.parse
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ORDER = ["failed", "passed", "skipped", "xfailed", "error"]
WIDTH = 80


def count_report(path: Path) -> Counter[str]:
    """Count the cases of one JUnit report by outcome, as pytest names them."""
    counts: Counter[str] = Counter()
    for case in ElementTree.parse(path).iter("testcase"):
        children = {child.tag: child for child in case}
        if "failure" in children:
            counts["failed"] += 1
        elif "error" in children:
            counts["error"] += 1
        elif "skipped" in children:
            counts["xfailed" if children["skipped"].get("type") == "pytest.xfail" else "skipped"] += 1
        elif case.get("status") == "notrun":  # googletest's word for a disabled case
            counts["skipped"] += 1
        else:
            counts["passed"] += 1
    return counts


def _events(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip():
            yield json.loads(line)


def _report_of(result: dict[str, Any]) -> Path | None:
    for output in result.get("testActionOutput", []):
        if output["name"] == "test.xml":
            return Path(urllib.parse.unquote(urllib.parse.urlparse(output["uri"]).path))
    return None


def summarize(events: Path) -> tuple[Counter[str], list[str], float]:
    """Read a build event file.

    Returns: the cases of this run by outcome, the tests that did not pass, and the seconds from start to end.
    """
    counts: Counter[str] = Counter()
    bad: list[str] = []
    tests: set[str] = set()
    start_ms = end_ms = 0
    for event in _events(events):
        if "started" in event:
            start_ms = int(event["started"]["startTimeMillis"])
        elif "finished" in event:
            end_ms = int(event["finished"]["finishTimeMillis"])
        elif "configured" in event:
            if event["configured"].get("targetKind", "").endswith("_test rule"):
                tests.add(event["id"]["targetConfigured"]["label"])
        elif "targetCompleted" in event["id"] and not event.get("completed", {}).get("success"):
            label = event["id"]["targetCompleted"]["label"]
            bad.append(f"{label}: could not be built")
            counts["error"] += label in tests
        elif "testResult" in event:
            result = event["testResult"]
            label = event["id"]["testResult"]["label"]
            has_passed = result.get("status") == "PASSED"
            if not has_passed:
                bad.append(f"{label}: {result.get('status', 'no status')}")
            if result.get("cachedLocally") or result.get("executionInfo", {}).get("cachedRemotely"):
                continue
            counts += _count_result(result, has_passed)
    return counts, sorted(set(bad)), (end_ms - start_ms) / 1000


def _count_result(result: dict[str, Any], has_passed: bool) -> Counter[str]:
    report = _report_of(result)
    try:
        found = count_report(report) if report else Counter()
    except (OSError, ElementTree.ParseError):
        found = Counter()
    if not has_passed and not found["failed"] and not found["error"]:
        found["error"] += 1  # it crashed or ran out of time: whatever it had reported, it did not end well
    return found


def closing_line(counts: Counter[str], seconds: float) -> str:
    """Format the counts as pytest does."""
    named = [(name + "s" if name == "error" and counts[name] > 1 else name, counts[name]) for name in ORDER]
    parts = ", ".join(f"{count} {name}" for name, count in named if count) or "no tests ran"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    clock = f" ({hours}:{minutes:02d}:{rest:02d})" if seconds >= 60 else ""
    return f" {parts} in {seconds:.2f}s{clock} ".center(WIDTH, "=")


def main() -> int:
    """Print the tests that did not pass and the closing line; exit 1 unless something passed and nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("events", type=Path, nargs="+", help="files written by --build_event_json_file")
    parser.add_argument("--seconds", type=float, help="time to print, instead of that of the bazel commands alone")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    bad: list[str] = []
    total_s = 0.0
    for events in options.events:
        more, more_bad, seconds = summarize(events)
        counts += more
        bad += more_bad
        total_s += seconds
    for line in bad:
        print(f"FAILED {line}")
    print(closing_line(counts, options.seconds if options.seconds is not None else total_s))
    return 0 if counts["passed"] and not bad else 1


if __name__ == "__main__":
    sys.exit(main())
