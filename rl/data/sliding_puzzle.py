"""Boards of the sliding puzzle, made from the solved one by legal moves, so that each can be solved.

The environment of the same name plays them. Rows of one seed are the same in every run and Python version.
"""

import random
from collections.abc import Iterator, Sequence

from rl.core.types import Message
from rl.data.columns import PLAIN_TEXT, Row
from rl.data.config import SlidingPuzzleDataset

BOARD = "board"
GAP = 0
_RULES = (
    "Slide the tiles until they stand in order, row by row, with the gap (.) last.\n"
    "A move slides a tile that is next to the gap into it: <action>up</action>, <action>down</action>, "
    "<action>left</action> or <action>right</action>. Make one move in each answer.\n"
)


def sliding_puzzle_rows(config: SlidingPuzzleDataset) -> Sequence[Row]:
    """Return the rows of a seed; each board is 1 to `shuffle_moves` moves away from the solved one."""
    return [_row(config, index) for index in range(config.size)]


def show_board(board: Sequence[Sequence[int]]) -> str:
    """Return the board as lines of text; a point is the gap."""
    return "\n".join(" ".join("." if tile == GAP else str(tile) for tile in row) for row in board)


def _row(config: SlidingPuzzleDataset, index: int) -> Row:
    board = _shuffled(config, random.Random(f"{config.seed}:{index}"))
    return Row(
        row_id=f"sliding_puzzle:{config.seed}:{index}",
        messages=(Message(PLAIN_TEXT, f"{_RULES}{show_board(board)}\n"),),
        metadata={BOARD: board},
    )


def _shuffled(config: SlidingPuzzleDataset, generator: random.Random) -> list[list[int]]:
    """Move the gap about, never straight back; should it come home by a loop, one more move undoes that."""
    board = _solved(config.rows, config.columns)
    gap, before = (config.rows - 1, config.columns - 1), None
    for _ in range(config.shuffle_moves):
        ways = [place for place in _neighbours(gap, config) if place != before]
        place = generator.choice(ways)
        board[gap[0]][gap[1]], board[place[0]][place[1]] = board[place[0]][place[1]], GAP
        gap, before = place, gap
    if board == _solved(config.rows, config.columns):
        place = generator.choice(list(_neighbours(gap, config)))
        board[gap[0]][gap[1]], board[place[0]][place[1]] = board[place[0]][place[1]], GAP
    return board


def _solved(rows: int, columns: int) -> list[list[int]]:
    tiles = [*range(1, rows * columns), GAP]
    return [tiles[row * columns : (row + 1) * columns] for row in range(rows)]


def _neighbours(place: tuple[int, int], config: SlidingPuzzleDataset) -> Iterator[tuple[int, int]]:
    row, column = place
    for candidate in ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)):
        if 0 <= candidate[0] < config.rows and 0 <= candidate[1] < config.columns:
            yield candidate
