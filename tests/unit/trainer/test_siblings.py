"""Trees hold every sibling's tokens in order, each shared stretch once, and are made where they pay."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.core.batch import TrainBatch
from rl.trainer.siblings import Segment, Unit, find_units, grow_tree, needed_lengths
from tests.support.rollouts import make_completion, make_group, make_rollout

TOKENS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=8)


@given(sequences=TOKENS)
def test_each_sequence_is_the_path_from_its_root_and_no_two_branches_begin_alike(sequences: list[list[int]]) -> None:
    segments = grow_tree(list(enumerate(sequences)))
    for number, tokens in enumerate(sequences):
        path = [segment for segment in segments if number in segment.members]
        assert [segment.start for segment in path] == [0] + [segment.end for segment in path[:-1]]
        assert path[-1].end == len(tokens)
        assert [segment.parent for segment in path] == [-1] + [segments.index(segment) for segment in path[:-1]]
        for segment in path:
            other = sequences[segment.members[0]]
            assert other[: segment.end] == tokens[: segment.end]
    distinct = {tuple(tokens[:end]) for tokens in sequences for end in range(1, len(tokens) + 1)}
    assert sum(segment.end - segment.start for segment in segments) == len(distinct)


def test_a_prompt_is_the_trunk_of_its_answers() -> None:
    assert grow_tree([(4, [1, 2, 7]), (5, [1, 2, 8, 9]), (6, [1, 2, 8])]) == [
        Segment((4, 6, 5), 0, 2, -1),
        Segment((4,), 2, 3, 0),
        Segment((6, 5), 2, 3, 0),
        Segment((5,), 3, 4, 2),
    ]


def _batch(groups: list[tuple[list[int], list[list[int]]]]) -> TrainBatch:
    return TrainBatch.from_groups(
        [
            make_group(number, [make_rollout([(prompt, make_completion(answer))], reward=1.0) for answer in answers])
            for number, (prompt, answers) in enumerate(groups)
        ]
    )


def _units(batch: TrainBatch, *, share: bool = True, always: bool = False, max_positions: int = 10**6) -> list[Unit]:
    return find_units(batch, batch.loss_mask, share=share, always=always, max_positions=max_positions)


def test_the_last_token_and_what_follows_the_last_counted_one_is_not_needed() -> None:
    batch = _batch([([1, 2], [[3, 4]]), ([1], [[5]])])
    assert needed_lengths(batch, batch.loss_mask) == [3, 1]
    assert needed_lengths(batch, torch.zeros(batch.num_tokens, dtype=torch.bool)) == [0, 0]


def test_groups_become_trees_and_strangers_with_the_same_prompt_do_not() -> None:
    batch = _batch([([1, 2, 3], [[7, 1], [8, 1]]), ([1, 2, 3], [[7, 1], [8, 1]])])
    assert _units(batch) == [Unit((0, 1), 5), Unit((2, 3), 5)]
    assert _units(batch, share=False) == [Unit((number,), 4) for number in range(4)]


def test_a_tree_beyond_the_budget_is_split_and_its_prefix_repeated() -> None:
    batch = _batch([([1, 2, 3], [[4, 0], [5, 0], [6, 0], [7, 0]])])
    assert _units(batch, max_positions=5) == [Unit((0, 1), 5), Unit((2, 3), 5)]
    assert _units(batch, always=True, max_positions=5) == [Unit((0, 1), 5), Unit((2, 3), 5)]
    assert _units(batch, max_positions=4) == [Unit((number,), 4) for number in range(4)]


def test_siblings_without_a_common_token_stay_alone_whatever_is_asked() -> None:
    batch = _batch([([1], [[4, 4]]), ([2], [[5, 5]])]).with_columns(group_ids=torch.zeros(2, dtype=torch.int64))
    assert _units(batch, always=True) == _units(batch) == [Unit((0,), 2), Unit((1,), 2)]


def test_a_short_prompt_of_long_answers_is_shared_only_when_asked() -> None:
    generator = torch.Generator().manual_seed(0)
    answers = torch.randint(10, 200, (8, 3000), generator=generator).tolist()
    batch = _batch([([1, 2], answers)])
    assert all(len(unit.sequences) == 1 for unit in _units(batch))
    assert [len(unit.sequences) for unit in _units(batch, always=True)] == [8]


@settings(max_examples=30)
@given(sequences=TOKENS, always=st.booleans(), budget=st.integers(8, 30))
def test_every_sequence_with_a_counted_token_is_in_one_unit_within_the_budget(
    sequences: list[list[int]], always: bool, budget: int
) -> None:
    batch = _batch([([1], sequences)])
    units = _units(batch, always=always, max_positions=budget)
    assert sorted(number for unit in units for number in unit.sequences) == list(range(len(sequences)))
    assert all(unit.num_positions <= budget for unit in units)
