"""Completions are refused rather than repaired."""

import math

import pytest

from rl.core.errors import DataError, InfraError
from rl.core.types import FinishReason, VersionSpan
from rl.generation.completion import completion_budget, make_completion, merge_spans


def test_a_sound_completion_passes_through() -> None:
    completion = make_completion("r", [5, 6], [-0.5, -1.0], "length", [VersionSpan(3, 0, 2)], "ab")
    assert completion.tokens == (5, 6)
    assert completion.finish_reason is FinishReason.LENGTH
    assert (completion.version_min, completion.version_max) == (3, 3)


@pytest.mark.parametrize("value", [None, math.nan, -math.inf])
def test_a_lost_or_spoiled_logprob_is_an_engine_fault_and_never_zero(value: float | None) -> None:
    with pytest.raises(InfraError, match="request r"):
        make_completion("r", [5, 6], [-0.5, value], "stop", [VersionSpan(0, 0, 2)], "")


@pytest.mark.parametrize("reason", ["abort", "error", None])
def test_a_request_that_did_not_end_by_itself_is_to_be_retried(reason: str | None) -> None:
    with pytest.raises(InfraError, match="ended with"):
        make_completion("r", [5], [-0.5], reason, [VersionSpan(0, 0, 1)], "")


def test_no_token_or_missing_spans_are_an_engine_fault() -> None:
    with pytest.raises(InfraError, match="at least one token"):
        make_completion("r", [], [], "stop", [], "")
    with pytest.raises(InfraError, match="do not tile"):
        make_completion("r", [5], [-0.5], "stop", [], "")


def test_the_budget_is_what_the_context_leaves() -> None:
    assert completion_budget("r", [1] * 10, 4, 16) == 4
    assert completion_budget("r", [1] * 15, 4, 16) == 1


@pytest.mark.parametrize(("length", "message"), [(16, "may have 15"), (20, "prompt of 20 tokens"), (0, "empty prompt")])
def test_a_prompt_without_room_is_a_fault_of_the_data(length: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        completion_budget("r", [1] * length, 4, 16)


def test_spans_join_equal_neighbours() -> None:
    assert merge_spans([1, 1, 2, 2, 2]) == (VersionSpan(1, 0, 2), VersionSpan(2, 2, 5))
    assert merge_spans([]) == ()
