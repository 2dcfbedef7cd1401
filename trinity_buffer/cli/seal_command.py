"""``trinity-buffer seal``: close a batch that nobody completes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from trinity_buffer.cli.options import (
    ExperimentOption,
    JsonOption,
    StoreOption,
    chosen_experiment,
    chosen_store,
)
from trinity_buffer.cli.printing import console, print_json
from trinity_buffer.cli.running import run
from trinity_buffer.pipeline.store import open_store
from trinity_buffer.pipeline.writing.planning import seal_as_it_is


@dataclass(frozen=True, slots=True)
class Sealed:
    """What became of a batch.

    Attributes:
        experiences: that it holds; None: it was sealed before.
    """

    batch: str
    experiences: int | None


def seal(
    batch: Annotated[str, typer.Argument(help="Its id, as `trinity-buffer doctor` names it.")],
    store: StoreOption = None,
    experiment: ExperimentOption = None,
    as_json: JsonOption = False,
) -> None:
    """Seal a batch as it is: its groups are decided with the runs that are stored.

    What comes later is recorded as rejected (late). To have the runs made that are missing, start
    its explorer again under the same name, or another one with --take-over.

    Example: trinity-buffer seal e0-7 --store runs/demo.db
    """

    async def main() -> Sealed:
        url = chosen_store(store)
        name = await chosen_experiment(url, experiment)
        async with open_store(url, create=False) as opened:
            key, database = (await opened.experiment(name)).key, opened.database
            return Sealed(batch, await database.write(seal_as_it_is, key, batch, actor="user"))

    sealed: Sealed = run(main)
    if as_json:
        print_json(sealed)
    elif sealed.experiences is None:
        console().print(f"batch {batch} was sealed before", markup=False)
    else:
        told = f"sealed batch {batch} with {sealed.experiences} experiences"
        console().print(told, markup=False)
