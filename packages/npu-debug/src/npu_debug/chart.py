"""A line chart in a few lines of terminal text."""

from __future__ import annotations

import math
from collections.abc import Sequence

# Bits of a braille character (U+2800 + bits) by row and column of its 4 x 2 dots.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def chart(
    xs: Sequence[float], ys: Sequence[float | None], width: int = 60, height: int = 8, ascii_only: bool = False
) -> str:
    """Draw ys over xs as one line.

    Args:
        xs: Ascending positions, such as step numbers.
        ys: Values; None is left out, and a value that is not finite is marked with `!` on the axis.
        width: Characters per row, axis labels not counted.
        height: Rows.
        ascii_only: Draw with `*` instead of braille dots.

    Returns:
        The chart, without a line end; "" when there are fewer than two finite values.
    """
    points = [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None and math.isfinite(y)]
    if len(points) < 2:
        return ""
    across, down = (1, 1) if ascii_only else (2, 4)
    columns, rows = width * across, height * down
    low, high = min(y for _, y in points), max(y for _, y in points)
    start, end = xs[0], xs[-1]
    # Half of each, so that the difference of two floats of opposite sign is finite.
    unit = 1 if math.isfinite(high - low) else 0.5

    def column(x: float, size: int) -> int:
        return round((x - start) / (end - start) * (size - 1)) if end > start else 0

    def row(y: float) -> int:
        return round((high * unit - y * unit) / (high * unit - low * unit) * (rows - 1)) if high > low else rows // 2

    cells = [[0] * width for _ in range(height)]

    def draw(c: int, r: int) -> None:
        cells[r // down][c // across] |= _DOTS[r % down][c % across]

    at, level = column(points[0][0], columns), row(points[0][1])
    for x, y in points:
        to, target = column(x, columns), row(y)
        last = level
        for c in range(at, to + 1):
            now = level + round((target - level) * (c - at) / (to - at)) if to > at else target
            # Down or up from the row after the last one, so that steep lines have no gaps.
            for r in range(now, last, 1 if now < last else -1) if now != last else (now,):
                draw(c, r)
            last = now
        at, level = to, target

    paint = (lambda bits: "*" if bits else " ") if ascii_only else (lambda bits: chr(0x2800 + bits) if bits else " ")
    labels = [f"{high:.4g}", *[""] * (height - 2), f"{low:.4g}"]
    margin = max(map(len, labels))
    edge, corner, dash = ("|", "+", "-") if ascii_only else ("│", "└", "─")
    axis = [dash] * width
    for x, y in zip(xs, ys, strict=True):
        if y is not None and not math.isfinite(y):
            axis[column(x, width)] = "!"
    body = [f"{label:>{margin}} {edge}{''.join(map(paint, cells[i]))}".rstrip() for i, label in enumerate(labels)]
    foot = f"{start}{end:>{max(1, width - len(str(start)))}}"
    return "\n".join([*body, f"{'':{margin}} {corner}{''.join(axis)}", f"{'':{margin}}  {foot}"])
