"""Tests of rl.rollout.seeds."""

from rl.rollout.seeds import stable_seed


def test_a_seed_is_the_same_in_every_process() -> None:
    assert stable_seed(1, 2) == 4278138115214837529


def test_seeds_fit_in_63_bits_and_differ_by_every_part() -> None:
    seeds = {stable_seed("train", s, g, r) for s in range(10) for g in range(10) for r in range(10)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_boundaries_of_the_parts_count() -> None:
    assert stable_seed(1, 23) != stable_seed(12, 3)
    assert stable_seed("1") != stable_seed(1)
