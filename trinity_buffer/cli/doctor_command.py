"""``trinity-buffer doctor``: what is stuck, since when, and what would move it."""

from __future__ import annotations

import typer

from trinity_buffer.cli.escaping import one_line
from trinity_buffer.cli.options import ExperimentOption, JsonOption, StoreOption, chosen_store
from trinity_buffer.cli.printing import console, print_json, table, time_of
from trinity_buffer.cli.running import run
from trinity_buffer.inspector.doctor import Examination, Stuck, examine
from trinity_buffer.pipeline.store import open_store


def doctor(
    store: StoreOption = None, experiment: ExperimentOption = None, as_json: JsonOption = False
) -> None:
    """Say what is stuck, since when, and what would help; exit code 1 if anything is.

    Example: trinity-buffer doctor --store runs/demo.db
    """

    async def main() -> Examination:
        async with open_store(chosen_store(store), read_only=True) as opened:
            return await examine(opened, experiment)

    found: Examination = run(main)
    if as_json:
        print_json(found)
    else:
        _print(found)
    raise typer.Exit(1 if found.stuck else 0)


def _print(found: Examination) -> None:
    out = console()
    out.print(one_line(f"store: {found.url}"), markup=False)
    if found.here:
        columns = ["experiment", "role", "name", "where", "waits for"]
        rows = [(h.experiment, h.role, h.name, h.place, h.waiting_for) for h in found.here]
        out.print(table("who is there", columns, rows))
    else:
        out.print("nobody is there")
    for one in found.stuck:
        out.print(_told(one), markup=False)
    if not found.stuck:
        out.print("nothing is stuck")


def _told(one: Stuck) -> str:
    where = f"experiment {one.experiment}: " if one.experiment else ""
    since = "" if one.since is None else f", since {time_of(one.since)} UTC"
    return f"stuck: {where}{one.what}{since}\n  {one.remedy}"
