"""Completions that would corrupt training cannot be constructed."""

import math

import pytest

from rl.core.types import Completion, FinishReason, VersionSpan
from tests.support.rollouts import make_completion, make_group, make_rollout


def _completion(tokens: tuple[int, ...], logprobs: tuple[float, ...], *spans: tuple[int, int, int]) -> Completion:
    return Completion(tokens, logprobs, FinishReason.STOP, tuple(VersionSpan(*span) for span in spans), "")


def test_a_completion_needs_tokens_and_one_logprob_each() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        _completion((), ())
    with pytest.raises(ValueError, match="2 tokens but 1 log-probabilities"):
        _completion((1, 2), (-1.0,), (0, 0, 2))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_logprob_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="non-finite"):
        _completion((1,), (value,), (0, 0, 1))


@pytest.mark.parametrize("spans", [[], [(0, 0, 1)], [(0, 1, 2)], [(0, 0, 1), (1, 0, 2)], [(0, 0, 2), (1, 2, 2)]])
def test_version_spans_must_tile_the_tokens(spans: list[tuple[int, int, int]]) -> None:
    with pytest.raises(ValueError, match="do not tile"):
        _completion((1, 2), (-1.0, -1.0), *spans)


def test_version_range_is_over_all_tokens_of_all_siblings() -> None:
    mixed = _completion((1, 2), (-1.0, -1.0), (3, 0, 1), (5, 1, 2))
    assert (mixed.version_min, mixed.version_max) == (3, 5)
    group = make_group(0, [make_rollout([((9,), mixed)]), make_rollout([((9,), make_completion([1], version=2))])])
    assert (group.version_min, group.version_max) == (2, 5)
