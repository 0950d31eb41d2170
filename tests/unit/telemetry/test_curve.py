from hypothesis import given
from hypothesis import strategies as st

from rl.telemetry.curve import draw_curve


def test_a_rising_reward_rises_from_left_to_right():
    lines = draw_curve([(1, 0.0), (20, 1.0)], width=10, height=5)
    assert len(lines) == 7
    assert lines[0].startswith("   1.00 ┤") and lines[4].startswith("   0.00 ┤") and lines[2].startswith("   0.50 ┤")
    starts = [len(line[9:]) - len(line[9:].lstrip()) for line in lines[:5]]
    assert starts == sorted(starts, reverse=True) and starts[0] > starts[4] == 0
    assert lines[-1].split() == ["1", "20"]


def test_a_single_point_and_a_flat_curve_are_drawn():
    assert any(0x2800 < ord(character) < 0x2900 for line in draw_curve([(3, 0.5)]) for character in line)
    assert draw_curve([(1, 2.0), (2, 2.0)])[0].startswith("   2.50 ┤")


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.integers(1, 80), st.integers(1, 20))
def test_any_values_fit_the_frame(values, width, height):
    lines = draw_curve([(float(i), value) for i, value in enumerate(values)], width, height)
    assert len(lines) == height + 2
    assert all(len(line) <= max(width, 2) + 20 for line in lines)
