"""``trinity-buffer stats``: what is in a store. It loads neither torch nor NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.markup import escape
from rich.text import Text

from trinity_buffer.cli import options, output
from trinity_buffer.cli.escaping import one_line
from trinity_buffer.inspector.overviews import ExperimentOverview, Overview, overview, overview_of
from trinity_buffer.inspector.source import as_of as at_position
from trinity_buffer.pipeline.store import Store
from trinity_buffer.pipeline.verify.projections import Progress
from trinity_buffer.store import writer_queries

MOST_IN_FULL = 12
"""Experiments that are shown in full; of more, each is one line."""


@options.command()
async def stats(
    store: Store,
    experiment: str | None = None,
    config: bool = False,
    as_of: options.OptionalCount = None,
    *,
    progress: Progress,
) -> output.Answer:
    """Show what is in a store and how far each process is.

    Example: trinity-buffer stats --store runs/demo.db

    Args:
        config: Only the configuration of an experiment, as JSON.
    """
    if config or as_of is not None:
        experiment = await options.experiment_in(store, experiment)
        async with at_position(await store.experiment(experiment), as_of, progress) as source:
            # Of the position too: a configuration changes during a run.
            if config:
                row = await source.read(writer_queries.config_of, source.key)
                return output.Answer({} if row is None else row[0])
            then = await overview_of(source)
        view = replace(await overview(store, experiment), experiments=(then,))
    else:
        view = await overview(store, experiment)
    return output.Answer(view, _overview_text(view))


def _overview_text(view: Overview) -> output.Lines:
    yield output.verbatim(f"{view.url}  {view.version}, {output.size_of(view.size_bytes)} on disk")
    if view.growth is not None:
        yield output.verbatim(view.growth)
    if not view.experiments:
        yield "no experiments yet"
    if len(view.experiments) > MOST_IN_FULL:
        yield from _a_line_each(view.experiments)
        return
    for experiment in view.experiments:
        yield ""
        yield from _experiment_text(experiment)


def _a_line_each(experiments: Sequence[ExperimentOverview]) -> output.Lines:
    # No table of rich, which takes a second for a thousand rows.
    names = [one_line(one.name) for one in experiments]
    width = max(map(len, names))
    yield ""
    yield f"{'experiment':<{width}}  state     experiences      steps  last event (UTC)"
    for name, one in zip(names, experiments, strict=True):
        state = "finished" if one.finished else "open"
        steps = max((trainer.committed for trainer in one.trainers), default=0)
        numbers = f"{one.experiences:>12} {steps:>10}  {output.time_of(one.last_at)}"
        yield f"{name:<{width}}  {state:<8} {numbers}"
    yield ""
    yield f"{len(names)} experiments; --experiment NAME shows one in full, --json each"


def _experiment_text(one: ExperimentOverview) -> output.Lines:
    state, name = "finished" if one.finished else "open", escape(one_line(one.name))
    yield Text.from_markup(f"[bold]experiment {name}[/bold] ({state})", emoji=False)
    low, high = map(output.shown, one.versions)
    first, last = map(output.time_of, (one.first_at, one.last_at))
    yield f"events       {one.head}, {first} to {last} UTC"
    yield f"batches      {one.batches} planned, {one.sealed} sealed"
    plans = one.plans
    yield f"rollouts     {plans.planned} planned = {plans.stored} stored + {plans.missing} missing"
    yield f"experiences  {one.experiences}, by policy versions {low} to {high}"
    yield f"policies     {one.policies} published, newest {output.shown(one.published)}"
    if one.refused:
        yield f"refused      at the door: {output.shown(one.refused)}"
    for guest, reasons in one.guests.items():
        yield f"rejected     by {guest}: {output.shown(reasons)}"
    if one.strategies:
        columns = "set=consumer, recorded, unseen, waiting, annotated, rows, rejected"
        yield output.table_of("annotation sets", columns, one.strategies)
    if one.trainers:
        columns = (
            "trainer=name, set=counts.annotation_set, rows=counts.rows, ready=counts.ready, "
            "leased=counts.leased, committed=counts.committed, rejected=counts.rejected, "
            "step=committed, staleness, undelivered groups=undelivered, "
            "uncommitted groups=uncommitted"
        )
        yield output.table_of("trainers", columns, one.trainers)
    yield output.table("events", ["kind", "count"], list(one.events.items()))
