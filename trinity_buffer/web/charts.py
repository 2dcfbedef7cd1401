"""Small charts as SVG: lines over steps, bars of a histogram, lanes of actors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from trinity_buffer.inspector.step_lines import Staleness

WIDTH, HEIGHT = 320, 120
LEFT, BOTTOM, TOP = 44, 18, 8
WIDE, LANE = 960, 18
BAR_HEIGHT = 48
SHADES = 5


Shape = dict[str, Any]
"""What a template draws: places and sizes in the coordinates of its picture, and labels."""


def lines(name: str, points: Sequence[tuple[int, float | None]]) -> Shape | None:
    """Return the curve of ``points``, (step, value); None where no value is known.

    It has a text for each stretch without a gap, and each point as a dot with its label.
    """
    known = [(step, value) for step, value in points if value is not None]
    if not known:
        return None
    low, high = min(v for _, v in known), max(v for _, v in known)
    first, last = known[0][0], known[-1][0]

    def place(step: int, value: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - 8) * ((step - first) / max(last - first, 1))
        # A constant is drawn in the middle.
        share = (value - low) / (high - low) if high > low else 0.5
        return round(x, 1), round(TOP + (HEIGHT - TOP - BOTTOM) * (1 - share), 1)

    runs: list[list[str]] = [[]]
    dots = []
    for step, value in points:
        # A gap ends the line: drawing across it would invent values.
        if value is None:
            runs.append([])
            continue
        x, y = place(step, value)
        runs[-1].append(f"{x},{y}")
        dots.append((x, y, f"step {step}: {value:.4g}"))
    curve = {"runs": [" ".join(run) for run in runs if run], "dots": dots}
    return curve | {"name": name, "low": low, "high": high, "first": first, "last": last}


def histogram(values: Sequence[float], bins: int = 12) -> list[Shape]:
    """Return the bars of ``values`` in ``bins`` of equal width; one bar where all are equal.

    ``low`` and ``high`` are of the values of a bar; one without any is left out.
    """
    if not values:
        return []
    low, high = min(values), max(values)
    bins = 1 if high == low else bins

    def bar_of(value: float) -> int:
        share = 0.0 if high == low else (value - low) / (high - low)
        return min(int(share * bins), bins - 1)  # the greatest value would fall behind the last bar

    bars = {at: list(of_bar) for at, of_bar in groupby(sorted(values), bar_of)}
    width, most = (WIDTH - 16) / bins, max(map(len, bars.values()))
    return [
        {
            "x": round(8 + at * width, 1),
            "y": round(TOP + (HEIGHT - TOP - BOTTOM) * (1 - len(part) / most), 1),
            "width": round(width - 2, 1),
            "height": round((HEIGHT - TOP - BOTTOM) * len(part) / most, 1),
            "low": part[0],
            "high": part[-1],
            "count": len(part),
        }
        for at, part in bars.items()
    ]


def _block(x: float, y: float, width: float, height: float, step: int, **about: Any) -> Shape:
    place = {"x": round(x, 2), "y": round(y, 1), "width": round(width * 0.9, 2)}
    return place | {"height": round(height, 1), "step": step, "current": False} | about


def step_bar(points: Sequence[tuple[int, float | None]], current: int | None = None) -> list[Shape]:
    """Return a block for each step, the higher its value the stronger and the taller."""
    known = [value for _, value in points if value is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    width, blocks = min(WIDE / max(len(points), 1), 40.0), []
    for at, (step, value) in enumerate(points):
        share = 0.0 if value is None or high == low else (value - low) / (high - low)
        # Even the lowest is tall enough to be clicked.
        height = round(BAR_HEIGHT * (0.25 + 0.75 * share), 1)
        label = f"step {step}" if value is None else f"step {step}: reward {value:.4g}"
        shade = 0 if value is None else 1 + round(share * (SHADES - 1))  # 0: nothing is known
        about = {"label": label, "shade": shade, "current": step == current}
        blocks.append(_block(at * width, BAR_HEIGHT - height, width, height, step, **about))
    return blocks


def lanes(ages: Sequence[Staleness]) -> list[Shape]:
    """Return a lane for each actor: a block where a step trained on rows of it, by their age."""
    first = min((row.step for row in ages), default=0)
    last = max((row.step for row in ages), default=0)
    most, width = max((row.mean for row in ages), default=0.0), min(WIDE / (last - first + 1), 40.0)
    actors = sorted({row.actor for row in ages})
    blocks: dict[str, list[Shape]] = {actor: [] for actor in actors}
    for row in ages:
        label = (
            f"step {row.step}, {row.actor}: {row.rows} rows, mean staleness {row.mean:.3g}, "
            f"greatest {row.greatest}"
        )
        shade = 1 + round((SHADES - 1) * max(row.mean, 0.0) / most) if most > 0 else 1
        x, y = (row.step - first) * width, actors.index(row.actor) * LANE + 2
        block = _block(x, y, width, LANE - 4, row.step, label=label, shade=shade)
        blocks[row.actor].append(block)
    return [{"actor": actor, "blocks": blocks[actor]} for actor in actors]
