"""SlidingPuzzleEnvironment: tiles slide into the gap of a board, a move a turn, until they stand in order.

    1 2 3
    4 . 6       <action>up</action> moves the tile below the gap up: here the 5, which solves it.
    7 5 8       (then 8 to the left)

The last <action> of a completion counts; its closing tag may be missing, because engines cut stop strings off. A
completion without a legal move is answered with what is wrong, and the board stays. The reward is 1 when the board is
solved, else 0; a rollout of `max_moves` completions that has not solved it ends. The board travels with the episode.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl.core.types import Message, Prompt, RolloutStatus
from rl.data.sliding_puzzle import BOARD, GAP, show_board
from rl.environments.base import Episode, StepResult
from rl.environments.config import SlidingPuzzleEnvConfig
from rl.environments.outcomes import failed

Board = tuple[tuple[int, ...], ...]
# Where the tile that moves stands, seen from the gap: (row, column).
_TILE_FROM_GAP = {"up": (1, 0), "down": (-1, 0), "left": (0, 1), "right": (0, -1)}
_OPENING, _CLOSING = "<action>", "</action>"


@dataclass(frozen=True)
class PuzzleState:
    """A rollout's board and how many completions it has taken."""

    board: Board
    moves: int


class SlidingPuzzleEnvironment:
    """Moves tiles; needs no processes."""

    def __init__(self, name: str, config: SlidingPuzzleEnvConfig) -> None:
        """Take the settings; nothing is started."""
        self.name = name
        self._config = config

    async def step(self, prompt: Prompt, episodes: list[Episode]) -> list[StepResult]:
        """Make the moves of all siblings; one result each, in order."""
        try:
            start = PuzzleState(read_board(prompt.metadata), 0)
        except ValueError as error:
            detail = f"prompt {prompt.prompt_id}: {error}; use a dataset of kind sliding_puzzle"
            return [failed(RolloutStatus.REWARD_ERROR, detail) for _ in episodes]
        return [self._move(episode.completion.text, episode.state or start) for episode in episodes]

    async def close(self) -> None:
        """Nothing to end."""

    def _move(self, text: str, state: PuzzleState) -> StepResult:
        action = find_action(text)
        board = None if action is None else slide(state.board, action)
        following = PuzzleState(state.board if board is None else board, state.moves + 1)
        solved = is_solved(following.board)
        done = solved or following.moves >= self._config.max_moves
        if action is None:
            words = f"No move found; write one of {', '.join(_TILE_FROM_GAP)} as <action>up</action>."
        else:
            words = f"No tile can move {action}." if board is None else ""
        message = Message(self._config.answer_role, f"{words}\n{show_board(following.board)}\n".lstrip("\n"))
        return StepResult(
            messages=() if done else (message,),
            reward=float(solved),
            done=done,
            metrics={"solved": float(solved), "moves": float(following.moves)},
            state=following,
        )


def find_action(text: str) -> str | None:
    """Return the move of the last <action>; None when there is none, or it is no direction."""
    _, opened, rest = text.rpartition(_OPENING)
    action = rest.partition(_CLOSING)[0].strip().lower() if opened else ""
    return action if action in _TILE_FROM_GAP else None


def slide(board: Board, action: str) -> Board | None:
    """Return the board after a tile slid into the gap in that direction; None when there is no such tile."""
    tiles = [list(row) for row in board]
    row, column = next((r, row.index(GAP)) for r, row in enumerate(tiles) if GAP in row)
    down, right = _TILE_FROM_GAP[action]
    tile_row, tile_column = row + down, column + right
    if not (0 <= tile_row < len(tiles) and 0 <= tile_column < len(tiles[0])):
        return None
    tiles[row][column], tiles[tile_row][tile_column] = tiles[tile_row][tile_column], GAP
    return tuple(tuple(line) for line in tiles)


def is_solved(board: Board) -> bool:
    """Whether the tiles stand in order, row by row, and the gap last."""
    tiles = [tile for row in board for tile in row]
    return tiles == [*range(1, len(tiles)), GAP]


def read_board(metadata: Mapping[str, Any]) -> Board:
    """Read the start board of a prompt.

    Raises:
        ValueError: there is none, or it is no rectangle of the numbers from 0 on.
    """
    rows = metadata.get(BOARD)
    if not isinstance(rows, Sequence) or not all(
        isinstance(row, Sequence) and len(row) == len(rows[0]) for row in rows
    ):
        raise ValueError(f"it has no board of equal rows (metadata '{BOARD}' is {rows!r:.60})")
    tiles = [tile for row in rows for tile in row]
    if not tiles or set(tiles) != set(range(len(tiles))):
        raise ValueError(f"its board {rows!r:.60} does not hold each number from 0 to {len(tiles) - 1} once")
    return tuple(tuple(row) for row in rows)
