"""How a command asks: the store is opened read-only."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from trinity_buffer.cli.options import chosen_experiment, chosen_store
from trinity_buffer.cli.printing import progress
from trinity_buffer.cli.running import run
from trinity_buffer.inspector.source import Source, as_of
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.pipeline.store import open_store


async def asked(
    store: str | None, experiment: str | None, question: Callable[[Experiment], Awaitable[Any]]
) -> Any:
    """Return the answer to ``question`` about the chosen experiment, opened read-only."""
    url = chosen_store(store)
    name = await chosen_experiment(url, experiment)
    async with open_store(url, read_only=True) as opened:
        return await question(await opened.experiment(name))


def asked_of(
    store: str | None,
    experiment: str | None,
    position: int | None,
    question: Callable[[Source], Awaitable[Any]],
) -> Any:
    """Return the answer to ``question`` about an experiment as it was at ``position``, or is."""

    async def main() -> Any:
        async def at(found: Experiment) -> Any:
            with progress() as report:
                async with as_of(found, position, report) as source:
                    return await question(source)

        return await asked(store, experiment, at)

    return run(main)
