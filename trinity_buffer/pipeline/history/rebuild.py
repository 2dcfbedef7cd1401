"""Projections made anew from the log, without anybody seeing them half-built."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from trinity_buffer.errors import StoreError
from trinity_buffer.events import PlacedFact
from trinity_buffer.pipeline.verify.log_audit import EventChain
from trinity_buffer.pipeline.verify.projections import (
    Progress,
    compare,
    decoded_events,
    no_progress,
    scratch_for,
)
from trinity_buffer.store import log
from trinity_buffer.store.database import Database
from trinity_buffer.store.log import StoredEvent


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
    chain = EventChain(await database.read(log.experiment_name, experiment))

    def decode(page: Sequence[StoredEvent]) -> list[PlacedFact]:
        # Folded, an event that was altered would alter the projections for good.
        for event in page:
            if (wrong := chain.take(event)) is not None:
                raise StoreError(
                    f"the event at position {event.position} breaks the chain of the log: {wrong}; "
                    "run `trinity-buffer verify` and restore the store from a backup"
                )
        return decoded_events(page)

    with scratch_for(database, experiment) as scratch:
        mended = await compare(database, scratch, progress, decode, mends=True)
        tables = Counter(difference.table for difference in mended)
        return RebuildReport(scratch.position, dict(sorted(tables.items())))
