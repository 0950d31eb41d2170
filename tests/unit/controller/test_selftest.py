"""The self test really computes, and says so when a part does not."""

import torch

from rl.controller.selftest import attempt, compare_logprobs, run_selftest
from rl.core.errors import InfraError


def test_all_parts_work_here():
    assert [(check.name, check.detail) for check in run_selftest() if not check.ok] == []


def test_a_failing_part_is_a_failed_check_with_its_reason():
    def fail() -> str:
        raise InfraError("no such worker")

    check = attempt("part", fail)
    assert (check.ok, check.detail) == (False, "InfraError: no such worker")


def test_a_difference_above_the_tolerance_fails():
    check = attempt("strict", lambda: compare_logprobs(torch.float32, -1.0))
    assert not check.ok
    assert "differ by" in check.detail
