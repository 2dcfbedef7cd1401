"""``trinity-buffer stats``: what is in a store. It loads neither torch nor NumPy."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.markup import escape

from trinity_buffer.cli.escaping import one_line
from trinity_buffer.cli.options import (
    AsOfOption,
    ExperimentOption,
    JsonOption,
    StoreOption,
    asked_of,
    chosen_experiment,
    chosen_store,
    run,
)
from trinity_buffer.cli.output import console, print_json, progress, shown, size_of, table, time_of
from trinity_buffer.inspector.overviews import ExperimentOverview, Overview, overview, overview_of
from trinity_buffer.inspector.source import Source
from trinity_buffer.inspector.source import as_of as at_position
from trinity_buffer.pipeline.store import open_store
from trinity_buffer.store import writer_queries

MOST_IN_FULL = 12
"""Experiments that are shown in full; of more, each is one line."""


def stats(
    store: StoreOption = None,
    experiment: ExperimentOption = None,
    config: Annotated[
        bool, typer.Option("--config", help="Only the configuration of an experiment, as JSON.")
    ] = False,
    as_of: AsOfOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what is in a store and how far each process is.

    Example: trinity-buffer stats --store runs/demo.db
    """

    async def configuration(source: Source) -> dict[str, Any]:
        row = await source.read(writer_queries.config_of, source.key)
        return {} if row is None else row[0]

    async def main() -> Overview:
        url = chosen_store(store)
        name = experiment if as_of is None else await chosen_experiment(url, experiment)
        async with open_store(url, read_only=True) as opened:
            now = await overview(opened, name)
            if as_of is None:
                return now
            (one,) = now.experiments
            with progress() as report:
                experiment_then = await opened.experiment(one.name)
                async with at_position(experiment_then, as_of, report) as source:
                    return replace(now, experiments=(await overview_of(source),))

    if config:
        print_json(asked_of(store, experiment, as_of, configuration))
        return
    view: Overview = run(main)
    if as_json:
        print_json(view)
    else:
        _print_overview(view)


def _print_overview(view: Overview) -> None:
    out = console()
    out.print(f"{view.url}  {view.version}, {size_of(view.size_bytes)} on disk", markup=False)
    if view.growth is not None:
        out.print(view.growth, markup=False)
    if not view.experiments:
        out.print("no experiments yet")
    if len(view.experiments) > MOST_IN_FULL:
        _print_many(view.experiments)
        return
    for one in view.experiments:
        out.print()
        _print_experiment(one)


def _print_many(experiments: Sequence[ExperimentOverview]) -> None:
    """Print a line for each experiment, without rich: that takes a second for a thousand."""
    names = [one_line(one.name) for one in experiments]
    width = max(map(len, names))
    lines = [f"\n{'experiment':<{width}}  state     experiences      steps  last event (UTC)"]
    for name, one in zip(names, experiments, strict=True):
        state = "finished" if one.finished else "open"
        steps = max((trainer.committed for trainer in one.trainers), default=0)
        numbers = f"{one.experiences:>12} {steps:>10}  {time_of(one.last_at)}"
        lines.append(f"{name:<{width}}  {state:<8} {numbers}")
    lines.append(f"\n{len(names)} experiments; --experiment NAME shows one in full, --json each")
    sys.stdout.write("\n".join(lines) + "\n")


def _print_experiment(one: ExperimentOverview) -> None:
    out = console()
    state = "finished" if one.finished else "open"
    out.print(f"[bold]experiment {escape(one_line(one.name))}[/bold] ({state})")
    low, high = one.versions
    lines = [
        f"events       {one.head}, {time_of(one.first_at)} to {time_of(one.last_at)} UTC",
        f"batches      {one.batches} planned, {one.sealed} sealed",
        f"rollouts     {one.plans.planned} planned = {one.plans.stored} stored + "
        f"{one.plans.missing} missing",
        f"experiences  {one.experiences}, by policy versions {shown(low)} to {shown(high)}",
        f"policies     {one.policies} published, newest {shown(one.published)}",
    ]
    lines += [f"refused      at the door: {shown(one.refused)}"] if one.refused else []
    for name, reasons in one.guests.items():
        lines.append(one_line(f"rejected     by {name}: {shown(reasons)}"))
    out.print("\n".join(lines), markup=False)
    if one.strategies:
        columns = ["set", "recorded", "unseen", "waiting", "annotated", "rows", "rejected"]
        rows: list[tuple[Any, ...]] = [
            (s.consumer, s.recorded, s.unseen, s.waiting, s.annotated, s.rows, s.rejected)
            for s in one.strategies
        ]
        out.print(table("annotation sets", columns, rows))
    if one.trainers:
        columns = ["trainer", "set", "rows", "ready", "leased", "committed", "rejected", "step"]
        columns += ["staleness", "undelivered groups", "uncommitted groups"]
        rows = [
            (
                *(t.name, t.counts.annotation_set, t.counts.rows, t.counts.ready, t.counts.leased),
                *(t.counts.committed, t.counts.rejected, t.committed, t.staleness),
                *(t.undelivered, t.uncommitted),
            )
            for t in one.trainers
        ]
        out.print(table("trainers", columns, rows))
    out.print(table("events", ["kind", "count"], list(one.events.items())))
