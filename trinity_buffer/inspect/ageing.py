"""Whose staleness grew: what `staleness` found, over all its steps and over both their ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trinity_buffer.inspect.step_lines import Staleness


@dataclass(frozen=True, slots=True)
class Tenth:
    """One end of some steps.

    Attributes:
        first, last: step of it.
        mean: staleness of an actor's rows in these steps; None: it has none there.
    """

    first: int
    last: int
    mean: float | None


@dataclass(frozen=True, slots=True)
class StalenessGrowth:
    """How stale the rows of one actor were over some steps, and whether that grew.

    Attributes:
        actor: None: all of them.
        first_step, last_step: of all these steps, whoever generated their rows.
        begin, end: the first tenth of them and the last.
    """

    actor: str | None
    first_step: int
    last_step: int
    rows: int
    mean: float
    greatest: int
    begin: Tenth
    end: Tenth


def growth_by_actor(found: Sequence[Staleness]) -> list[StalenessGrowth]:
    """Return the growth for each actor and, if there are several, for all of them at the end."""
    names: Sequence[str | None] = sorted({one.actor for one in found})
    steps = sorted({one.step for one in found})
    return [
        _growth(name, [one for one in found if name in (None, one.actor)], steps)
        for name in (names if len(names) < 2 else [*names, None])
    ]


def _growth(actor: str | None, own: list[Staleness], steps: list[int]) -> StalenessGrowth:
    tenth = -(-len(steps) // 10)
    begin, end = (
        Tenth(some[0], some[-1], _mean([one for one in own if some[0] <= one.step <= some[-1]]))
        for some in (steps[:tenth], steps[-tenth:])
    )
    return StalenessGrowth(
        actor,
        first_step=steps[0],
        last_step=steps[-1],
        rows=sum(one.rows for one in own),
        mean=_mean(own) or 0.0,
        greatest=max(one.greatest for one in own),
        begin=begin,
        end=end,
    )


def _mean(some: list[Staleness]) -> float | None:
    rows = sum(one.rows for one in some)
    return sum(one.mean * one.rows for one in some) / rows if rows else None
