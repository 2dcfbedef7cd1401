"""An experiment as it was when an earlier position was the last one of its log."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

import anyio.to_thread

from trinity_buffer.events import (
    BatchLeased,
    ConsumerRegistered,
    ExperiencesAnnotated,
    ExperiencesRejected,
    PlacedFact,
    StepDealt,
    StepsCommitted,
)
from trinity_buffer.limits import sizes
from trinity_buffer.pipeline.verify.projections import Progress, decoded_events, no_progress
from trinity_buffer.store import log, writer_queries
from trinity_buffer.store.asking import earlier
from trinity_buffer.store.asking.earlier import STEPS, Refolded, Seen
from trinity_buffer.store.database import Apart, Database
from trinity_buffer.store.log import StoredEvent
from trinity_buffer.store.rows import ConsumerRow
from trinity_buffer.store.transaction import Transaction

P = ParamSpec("P")
T = TypeVar("T")

_DECISIONS = ("ExperiencesAnnotated", "ExperiencesRejected")
_FENCED = ("BatchLeased", "StepDealt", "StepsCommitted")


class Earlier:
    """The projections of an experiment as they were at a position. Made by `opened_earlier`."""

    def __init__(
        self, database: Database, experiment: int, position: int, progress: Progress
    ) -> None:
        self._database = database
        self._experiment = experiment
        self._position = position
        self._progress = progress
        self._lock = anyio.Lock()
        self._opened = AsyncExitStack()
        self._apart: Apart | None = None
        self._refolded: tuple[Refolded, ...] = ()

    async def read(
        self, f: Callable[Concatenate[Transaction, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return what a function of `store` says of the projections.

        Where an event has come meanwhile that changes rows of before, they are opened anew.
        """

        def look(tx: Transaction) -> T:
            refolded = earlier.to_refold(tx, self._experiment, self._position)
            if refolded != self._refolded:
                raise _OtherwiseNow
            return f(tx, *args, **kwargs)

        async with self._lock:
            while True:
                apart = self._apart or await self._open()
                try:
                    return await apart.read(look)
                except _OtherwiseNow:
                    await self.close()

    async def close(self) -> None:
        """Close the connection."""
        self._apart = None
        await self._opened.aclose()

    async def _open(self) -> Apart:
        database, experiment, position = self._database, self._experiment, self._position
        async with AsyncExitStack() as stack:
            refolded = await database.read(earlier.to_refold, experiment, position)
            kinds = [kind for one in refolded for kind in one.made_by]
            registered: dict[str, int] = {}
            apart = await stack.enter_async_context(database.apart())
            await apart.change(earlier.prepare, experiment, position, refolded)
            async for facts in _events(database, experiment, position, kinds):
                await apart.change(earlier.fold_again, experiment, facts)
                for one in facts:
                    if isinstance(one.fact, ConsumerRegistered):
                        registered[one.fact.consumer] = one.position
                self._progress("fold", facts[-1].position, position)
            known = await _seen(database, experiment, position, registered)
            if STEPS not in refolded:
                last = await apart.change(earlier.place_trainers, experiment)
                for name, token in (await _tokens(database, experiment, position, last)).items():
                    known[name] = known.get(name, Seen())._replace(token=token)
            await apart.change(earlier.note, experiment, known)
            self._opened, self._apart, self._refolded = stack.pop_all(), apart, refolded
        return apart


class _OtherwiseNow(Exception):  # noqa: N818 - no error: what is there now needs another opening
    pass


@asynccontextmanager
async def opened_earlier(
    database: Database, experiment: int, position: int, progress: Progress = no_progress
) -> AsyncGenerator[Earlier]:
    """Open the projections of ``experiment`` as they were at ``position``.

    Raises:
        CodecError: an event that says how it was is damaged; the message names its position.
    """
    found = Earlier(database, experiment, position, progress)
    try:
        await found.read(log.head, experiment)
        yield found
    finally:
        await found.close()


async def _events(
    database: Database, experiment: int, position: int, kinds: Sequence[str]
) -> AsyncGenerator[list[PlacedFact]]:
    limit, after = sizes().events_per_page, 0
    while page := await database.read(
        log.read_after, experiment, after, limit=limit, kinds=kinds, up_to=position
    ):
        yield await _decoded(page)
        after = page[-1].position


async def _decoded(page: Sequence[StoredEvent]) -> list[PlacedFact]:
    return await anyio.to_thread.run_sync(decoded_events, page)


async def _seen(
    database: Database, experiment: int, position: int, registered: Mapping[str, int]
) -> dict[str, Seen]:
    """Return how far consumers had seen the log and what they had left out, where that is more."""
    rows = await database.read(writer_queries.consumers, experiment)
    here = [row for name, row in rows.items() if name in registered]
    found = await _decisions(database, experiment, position, here, registered)
    if any(row.rejected_groups for row in here):
        left_out: Counter[str] = Counter()
        async for facts in _events(database, experiment, position, ["ExperiencesRejected"]):
            rejected = (one.fact for one in facts if isinstance(one.fact, ExperiencesRejected))
            for fact in rejected:
                left_out[fact.consumer] += fact.planned_groups
        for name, number in left_out.items():
            found[name] = found.get(name, Seen())._replace(rejected_groups=number)
    return found


async def _decisions(
    database: Database,
    experiment: int,
    position: int,
    rows: Sequence[ConsumerRow],
    registered: Mapping[str, int],
) -> dict[str, Seen]:
    """Return how far strategies had come: their last decisions say it."""
    found: dict[str, Seen] = {}
    seeing = [row.name for row in rows if row.kind == "strategy" and row.cursor]
    since = {name: registered[name] for name in seeing}
    async for facts in _backwards(database, experiment, position, _DECISIONS, since):
        for fact in facts:
            if isinstance(fact, ExperiencesAnnotated | ExperiencesRejected) and fact.seen:
                old = found.get(fact.consumer, Seen())
                found[fact.consumer] = old._replace(
                    cursor=max(old.cursor, fact.seen), calls=max(old.calls, fact.calls or 0)
                )
    return found


async def _tokens(
    database: Database, experiment: int, position: int, since: Mapping[str, int]
) -> dict[str, int]:
    """Return trainer -> its last fencing token; ``since``: where its last step is said."""
    found: dict[str, int] = {}
    async for facts in _backwards(database, experiment, position, _FENCED, since):
        for fact in facts:
            if isinstance(fact, BatchLeased | StepDealt | StepsCommitted):
                found.setdefault(fact.consumer, fact.token)
    return found


async def _backwards(
    database: Database,
    experiment: int,
    position: int,
    kinds: Sequence[str],
    since: Mapping[str, int],
) -> AsyncGenerator[list[Any]]:
    """Yield pages of facts from the last one on, until there was one of each consumer.

    Args:
        since: consumer -> where the first of its facts may be.
    """
    missing, before = dict(since), position + 1
    limit = 1  # what decides is mostly the last one, and its bodies may be long
    while missing and before > min(missing.values()):
        page = await database.read(log.read_before, experiment, before, limit=limit, kinds=kinds)
        if not page:
            return
        facts: list[Any] = [placed.fact for placed in await _decoded(page)]
        yield facts
        for fact in facts:
            missing.pop(fact.consumer, None)
        before = page[-1].position
        limit = min(4 * limit, sizes().events_per_page)
