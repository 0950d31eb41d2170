"""How checks look on the terminal, and the exit code they give."""

from rl.cli.checks_view import show_checks
from rl.controller.checklist import Check


def test_warnings_are_shown_with_advice_and_do_not_fail(capsys):
    code = show_checks([Check("torch", True, "2.13"), Check("memory", False, "1 GiB", "add memory", required=False)])
    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert lines[0] == "ok    torch   2.13"
    assert lines[1] == "warn  memory  1 GiB"
    assert lines[2].strip() == "-> add memory"
    assert lines[3] == "1 ok, 1 warnings, 0 failed"


def test_a_required_check_that_fails_gives_exit_code_1(capsys):
    assert show_checks([Check("torch", False, "missing", "install it")]) == 1
    assert "FAIL  torch  missing" in capsys.readouterr().out
