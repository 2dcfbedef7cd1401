"""Commands that read much: what differs, where a text stands, and a screen of a live run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import anyio
import typer
from rich.console import Group
from rich.live import Live

from trinity_buffer import inspector as questions
from trinity_buffer.cli.asking import asked_of
from trinity_buffer.cli.escaping import one_line
from trinity_buffer.cli.options import (
    AsOfOption,
    ExperimentOption,
    JsonLinesOption,
    JsonOption,
    StoreOption,
    chosen_experiment,
    chosen_store,
)
from trinity_buffer.cli.printing import (
    console,
    end_if_damaged,
    print_json,
    progress,
    shown,
    table,
    time_of,
)
from trinity_buffer.cli.running import run
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.inspector.compare import (
    RunDifference,
    SetDifference,
    compare_runs,
    compare_sets,
)
from trinity_buffer.inspector.events import event_lines, position_before
from trinity_buffer.inspector.experience import Unreadable
from trinity_buffer.inspector.searching import search as found_in
from trinity_buffer.inspector.source import Source, now
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.pipeline.store import open_store
from trinity_buffer.store import queries
from trinity_buffer.store.url import named

MOST_LINES = 200
"""Of the steps that two runs have."""

FRAME_S = 0.5
"""A screen is drawn at most so often, however much is written."""


def diff(
    first: Annotated[str, typer.Argument(help="An annotation set, or an experiment.")],
    second: Annotated[str, typer.Argument(help="Another one.")],
    store: StoreOption = None,
    experiment: ExperimentOption = None,
    other_store: Annotated[
        str | None, typer.Option("--other-store", help="Store of SECOND, if it is an experiment.")
    ] = None,
    limit: Annotated[int, typer.Option(help="Show at most this many differing rows.", min=1)] = 20,
    as_of: AsOfOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two annotation sets over the same rollouts, or two runs step by step.

    Example: trinity-buffer diff grpo grpo-4
    """
    url = chosen_store(store)
    if run(lambda: _are_experiments(url, other_store or url, first, second)):
        if as_of is not None:
            raise InvalidArgumentError(
                "--as-of is a position of one log: it goes with two annotation sets, not two runs"
            )
        runs: RunDifference = run(lambda: _runs(url, first, other_store or url, second))
        if as_json:
            print_json(runs)
        else:
            _print_runs(runs, *_headings(runs, url, other_store or url))
        return

    async def question(source: Source) -> SetDifference:
        with progress() as report:
            return await compare_sets(source, first, second, limit=limit, progress=report)

    sets: SetDifference = asked_of(url, experiment, as_of, question)
    if as_json:
        print_json({**_plain(sets), "mean": sets.mean})
    else:
        _print_sets(sets)
    end_if_damaged(sets.unreadable)


async def _are_experiments(url: str, other: str, first: str, second: str) -> bool:
    async with open_store(url, read_only=True) as one, open_store(other, read_only=True) as two:
        return first in await one.experiments() and second in await two.experiments()


async def _runs(url: str, first: str, other: str, second: str) -> RunDifference:
    async with open_store(url, read_only=True) as one, open_store(other, read_only=True) as two:
        a, b = now(await one.experiment(first)), now(await two.experiment(second))
        with progress() as report:
            return await compare_runs(a, b, progress=report)


def _plain(found: SetDifference) -> dict[str, Any]:
    names = ("first", "second", "experiences", "both", "equal", "opposite", "greatest")
    return {name: getattr(found, name) for name in names} | {
        "rows": [asdict(row) for row in found.rows],
        "states": dict(found.states),
        "unreadable": [asdict(row) for row in found.unreadable],
    }


def _print_sets(found: SetDifference) -> None:
    out = console()
    told = [(states, count) for states, count in found.states.most_common()]
    out.print(table(f"{found.first} / {found.second}", ["states", "experiences"], told))
    out.print(
        f"{found.both} have an advantage in both: {found.equal} the same, {found.opposite} of "
        f"opposite sign, mean difference {shown(found.mean)}, greatest {shown(found.greatest)}",
        markup=False,
    )
    rows = [(r.uid, r.first, r.second, r.first_advantage, r.second_advantage) for r in found.rows]
    columns = ["uid", found.first, found.second, "advantage", "advantage "]
    if rows:
        out.print(table("what differs most", columns, rows))
    else:
        legible = " that can be read" if found.unreadable else ""
        out.print(f"no difference in any advantage{legible}")


def _headings(found: RunDifference, *stores: str) -> list[str]:
    """Return what the two sides are called: with the store where their names are the same."""
    names = [found.first, found.second]
    if found.first != found.second or len(set(stores)) == 1:
        return names
    return [f"{name} ({named(store)})" for name, store in zip(names, stores, strict=True)]


def _print_runs(found: RunDifference, *sides: str) -> None:
    out = console()
    rows = [(name, *values) for name, values in found.config.items()]
    if rows:
        out.print(table("configuration", ["key", *sides], rows))
    else:
        out.print("no difference in the configuration")
    numbers = [(name, *values) for name, values in found.numbers.items()]
    out.print(table("in numbers", ["", *sides], numbers))
    steps = [
        (step, name, *values) for step, some in found.steps.items() for name, values in some.items()
    ]
    out.print(table("steps of both", ["step", "", *sides], steps[-MOST_LINES:]))
    if len(steps) > MOST_LINES:
        told = f"these are the last {MOST_LINES} of {len(steps)} lines: --json has them all"
        out.print(told, markup=False)


def search(
    text: Annotated[
        str,
        typer.Argument(
            help="What to look for in prompts, responses, messages (chosen and rejected ones too)"
            " and tools."
        ),
    ],
    store: StoreOption = None,
    experiment: ExperimentOption = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Match upper and lower case exactly.")
    ] = False,
    limit: Annotated[int, typer.Option(help="Stop after this many results.", min=1)] = 20,
    as_of: AsOfOption = None,
    as_json: JsonLinesOption = False,
) -> None:
    """Find rollouts by their text; each is printed as soon as it is found.

    Example: trinity-buffer search "3 1 2" --limit 5
    """
    damaged: list[Unreadable] = []

    async def question(source: Source) -> int:
        count = 0
        with progress() as report:
            found = found_in(source, text, exact=exact, progress=report, unreadable=damaged)
            async for one in found:
                count += 1
                if as_json:
                    print_json(one)
                else:
                    console().print(
                        one_line(f"{one.uid}  {one.field}: {one.excerpt}"), markup=False
                    )
                if count == limit:
                    break
        return count

    count = asked_of(store, experiment, as_of, question)
    if not count and not as_json:
        console().print(one_line(f"no text holds {text!r}"), markup=False)
    end_if_damaged(damaged)


def top(
    store: StoreOption = None,
    experiment: ExperimentOption = None,
    once: Annotated[bool, typer.Option("--once", help="Print one screen, and end.")] = False,
) -> None:
    """Watch a run: how far each process is, the last steps, and the last events.

    Example: trinity-buffer top --once
    """

    async def main() -> None:
        url = chosen_store(store)
        name = await chosen_experiment(url, experiment)
        async with open_store(url, read_only=True) as opened:
            found = await opened.experiment(name)
            if once:
                console().print(await _screen(found))
                return
            await _watch(found)

    run(main)


async def _watch(experiment: Experiment) -> None:
    """Draw the screen again whenever something was written, until the experiment is finished."""
    changes = experiment.database.changes
    with Live(console=console(), screen=False, auto_refresh=False) as live:
        while True:
            state = await changes.state()
            live.update(await _screen(experiment), refresh=True)
            if await experiment.is_finished():
                return
            await changes.changed(state)
            await anyio.sleep(FRAME_S)  # what comes meanwhile is on the next screen


async def _screen(experiment: Experiment) -> Group:
    source = now(experiment)
    consumers = await source.read(queries.consumers, source.key)
    parts: list[Any] = []
    leases = [one for one in await questions.leases(source) if one.kind == "trainer"]
    parts.append(
        table(
            one_line(experiment.name),
            ["trainer", "lease", "handed out", "committed"],
            [(one.trainer, one.state, one.leased_step, one.committed_step) for one in leases],
        )
    )
    strategies = [row for row in consumers.values() if row.kind == "strategy"]
    sets = [(row.name, row.cursor, row.calls) for row in strategies]
    parts.append(table("strategies", ["set", "seen up to", "groups"], sets))
    for one in leases[:1]:
        lines = await questions.steps(source, trainer=one.trainer, limit=5)
        rows = [(x.step, x.state, x.rows, x.reward, x.staleness, x.seconds) for x in lines]
        columns = ["step", "state", "rows", "reward", "staleness", "seconds"]
        parts.append(table("last steps", columns, rows))
    after = await position_before(experiment, 8)
    events = [line async for line in event_lines(experiment, after=after)]
    told = [(e.position, time_of(e.recorded_at), e.kind, e.actor, e.summary[:60]) for e in events]
    parts.append(table("last events", ["position", "time", "kind", "actor", "what"], told))
    return Group(*parts)
