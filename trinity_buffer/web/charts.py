"""Small charts as SVG: lines over steps, and bars of a histogram."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 320, 120
LEFT, BOTTOM, TOP = 44, 18, 8


@dataclass(frozen=True, slots=True)
class Lines:
    """A curve in the coordinates of its picture.

    Attributes:
        runs: points as ``x,y x,y ...``, a text for each stretch without a gap.
        dots: the same points one by one, with what they stand for: x, y, label.
        low, high: of the values; ``first``, ``last``: of the steps.
    """

    name: str
    runs: tuple[str, ...]
    dots: tuple[tuple[float, float, str], ...]
    low: float
    high: float
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of a histogram: where it stands, and how many values lie in ``low`` to ``high``."""

    x: float
    y: float
    width: float
    height: float
    low: float
    high: float
    count: int


def lines(name: str, points: Sequence[tuple[int, float | None]]) -> Lines | None:
    """Return the curve of ``points``, (step, value); None where no value is known."""
    known = [(step, value) for step, value in points if value is not None]
    if not known:
        return None
    low, high = min(v for _, v in known), max(v for _, v in known)
    first, last = known[0][0], known[-1][0]

    def place(step: int, value: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - 8) * ((step - first) / max(last - first, 1))
        share = (value - low) / (high - low) if high > low else 0.5
        return round(x, 1), round(TOP + (HEIGHT - TOP - BOTTOM) * (1 - share), 1)

    runs: list[list[str]] = [[]]
    dots = []
    for step, value in points:
        if value is None:
            runs.append([])
            continue
        x, y = place(step, value)
        runs[-1].append(f"{x},{y}")
        dots.append((x, y, f"step {step}: {value:.4g}"))
    texts = tuple(" ".join(run) for run in runs if run)
    return Lines(name, texts, tuple(dots), low, high, first, last)


def histogram(values: Sequence[float], bins: int = 12) -> list[Bar]:
    """Return the bars of ``values`` in ``bins`` of equal width; one bar where all are equal."""
    if not values:
        return []
    low, high = min(values), max(values)
    bins = 1 if high == low else bins
    counts = [0] * bins
    for value in values:
        share = 0.0 if high == low else (value - low) / (high - low)
        counts[min(int(share * bins), bins - 1)] += 1
    width, most = (WIDTH - 16) / bins, max(counts)
    size = (high - low) / bins
    return [
        Bar(
            x=round(8 + at * width, 1),
            y=round(TOP + (HEIGHT - TOP - BOTTOM) * (1 - count / most), 1),
            width=round(width - 2, 1),
            height=round((HEIGHT - TOP - BOTTOM) * count / most, 1),
            low=low + at * size,
            high=low + (at + 1) * size,
            count=count,
        )
        for at, count in enumerate(counts)
    ]
