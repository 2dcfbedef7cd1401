"""The page about what differs: two annotation sets over the same rollouts, or two runs."""

from __future__ import annotations

import time

from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.inspect import RunDifference, SetDifference, compare_runs
from trinity_buffer.inspect.compare import comparing
from trinity_buffer.inspect.source import Source, now
from trinity_buffer.store import queries
from trinity_buffer.web.asked import Asked, Page

FIRST_S = 0.5
"""So long sets are compared before a first answer."""
LONGEST_S = 60
STEPS = 200
"""So many of the last steps of each run are compared."""


async def diff_page(asked: Asked) -> Page:
    """Return how two annotation sets differ, as far as some seconds reach, or two runs."""
    source = asked.source
    consumers = await source.read(queries.consumers, source.key)
    first, second, other = (asked.text(name) for name in ("first", "second", "run"))
    sets: SetDifference | None = None
    runs: RunDifference | None = None
    reached = 0
    if first and second:
        sets, reached = await _compared(asked, source, first, second)
    elif other and source.position is not None:
        raise InvalidArgumentError("two runs are compared as they are now: open the diff there")
    elif other:
        runs = await compare_runs(source, now(await asked.store.experiment(other)), limit=STEPS)
    return "diff.html", {
        "names": [row.name for row in consumers.values() if row.kind == "strategy"],
        "others": [] if source.position is not None else await _others(asked),
        "asked": (first, second, other),
        "sets": sets,
        "runs": runs,
        "reached": reached,
        "most_steps": STEPS,
        "head": await source.head(),
        "longer": min(LONGEST_S, 4 * (asked.whole("seconds") or FIRST_S)),
    }


async def _others(asked: Asked) -> list[str]:
    return [name for name in await asked.store.experiments() if name != asked.name]


async def _compared(
    asked: Asked, source: Source, first: str, second: str
) -> tuple[SetDifference, int]:
    """Return what was found in the seconds that are asked for, and up to which position."""
    until = time.monotonic() + min(LONGEST_S, asked.whole("seconds") or FIRST_S)
    found = SetDifference(first, second)
    async for found, reached in comparing(source, first, second):
        if time.monotonic() > until:
            return found, reached
    return found, await source.head()
