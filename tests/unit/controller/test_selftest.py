"""The self test really computes, and says so when a part does not."""

import torch

from rl.controller.selftest import attempt, run_selftest
from rl.controller.selftest_kernels import (
    compare_linear_logprobs,
    compare_logprobs,
    compare_one_pass,
    compare_policy_loss,
    compare_thresholds,
    kernel_tests,
)
from rl.core.errors import InfraError


def test_all_parts_work_here():
    assert [(check.name, check.detail) for check in run_selftest() if not check.ok] == []


def test_a_failing_part_is_a_failed_check_with_its_reason():
    def fail() -> str:
        raise InfraError("no such worker")

    check = attempt("part", fail)
    assert (check.ok, check.detail) == (False, "InfraError: no such worker")


def test_a_difference_above_the_tolerance_fails():
    for test in (
        lambda: compare_logprobs(torch.float32, -1.0, "cpu"),
        lambda: compare_thresholds(-1.0, "cpu"),
        lambda: compare_policy_loss(-1.0, "cpu"),
        lambda: compare_linear_logprobs(-1.0, "cpu"),
        lambda: compare_one_pass(-1.0, "cpu"),
    ):
        check = attempt("strict", test)
        assert not check.ok
        assert "differ by" in check.detail


def test_every_kernel_is_tried_and_the_rows_in_every_dtype_of_logits():
    names = [name for name, _ in kernel_tests() if not name.endswith("on the GPU")]
    assert names == [
        "native logprobs, float32",
        "native logprobs, bfloat16",
        "native logprobs, float16",
        "native sampling thresholds",
        "native policy loss",
        "native linear layer and logprobs",
        "native linear layer and loss in one pass",
        "native bucket copy",
    ]
