"""Pages about gradient steps: their curves, what one was given, and how old that was."""

from __future__ import annotations

from trinity_buffer.errors import UnknownNameError
from trinity_buffer.inspect import (
    EatenRow,
    StepLine,
    blame,
    growth_by_actor,
    staleness,
    steps,
)
from trinity_buffer.inspect.source import Source
from trinity_buffer.inspect.step_lines import rewards_of_runs
from trinity_buffer.web.asked import Asked, Page, whole
from trinity_buffer.web.charts import histogram, lanes, step_bar
from trinity_buffer.web.report import charts_of

PAGE = 50
STEPS_OF_CHARTS = 200
NEIGHBOURS = 30
"""The bar above a step shows so many steps before it and after it."""


async def steps_page(asked: Asked) -> Page:
    """Return gradient steps: curves, a bar that leads to each, and a row for each."""
    source, after = asked.source, asked.whole("after")
    some = await _steps(source, asked, after, STEPS_OF_CHARTS)
    shown = some[:PAGE] if after is not None else some[-PAGE:]
    return "steps.html", {
        "charts": charts_of(some),
        "bar": step_bar([(line.step, line.reward) for line in some]),
        "steps": shown,
        "older": max(0, shown[0].step - 1 - PAGE) if shown and shown[0].step > 1 else None,
        "newer": shown[-1].step if shown and after is not None else None,
        "trainer": asked.text("trainer"),
        "live": None if after is not None else await source.head(),
    }


async def _steps(source: Source, asked: Asked, after: int | None, limit: int) -> list[StepLine]:
    """Return steps, none where nobody trains and no trainer is named."""
    trainer = asked.text("trainer")
    try:
        return await steps(source, trainer=trainer, after=after, limit=limit)
    except UnknownNameError:
        if trainer is not None:
            raise
        return []


async def step_page(asked: Asked) -> Page:
    """Return what one gradient step was given; a bar of the histogram leads to its rows."""
    source, number = asked.source, whole("step", asked.part)
    found = await blame(source, number, trainer=asked.text("trainer"))
    trainer = found.line.trainer
    near = await steps(
        source, trainer=trainer, after=max(0, number - 1 - NEIGHBOURS), limit=2 * NEIGHBOURS + 1
    )
    rows = _chosen(asked, found.rows)
    start = asked.whole("from") or 0
    return "step.html", {
        "found": found,
        "bar": step_bar([(line.step, line.reward) for line in near], current=number),
        "before": number - 1 if near[0].step < number else None,
        "after": number + 1 if near[-1].step > number else None,
        "bars": histogram(rewards_of_runs(found.rows)),
        "shares": any("loss_share" in row.measured for row in found.rows),
        "rows": rows[start : start + PAGE],
        "matching": len(rows),
        "next": start + PAGE if start + PAGE < len(rows) else None,
        "kept": {key: value for key, value in asked.query.items() if key != "from"},
    }


def _chosen(asked: Asked, eaten: tuple[EatenRow, ...]) -> list[EatenRow]:
    """Return the rows of runs between the rewards asked for, in the order that is asked for."""
    low, high = asked.real("low"), asked.real("high")
    rows = [
        row
        for row in eaten
        if (low is None or (row.run_reward is not None and row.run_reward >= low))
        and (high is None or (row.run_reward is not None and row.run_reward <= high))
    ]
    if asked.text("sort") == "abs-advantage":
        rows.sort(key=lambda row: -abs(row.advantage or 0.0))
    elif asked.text("sort") == "loss-share":
        rows.sort(key=lambda row: -row.measured.get("loss_share", 0.0))
    return rows


async def staleness_page(asked: Asked) -> Page:
    """Return how old what was trained on was: a lane for each actor, and step by step."""
    source, after, trainer = asked.source, asked.whole("after"), asked.text("trainer")
    try:
        some = await staleness(source, trainer=trainer, after=after, limit=PAGE)
    except UnknownNameError:
        if trainer is not None:
            raise
        some = []
    first = some[0].step if some else 0
    return "staleness.html", {
        "rows": some,
        "lanes": lanes(some),
        "actors": growth_by_actor(some),
        "older": max(0, first - 1 - PAGE) if first > 1 else None,
        "newer": some[-1].step if some and after is not None else None,
        "trainer": trainer,
    }
