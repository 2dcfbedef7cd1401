"""``trinity-buffer stats``: what is in a store. It loads neither torch nor NumPy."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.markup import escape

from trinity_buffer.cli.asking import asked_of
from trinity_buffer.cli.escaping import one_line
from trinity_buffer.cli.options import (
    AsOfOption,
    ExperimentOption,
    JsonOption,
    StoreOption,
    chosen_experiment,
    chosen_store,
)
from trinity_buffer.cli.printing import (
    console,
    print_json,
    progress,
    shown,
    size_of,
    table,
    time_of,
)
from trinity_buffer.cli.running import run
from trinity_buffer.inspector.overviews import ExperimentOverview, Overview, overview, overview_of
from trinity_buffer.inspector.source import Source
from trinity_buffer.inspector.source import as_of as at_position
from trinity_buffer.pipeline.store import Store, open_store
from trinity_buffer.store import queries

MOST_IN_FULL = 12
"""Experiments; of more, each is one line."""


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
    if config:
        print_json(asked_of(store, experiment, as_of, _configuration))
        return

    async def main() -> Overview:
        url = chosen_store(store)
        name = experiment if as_of is None else await chosen_experiment(url, experiment)
        async with open_store(url, read_only=True) as opened:
            found = await overview(opened, name)
            return found if as_of is None else await _as_it_was(opened, found, as_of)

    found: Overview = run(main)
    if as_json:
        print_json(found)
    else:
        _print_overview(found)


async def _as_it_was(store: Store, found: Overview, position: int) -> Overview:
    (one,) = found.experiments
    with progress() as report:
        async with at_position(await store.experiment(one.name), position, report) as source:
            return replace(found, experiments=(await overview_of(source),))


async def _configuration(source: Source) -> dict[str, Any]:
    found = await source.read(queries.config_of, source.key)
    return {} if found is None else found[0]


def _print_overview(found: Overview) -> None:
    out = console()
    out.print(f"{found.url}  {found.version}, {size_of(found.size_bytes)} on disk", markup=False)
    if found.growth is not None:
        out.print(found.growth, markup=False)
    if not found.experiments:
        out.print("no experiments yet")
    if len(found.experiments) > MOST_IN_FULL:
        _print_many(found.experiments)
        return
    for one in found.experiments:
        out.print()
        _print_experiment(one)


def _print_many(found: Sequence[ExperimentOverview]) -> None:
    """Print a line for each experiment, past rich: it takes a second for a thousand of them."""
    names = [one_line(one.name) for one in found]
    width = max(map(len, names))
    lines = [f"\n{'experiment':<{width}}  state     experiences      steps  last event (UTC)"]
    for name, one in zip(names, found, strict=True):
        state = "finished" if one.finished else "open"
        steps = max((trainer.committed for trainer in one.trainers), default=0)
        told = f"{state:<8} {one.experiences:>12} {steps:>10}  {time_of(one.last_at)}"
        lines.append(f"{name:<{width}}  {told}")
    lines.append(f"\n{len(found)} experiments; --experiment NAME says all of one, --json of each")
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
        rows = [
            (s.consumer, s.recorded, s.unseen, s.waiting, s.annotated, s.rows, s.rejected)
            for s in one.strategies
        ]
        out.print(table("annotation sets", columns, rows))
    if one.trainers:
        out.print(table("trainers", _TRAINER_COLUMNS, [_trainer_row(t) for t in one.trainers]))
    events = [(kind, count) for kind, count in one.events.items()]
    out.print(table("events", ["kind", "count"], events))


_TRAINER_COLUMNS = [
    *("trainer", "set", "rows", "ready", "leased", "committed", "rejected"),
    *("step", "staleness", "undelivered groups", "uncommitted groups"),
]


def _trainer_row(t: Any) -> tuple[Any, ...]:
    c = t.counts
    rows = (c.rows, c.ready, c.leased, c.committed, c.rejected)
    return (t.name, c.annotation_set, *rows, t.committed, t.staleness, t.undelivered, t.uncommitted)
