"""Draw a curve as text: braille dots, eight to a character, or plain ASCII. Pure; it knows no terminal, no metric."""

from collections.abc import Sequence

_DOT_COLUMNS, _DOT_ROWS = 2, 4
# Bit of the dot (row, column) in a braille character, U+2800 plus the bits set.
_DOT_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BRAILLE = 0x2800
_LABEL_WIDTH = 7
_ASCII_AXES = str.maketrans("┤└─", "|+-")


def draw_curve(
    points: Sequence[tuple[float, float]], width: int = 60, height: int = 9, is_ascii: bool = False
) -> list[str]:
    """Return the lines of a plot of (x, y) points joined by straight segments, with labelled axes.

    Args:
        points: In ascending x; at least one.
        width: Characters of the plotting area.
        height: Lines of the plotting area.
        is_ascii: Use ASCII characters alone.
    """
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low, high = _y_range(ys)
    columns, rows = width * _DOT_COLUMNS, height * _DOT_ROWS
    dots = [
        (_scale(x, xs[0], xs[-1], columns), rows - 1 - _scale(y, low, high, rows)) for x, y in zip(xs, ys, strict=True)
    ]
    cells = [[0] * width for _ in range(height)]
    for start, end in zip(dots, [*dots[1:], dots[-1]], strict=True):
        for column, row in _segment(start, end):
            cells[row // _DOT_ROWS][column // _DOT_COLUMNS] |= _DOT_BITS[row % _DOT_ROWS][column % _DOT_COLUMNS]
    labels = {0: f"{high:.2f}", (height - 1) // 2: f"{_label_middle(low, high, height):.2f}", height - 1: f"{low:.2f}"}
    lines = [
        f"{labels.get(row, ''):>{_LABEL_WIDTH}} ┤"
        + "".join(("*" if is_ascii else chr(_BRAILLE + bits)) if bits else " " for bits in cells[row]).rstrip()
        for row in range(height)
    ]
    first, last = f"{xs[0]:g}", f"{xs[-1]:g}"
    axis = f"{'':>{_LABEL_WIDTH}} └" + "─" * width
    lines = [*lines, axis, f"{'':>{_LABEL_WIDTH}}  {first}{last:>{max(width - len(first), 1)}}"]
    return [line.translate(_ASCII_AXES) for line in lines] if is_ascii else lines


def _y_range(ys: Sequence[float]) -> tuple[float, float]:
    """Return a range with some height; values within [0, 1] get exactly that, the usual range of a reward."""
    low, high = min(ys), max(ys)
    if low >= 0.0 and high <= 1.0 and high - low > 0.1:
        return 0.0, 1.0
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _label_middle(low: float, high: float, height: int) -> float:
    return high - (high - low) * ((height - 1) // 2) / max(height - 1, 1)


def _scale(value: float, low: float, high: float, size: int) -> int:
    return round((value - low) / (high - low) * (size - 1)) if high > low else 0


def _segment(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the dots of a straight segment, both ends included."""
    (x0, y0), (x1, y1) = start, end
    steps = max(abs(x1 - x0), abs(y1 - y0), 1)
    return [(round(x0 + (x1 - x0) * i / steps), round(y0 + (y1 - y0) * i / steps)) for i in range(steps + 1)]
