"""A run as one HTML file that opens offline: no script, no picture and no font from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trinity_buffer.errors import DamagedSegmentError, UnknownNameError
from trinity_buffer.inspector import (
    StepLine,
    blame,
    event_lines,
    growth_by_actor,
    overview,
    position_before,
    rejection_counts,
    show,
    staleness,
    steps,
)
from trinity_buffer.inspector.doctor import examine
from trinity_buffer.inspector.source import Source, now
from trinity_buffer.inspector.step_lines import EatenRow, rewards_of_runs
from trinity_buffer.pipeline.store import Store
from trinity_buffer.web.charts import Lines, histogram, lines
from trinity_buffer.web.templating import cut, rendered

STEPS = 1000
ROWS = 6
EVENTS = 30
TEXT = 600
"""So many characters of a response are shown."""


async def report(store: Store, experiment: str) -> str:
    """Return a page about ``experiment``: counts, what is stuck, trends, its last step, events.

    Raises:
        UnknownExperimentError: there is none of this name.
    """
    handle = await store.experiment(experiment)
    source = now(handle)
    (counted,) = (await overview(store, experiment)).experiments
    lines = await steps(source, limit=STEPS) if counted.trainers else []
    after = await position_before(handle, EVENTS)
    page = {
        "name": experiment,
        "url": store.url,
        "counted": counted,
        "stuck": (await examine(store, experiment)).stuck,
        "charts": charts_of(lines),
        "rejected": await rejection_counts(source),
        "actors": growth_by_actor(await staleness(source)) if lines else [],
        "step": await _last_step(source, lines),
        "events": [line async for line in event_lines(handle, after=after)],
    }
    return rendered("report.html", page)


def charts_of(lines_of_steps: Sequence[StepLine]) -> list[Lines]:
    """Return a curve of everything that is known of steps."""
    own: dict[str, list[float | None]] = {
        "reward": [line.reward for line in lines_of_steps],
        "staleness": [line.staleness for line in lines_of_steps],
        "tokens": [float(line.tokens) for line in lines_of_steps],
        "seconds to the commit": [line.seconds for line in lines_of_steps],
    }
    names = sorted({name for line in lines_of_steps for name in line.metrics})
    recorded = {
        name: [_number(line.metrics.get(name)) for line in lines_of_steps] for name in names
    }
    made = [
        lines(
            name, [(line.step, value) for line, value in zip(lines_of_steps, values, strict=True)]
        )
        for name, values in {**own, **recorded, **own}.items()
    ]
    return [chart for chart in made if chart is not None]


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


async def _last_step(source: Source, lines: Sequence[StepLine]) -> Mapping[str, Any] | None:
    """Return the last committed step: rewards as a histogram, and the rows that weighed most."""
    committed = [line for line in lines if line.state == "committed"]
    if not committed:
        return None
    try:
        contents = await blame(source, committed[-1].step, trainer=committed[-1].trainer)
    # The rest of the report is worth having without the last step.
    except DamagedSegmentError:
        return None
    own = [row for row in contents.rows if not row.experiment and row.uid]
    heaviest = sorted(own, key=lambda row: -abs(row.advantage or 0.0))[:ROWS]
    return {
        "line": contents.line,
        "proven": contents.proven,
        "bars": histogram(rewards_of_runs(own)),
        "rows": [(row, await _text(source, row)) for row in heaviest],
    }


async def _text(source: Source, row: EatenRow) -> str:
    try:
        objects = (await show(source, row.uid)).objects
    except (UnknownNameError, DamagedSegmentError) as error:
        return str(error)
    return cut(objects.get("response_text") or "", TEXT)
