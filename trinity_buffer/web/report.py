"""A run as one HTML file that opens offline: no script, no picture and no font from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from trinity_buffer import inspector
from trinity_buffer.errors import CodecError, DamagedSegmentError, UnknownNameError
from trinity_buffer.inspector.doctor import examine
from trinity_buffer.inspector.overviews import overview_of
from trinity_buffer.inspector.source import Source, now
from trinity_buffer.inspector.step_lines import ROW_ORDERS, TrainedRow, rewards_of_runs
from trinity_buffer.pipeline.store import Store
from trinity_buffer.web.charts import Shape, histogram, lines
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
    counted = await overview_of(source)
    lines = await inspector.steps(source, limit=STEPS) if counted.trainers else []
    after = await inspector.position_before(handle, EVENTS)
    page = {
        "name": experiment,
        "url": store.url,
        "counted": counted,
        "stuck": (await examine(store, experiment)).stuck,
        "charts": charts_of(lines),
        "rejected": await inspector.rejection_counts(source),
        "actors": inspector.growth_by_actor(await inspector.staleness(source)) if lines else [],
        "step": await _last_step(source, lines),
        "events": [line async for line in inspector.event_lines(handle, after=after)],
    }
    return rendered("report.html", page)


def charts_of(step_lines: Sequence[inspector.StepLine]) -> list[Shape]:
    """Return a curve of everything that is known of steps."""
    curves: dict[str, list[float | None]] = {
        "reward": [line.reward for line in step_lines],
        "staleness": [line.staleness for line in step_lines],
        "tokens": [float(line.tokens) for line in step_lines],
        "seconds to the commit": [line.seconds for line in step_lines],
    }
    # What the log knows is not replaced by a metric of the same name.
    for name in sorted({name for line in step_lines for name in line.metrics} - curves.keys()):
        values = [line.metrics.get(name) for line in step_lines]
        curves[name] = [float(v) if isinstance(v, int | float) else None for v in values]
    steps = [line.step for line in step_lines]
    made = [lines(name, [*zip(steps, values, strict=True)]) for name, values in curves.items()]
    return [chart for chart in made if chart is not None]


async def _last_step(source: Source, lines: Sequence[inspector.StepLine]) -> Shape | None:
    """Return the last committed step: rewards as a histogram, and the rows that weighed most."""
    committed = [line for line in lines if line.state == "committed"]
    if not committed:
        return None
    try:
        contents = await inspector.blame(source, committed[-1].step, trainer=committed[-1].trainer)
    # The rest of the report is worth having without the last step.
    except (CodecError, DamagedSegmentError):
        return None
    own = [row for row in contents.rows if not row.experiment and row.uid]
    heaviest = sorted(own, key=ROW_ORDERS["abs-advantage"])[:ROWS]
    rows = [(row, await _text(source, row)) for row in heaviest]
    bars = histogram(rewards_of_runs(own))
    return {"line": contents.line, "proven": contents.proven, "bars": bars, "rows": rows}


async def _text(source: Source, row: TrainedRow) -> str:
    try:
        objects = (await inspector.show(source, row.uid)).objects
    except (UnknownNameError, CodecError, DamagedSegmentError) as error:
        return str(error)
    return cut(objects.get("response_text") or "", TEXT)
