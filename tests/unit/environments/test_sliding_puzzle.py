import pytest

from rl.core.types import Prompt, RolloutStatus
from rl.data.config import SlidingPuzzleDataset
from rl.data.datasets import load_rows
from rl.data.sliding_puzzle import show_board
from rl.environments.base import Episode
from rl.environments.config import SlidingPuzzleEnvConfig
from rl.environments.sliding_puzzle import (
    SlidingPuzzleEnvironment,
    find_action,
    is_solved,
    read_board,
    slide,
)
from tests.support.completions import completion, text_prompt

START = ((1, 2, 3), (4, 0, 6), (7, 5, 8))
PROMPT = text_prompt(metadata={"board": [list(row) for row in START]})


async def play(texts, prompt=PROMPT, **settings):
    """Return the results of one rollout with these completions, until it is done."""
    environment = SlidingPuzzleEnvironment("puzzle", SlidingPuzzleEnvConfig(kind="sliding_puzzle", **settings))
    results, state = [], None
    for text in texts:
        (result,) = await environment.step(prompt, [Episode(0, (), completion(text), state)])
        results.append(result)
        state = result.state
        if result.done:
            break
    await environment.close()
    return results


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<action>up</action>", "up"),
        ("no <action>down</action>, rather <action> LEFT </action>", "left"),
        ("<action>right", "right"),  # the engine cut the stop string off
        ("<action>up</action><action>", None),
        ("<action>north</action>", None),
        ("<action></action>", None),
        (f"<action>{' ' * 1_000_000}up{' ' * 1_000_000}\n", "up"),
        (f"<action>a{' ' * 1_000_000}b", None),
        ("up", None),
        ("", None),
    ],
)
def test_the_last_action_counts(text, action):
    assert find_action(text) == action


@pytest.mark.parametrize(
    ("action", "board"),
    [
        ("up", ((1, 2, 3), (4, 5, 6), (7, 0, 8))),
        ("down", ((1, 0, 3), (4, 2, 6), (7, 5, 8))),
        ("left", ((1, 2, 3), (4, 6, 0), (7, 5, 8))),
        ("right", ((1, 2, 3), (0, 4, 6), (7, 5, 8))),
    ],
)
def test_a_tile_slides_into_the_gap(action, board):
    assert slide(START, action) == board
    back = {"up": "down", "down": "up", "left": "right", "right": "left"}[action]
    assert slide(board, back) == START


async def test_a_solved_puzzle_is_worth_one_and_ends():
    first, second = await play(["<action>up</action>", "<action>left</action>", "<action>up</action>"])
    assert (first.reward, first.done, first.messages[0].role) == (0.0, False, "user")
    assert first.messages[0].content == "1 2 3\n4 5 6\n7 . 8\n"
    assert (second.reward, second.done, second.messages) == (1.0, True, ())
    assert second.metrics == {"solved": 1.0, "moves": 2.0}


async def test_a_faulty_move_is_answered_and_the_board_stays():
    lost, moved, blocked = await play(["hm", "<action>up</action>", "<action>up</action>"])
    assert "No move found" in lost.messages[0].content and lost.state.board == START
    assert not blocked.done and "No tile can move up" in blocked.messages[0].content
    assert blocked.state.board == moved.state.board


async def test_moves_are_bounded():
    results = await play(["hm"] * 9, max_moves=3)
    assert len(results) == 3 and results[-1].done and results[-1].reward == 0.0


@pytest.mark.parametrize(
    "metadata", [{}, {"board": 3}, {"board": [[1, 2], [3]]}, {"board": [[1, 1], [2, 0]]}, {"board": []}]
)
async def test_a_prompt_without_a_board_is_an_error_and_no_zero(metadata):
    (result,) = await play(["<action>up</action>"], text_prompt(metadata=metadata))
    assert result.status is RolloutStatus.REWARD_ERROR and "kind sliding_puzzle" in result.detail


async def test_boards_of_the_dataset_are_solved_by_search_and_played_to_the_end():
    for row in load_rows(SlidingPuzzleDataset(kind="sliding_puzzle", size=5, shuffle_moves=6, seed=3)):
        prompt = Prompt(row.row_id, row.messages, "puzzle", row.metadata, (1,))
        actions = solution(read_board(row.metadata))
        assert actions is not None and 1 <= len(actions) <= 6
        assert show_board(read_board(row.metadata)) in row.messages[0].content
        results = await play([f"<action>{action}</action>" for action in actions], prompt)
        assert results[-1].reward == 1.0 and len(results) == len(actions)


def solution(board):
    """Find the shortest solution by breadth-first search."""
    seen, front = {board}, [(board, ())]
    while front:
        following = []
        for here, path in front:
            if is_solved(here):
                return path
            for action in ("up", "down", "left", "right"):
                there = slide(here, action)
                if there is not None and there not in seen:
                    seen.add(there)
                    following.append((there, (*path, action)))
        front = following
    return None
