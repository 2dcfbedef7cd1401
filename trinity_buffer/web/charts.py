"""Small charts as SVG: lines over steps, bars of a histogram, lanes of actors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trinity_buffer.inspector.step_lines import Staleness

WIDTH, HEIGHT = 320, 120
LEFT, BOTTOM, TOP = 44, 18, 8
WIDE, LANE = 960, 18
BAR_HEIGHT = 48
SHADES = 5


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


@dataclass(frozen=True, slots=True)
class Block:
    """A place for one gradient step in a bar or a lane.

    Attributes:
        shade: 1 to 5, how strongly it is drawn; 0: nothing is known of it.
        current: whether the page is about this step.
    """

    x: float
    y: float
    width: float
    height: float
    step: int
    label: str
    shade: int
    current: bool = False


@dataclass(frozen=True, slots=True)
class Lane:
    """The steps that hold rows of one actor; ``y`` is where its lane begins."""

    actor: str
    y: int
    blocks: tuple[Block, ...]


def step_bar(
    points: Sequence[tuple[int, float | None]], current: int | None = None
) -> tuple[Block, ...]:
    """Return a block for each step, the higher its value the stronger and the taller."""
    known = [value for _, value in points if value is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    width = min(WIDE / max(len(points), 1), 40.0)

    def block(at: int, step: int, value: float | None) -> Block:
        share = 0.0 if value is None or high == low else (value - low) / (high - low)
        height = round(BAR_HEIGHT * (0.25 + 0.75 * share), 1)
        label = f"step {step}" if value is None else f"step {step}: reward {value:.4g}"
        shade = 0 if value is None else 1 + round(share * (SHADES - 1))
        x, y = round(at * width, 2), round(BAR_HEIGHT - height, 1)
        return Block(x, y, round(width * 0.9, 2), height, step, label, shade, step == current)

    return tuple(block(at, step, value) for at, (step, value) in enumerate(points))


def lanes(ages: Sequence[Staleness]) -> tuple[Lane, ...]:
    """Return a lane for each actor: a block where a step trained on rows of it, by their age."""
    if not ages:
        return ()
    first, last = min(row.step for row in ages), max(row.step for row in ages)
    most = max(row.mean for row in ages)
    width = min(WIDE / (last - first + 1), 40.0)

    def block(y: int, row: Staleness) -> Block:
        shade = 1 + round((SHADES - 1) * max(row.mean, 0.0) / most) if most > 0 else 1
        label = (
            f"step {row.step}, {row.actor}: {row.rows} rows, mean staleness {row.mean:.3g}, "
            f"greatest {row.greatest}"
        )
        x = round((row.step - first) * width, 2)
        return Block(x, y + 2, round(width * 0.9, 2), LANE - 4, row.step, label, shade)

    actors = sorted({row.actor for row in ages})
    return tuple(
        Lane(actor, at * LANE, tuple(block(at * LANE, row) for row in ages if row.actor == actor))
        for at, actor in enumerate(actors)
    )
