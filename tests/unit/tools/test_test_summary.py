"""The closing line counts what one run of Bazel really ran."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tools.test_summary import closing_line, main, summarize

REPORT = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"/>
<testcase name="c"><skipped type="pytest.skip"/></testcase>
<testcase name="d"><skipped type="pytest.xfail"/></testcase>
<testcase name="e"><failure/></testcase>
<testcase name="f" status="notrun"/>
</testsuite></testsuites>"""


def event_file(folder: Path, *results: dict[str, object]) -> Path:
    events: list[dict[str, object]] = [{"id": {}, "started": {"startTimeMillis": "1000"}}]
    for number, result in enumerate(results):
        events.append({"id": {"testResult": {"label": f"//t:{number}"}}, "testResult": result})
    events.append({"id": {}, "finished": {"finishTimeMillis": "3500"}})
    path = folder / "events.json"
    path.write_text("\n".join(json.dumps(event) for event in events))
    return path


def report(folder: Path, text: str = REPORT) -> list[dict[str, str]]:
    path = folder / "test %.xml"
    path.write_text(text)
    return [{"name": "test.log", "uri": "file:///nowhere"}, {"name": "test.xml", "uri": path.as_uri()}]


def test_outcomes_are_counted_by_pytests_names(tmp_path: Path) -> None:
    result = {"status": "FAILED", "testActionOutput": report(tmp_path)}
    counts, bad, seconds = summarize(event_file(tmp_path, result))
    assert counts == Counter(passed=2, skipped=2, xfailed=1, failed=1)
    assert bad == ["//t:0: FAILED"]
    assert seconds == 2.5


def test_cached_results_do_not_count(tmp_path: Path) -> None:
    local = {"status": "PASSED", "cachedLocally": True, "testActionOutput": report(tmp_path)}
    disk = {"status": "PASSED", "executionInfo": {"cachedRemotely": True}, "testActionOutput": report(tmp_path)}
    assert summarize(event_file(tmp_path, local, disk))[0] == Counter()


def test_a_test_that_dies_without_a_failure_in_its_report_is_an_error(tmp_path: Path) -> None:
    no_report = {"status": "TIMEOUT"}
    broken_report = {"status": "FAILED", "testActionOutput": report(tmp_path, "<testsuites>")}
    counts, bad, _ = summarize(event_file(tmp_path, no_report, broken_report))
    assert counts == Counter(error=2)
    assert len(bad) == 2


def test_a_test_that_could_not_be_built_is_an_error_and_a_library_only_makes_the_run_bad(tmp_path: Path) -> None:
    events = [
        {"id": {"targetConfigured": {"label": "//t:test_a"}}, "configured": {"targetKind": "py_test rule"}},
        {"id": {"targetConfigured": {"label": "//t:lib"}}, "configured": {"targetKind": "cc_library rule"}},
        {"id": {"targetCompleted": {"label": "//t:test_a"}}, "completed": {}},
        {"id": {"targetCompleted": {"label": "//t:lib"}}, "aborted": {"reason": "SKIPPED"}},
    ]
    path = tmp_path / "events.json"
    path.write_text("\n".join(json.dumps(event) for event in events))
    counts, bad, _ = summarize(path)
    assert counts == Counter(error=1)
    assert bad == ["//t:lib: could not be built", "//t:test_a: could not be built"]


def test_the_line_has_pytests_form() -> None:
    def line(seconds: float, **counts: int) -> str:
        return closing_line(Counter(counts), seconds).strip("=")

    assert line(456.78, passed=123, skipped=1) == " 123 passed, 1 skipped in 456.78s (0:07:36) "
    assert line(1.5, passed=1, failed=1, error=2) == " 1 failed, 1 passed, 2 errors in 1.50s "
    assert line(0.1) == " no tests ran in 0.10s "


@pytest.mark.parametrize(("second", "code"), [("PASSED", 0), ("FAILED", 1)])
def test_several_runs_have_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], second: str, code: int
) -> None:
    files = []
    for name, status in [("first", "PASSED"), ("second", second)]:
        folder = tmp_path / name
        folder.mkdir()
        passing = '<testsuites><testsuite><testcase name="a"/></testsuite></testsuites>'
        files.append(event_file(folder, {"status": status, "testActionOutput": report(folder, passing)}))
    monkeypatch.setattr("sys.argv", ["test_summary", *map(str, files)])
    assert main() == code
    expected = " 2 passed in 5.00s " if code == 0 else " 2 passed, 1 error in 5.00s "
    assert capsys.readouterr().out.splitlines()[-1].strip("=") == expected
