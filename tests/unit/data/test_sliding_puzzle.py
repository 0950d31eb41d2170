import pytest

from rl.data.config import SlidingPuzzleDataset
from rl.data.datasets import check_dataset, load_rows


def boards(**settings):
    config = SlidingPuzzleDataset(kind="sliding_puzzle", **settings)
    check_dataset(config)
    return [row.metadata["board"] for row in load_rows(config)]


@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (2, 3), (3, 3), (4, 4)])
def test_boards_hold_each_tile_once_and_are_not_solved(rows, columns):
    solved = [*range(1, rows * columns), 0]
    for board in boards(rows=rows, columns=columns, shuffle_moves=12, size=50):
        tiles = [tile for row in board for tile in row]
        assert sorted(tiles) == list(range(rows * columns)) and tiles != solved
        assert [len(row) for row in board] == [columns] * rows


def test_every_board_can_be_solved():
    for board in boards(size=50, shuffle_moves=30):
        tiles = [tile for row in board for tile in row]
        order = [tile for tile in tiles if tile]
        inversions = sum(a > b for index, a in enumerate(order) for b in order[index + 1 :])
        assert inversions % 2 == 0  # the known parity of 3x3 boards that can be solved


def test_boards_follow_from_the_seed_whatever_the_size():
    assert boards(size=3, seed=5) == boards(size=9, seed=5)[:3]
    assert boards(size=9, seed=5) != boards(size=9, seed=6)
    assert boards(size=2, shuffle_moves=8) == FIRST_OF_SEED_0


FIRST_OF_SEED_0 = [[[1, 3, 5], [4, 0, 6], [7, 2, 8]], [[4, 1, 2], [7, 5, 3], [8, 6, 0]]]
