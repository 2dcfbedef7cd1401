"""The command that writes a page about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trinity_buffer.cli.options import (
    ExperimentOption,
    StoreOption,
    chosen_experiment,
    chosen_store,
    made_folder,
    require_no_database,
)
from trinity_buffer.cli.printing import console
from trinity_buffer.cli.running import run
from trinity_buffer.pipeline.store import open_store
from trinity_buffer.web.report import report as report_on


def report(
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write.")],
    store: StoreOption = None,
    experiment: ExperimentOption = None,
) -> None:
    """Write a page about a run: one file that opens offline, without scripts.

    Example: trinity-buffer report -o runs/report.html
    """
    require_no_database(output)

    async def main() -> str:
        url = chosen_store(store)
        name = await chosen_experiment(url, experiment)
        async with open_store(url, read_only=True) as opened:
            return await report_on(opened, name)

    page = run(main)
    made_folder(output.parent)
    output.write_text(page, encoding="utf-8")
    console().print(f"{output}", markup=False)
