"""Tests of rl.rollout.sampler."""

import pytest
from pydantic import ValidationError

from rl.rollout.config import InOrderSampler
from rl.rollout.sampler import build_sampler
from rl.rollout.ticket import Ticket


def test_the_lookahead_bounds_how_many_groups_may_start() -> None:
    for lookahead in range(4):
        sampler = build_sampler(InOrderSampler(max_lookahead_versions=lookahead))
        admitted = [n for n in range(40) if sampler.may_admit(n, version=2, groups_per_step=4)]
        assert admitted == list(range((2 + lookahead + 1) * 4))


def test_select_returns_the_groups_of_the_version_in_dispatch_order() -> None:
    sampler = build_sampler(InOrderSampler(max_lookahead_versions=1))
    ready = [Ticket(5, 2), Ticket(3, 1), Ticket(4, 2), Ticket(2, 1)]
    assert sampler.select(ready, version=1, n=2) == [Ticket(2, 1), Ticket(3, 1)]
    assert sampler.select(ready, version=2, n=1) == [Ticket(4, 2)]


def test_a_group_of_an_earlier_version_is_stale_and_a_later_one_is_not() -> None:
    sampler = build_sampler(InOrderSampler(max_lookahead_versions=1))
    assert sampler.is_stale(Ticket(0, 6), version=7)
    assert not sampler.is_stale(Ticket(0, 7), version=7)
    assert not sampler.is_stale(Ticket(0, 8), version=7)


def test_capacity_covers_every_version_of_the_window() -> None:
    assert build_sampler(InOrderSampler(max_lookahead_versions=2)).required_capacity(4) == 12


def test_a_negative_lookahead_is_refused() -> None:
    with pytest.raises(ValidationError):
        InOrderSampler(max_lookahead_versions=-1)
