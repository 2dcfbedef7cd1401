"""The log folded again beside the live projections: how the two compare, and what mends these."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import anyio.to_thread

from trinity_buffer.codec.objects import decode_fact
from trinity_buffer.errors import CodecError, StoreError
from trinity_buffer.events import PlacedFact, kinds_of
from trinity_buffer.limits import sizes
from trinity_buffer.store import log, refold
from trinity_buffer.store.connection import Database
from trinity_buffer.store.log import EventChain, StoredEvent
from trinity_buffer.store.refold import Difference, Scratch, Span
from trinity_buffer.store.transaction import Transaction

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""

Decode = Callable[[Sequence[StoredEvent]], list[PlacedFact]]


def no_progress(_what: str, _done: int, _total: int) -> None:
    """Say nothing."""


async def pages(
    database: Database,
    experiment: int,
    *,
    after: int = 0,
    up_to: int | None = None,
    kinds: Sequence[str] | None = None,
) -> AsyncGenerator[list[StoredEvent]]:
    """Yield the events of ``after`` < position <= ``up_to`` in pages, each read for itself."""
    while True:
        limit = sizes.events_per_page
        read = partial(log.read_after, limit=limit, up_to=up_to, kinds=kinds)
        page = await database.read(read, experiment, after)
        if page:
            yield page
            after = page[-1].position
        if len(page) < limit:
            return


def decoded_events(page: Sequence[StoredEvent]) -> list[PlacedFact]:
    """Return a page with its bodies.

    Raises:
        CodecError: a body is damaged; the message names its position.
    """
    events = []
    for event in page:
        try:
            fact = decode_fact(event.kind, event.body)
        except CodecError as error:
            raise type(error)(f"event {event.position}: {error}") from error
        events.append(PlacedFact(event.position, event.actor, fact))
    return events


def chained(experiment: str) -> Decode:
    """Return a function that decodes the log of an experiment page by page, from its first event.

    It raises StoreError if an event was altered or is missing: the fold of the others would be of
    a run that never was.
    """
    chain = EventChain(experiment)

    def decode(page: Sequence[StoredEvent]) -> list[PlacedFact]:
        for event in page:
            if (wrong := chain.take(event)) is not None:
                raise StoreError(
                    f"the event at position {event.position} breaks the chain of the log: {wrong}; "
                    "run `trinity-buffer verify` and restore the store from a backup"
                )
        return decoded_events(page)

    return decode


def readable_events(page: Sequence[StoredEvent]) -> list[PlacedFact]:
    """Return a page with its bodies, without the events whose body is damaged."""
    events = []
    for event in page:
        with suppress(CodecError):
            events += decoded_events([event])
    return events


async def facts_of(
    database: Database, experiment: int, kinds: Any, *, after: int = 0, up_to: int | None = None
) -> AsyncGenerator[tuple[int, Any]]:
    """Yield position and fact of the sound events of a kind, or of a union such as ``A | B``."""
    named = kinds_of(kinds)
    async for page in pages(database, experiment, after=after, up_to=up_to, kinds=named):
        for event in await anyio.to_thread.run_sync(readable_events, page):
            yield event.position, event.fact


async def catch_up(
    database: Database, scratch: Scratch, progress: Progress, decode: Decode = decoded_events
) -> None:
    """Fold what is in the log, and go on while many more come.

    Raises:
        UnfoldableError: an event contradicts those before it.
        CodecError: a body is damaged.
    """
    while True:
        head = await database.read(log.head, scratch.experiment)
        async for page in pages(database, scratch.experiment, after=scratch.position, up_to=head):
            events = await anyio.to_thread.run_sync(decode, page)
            await anyio.to_thread.run_sync(scratch.fold, events)
            progress("fold", page[-1].position, head)
        # Others write meanwhile: only a short tail may be folded inside of a transaction.
        behind = await database.read(log.head, scratch.experiment) - head
        if behind <= sizes.tail_events:
            return


def whole_spans(tx: Transaction, scratch: Scratch) -> list[Span]:
    """Return the unlimited spans that together are all projections, live and folded."""
    folded = scratch.ask(refold.spans, scratch.experiment)
    return list(dict.fromkeys([*refold.spans(tx, scratch.experiment), *folded]))


async def suspects(database: Database, scratch: Scratch, progress: Progress) -> list[Span]:
    """Return the spans where live and folded rows may differ, looking at each for itself.

    They are those that differ at first sight, and the last one of each table and owner, which
    events to come add rows to. Others go on appending meanwhile, so a difference may be news.
    """
    suspected: list[Span] = []
    experiment, done = scratch.experiment, 0
    total = sum((await database.read(refold.counts, experiment)).values())
    for whole in await database.read(whole_spans, scratch):
        span = whole
        while True:
            limit = await anyio.to_thread.run_sync(scratch.ask, refold.next_limit, experiment, span)
            if limit is None:
                suspected.append(span)
                break
            piece = replace(span, up_to=limit)
            live = await database.read(refold.rows_of, experiment, piece)
            look = partial(scratch.ask, refold.rows_of, experiment, piece)
            folded = await anyio.to_thread.run_sync(look)
            if refold.differences(piece, live, folded):
                suspected.append(piece)
            done += len(live)
            progress("compare", min(done, total), total)
            span = replace(span, after=limit)
    progress("compare", total, total)
    return suspected


async def compare(
    database: Database, scratch: Scratch, progress: Progress, decode: Decode, *, mends: bool = False
) -> list[Difference]:
    """Fold the rest of the log into ``scratch``; return every live row that is not what it says.

    Args:
        database: the store.
        scratch: of one experiment.
        progress: called with what is being done, how much of it is done, and how much there is.
        decode: returns a page with its bodies.
        mends: also make these rows what the log says, in the transaction that confirms them.

    Raises:
        UnfoldableError: an event contradicts those before it.
        CodecError: a body is damaged.
    """
    await catch_up(database, scratch, progress, decode)
    suspected = await suspects(database, scratch, progress)
    await catch_up(database, scratch, progress, decode)

    def settle(tx: Transaction) -> list[Difference]:
        experiment = scratch.experiment
        if mends:
            tx.lock(experiment)
        # What came since `catch_up`: some events, so that the transaction is short.
        scratch.fold(decode(log.read_after(tx, experiment, scratch.position, limit=1 << 31)))
        known, whole = {span.whole for span in suspected}, whole_spans(tx, scratch)
        again = [*suspected, *(span for span in whole if span not in known)]
        if mends:
            # Events that came meanwhile were folded on the live side with whatever is wrong there,
            # so what they may have spoilt is looked at again beside what is suspected.
            again = [span for span in again if span.table not in refold.STATEFUL]
            again += [span for span in whole if span.table in refold.STATEFUL]
        confirmed: list[Difference] = []
        for span in again:
            folded = scratch.ask(refold.rows_of, experiment, span)
            confirmed += refold.differences(span, refold.rows_of(tx, experiment, span), folded)
        if mends:
            refold.mend(tx, confirmed)
            tx.announce()
        return confirmed

    return await (database.write(settle) if mends else database.read(settle))


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """What `rebuild` did.

    Attributes:
        events: how many were folded.
        mended: table -> rows that were not what the log says, and are now.
    """

    events: int
    mended: dict[str, int] = field(default_factory=dict)


async def rebuild(
    database: Database, experiment: int, progress: Progress = no_progress
) -> RebuildReport:
    """Make every projection of ``experiment`` what the log says, row for row.

    The log is folded into a scratch database beside the store, page by page, while others go on.
    One transaction then folds the few events that came meanwhile and replaces the rows that differ:
    what it writes is as much as was wrong, mostly nothing, and readers see all of it or
    none. Only where whole projections were lost does it last (some 20 s for a million experiences).

    Raises:
        StoreError: an event that cannot be folded, or is not the one that was recorded; nothing was
            changed.
        CodecError: a body is damaged; nothing was changed.
    """
    decode = chained(await database.read(log.experiment_name, experiment))
    with refold.open_scratch(experiment) as scratch:
        mended = await compare(database, scratch, progress, decode, mends=True)
        tables = Counter(difference.table for difference in mended)
        return RebuildReport(scratch.position, dict(sorted(tables.items())))
