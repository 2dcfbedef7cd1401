"""What lies around the log: triggers, indexes and pages, segments that nobody names."""

from __future__ import annotations

from trinity_buffer.events import WithSegment, kinds_of
from trinity_buffer.limits import sizes
from trinity_buffer.pipeline.history.refold import readable_events
from trinity_buffer.pipeline.verifying.cross_audit import CrossAudit
from trinity_buffer.pipeline.verifying.findings import Problem
from trinity_buffer.store import log, schema
from trinity_buffer.store.database import Database

_KINDS = kinds_of(WithSegment)


async def look(database: Database, cross: CrossAudit, *, quick: bool) -> list[Problem]:
    """Return what is wrong beside the log; a quick look asks for triggers and indexes alone."""
    wrong = await database.read(schema.unsound)
    if not quick:
        wrong += await database.read(schema.damaged_pages)
    found = [Problem("database", database.name, what) for what in wrong]
    if quick:
        return found
    return found + await _orphans(database, cross)


async def _orphans(database: Database, cross: CrossAudit) -> list[Problem]:
    """Return the segments that no event of any experiment names."""
    orphans = await database.read(database.segments.keys) - cross.named
    if not orphans:
        return []
    for key in (await database.read(log.experiment_names)).values():
        after = 0
        while page := await database.read(
            log.read_after, key, after, limit=sizes().events_per_page, kinds=_KINDS
        ):
            after = page[-1].position
            facts = [event.fact for event in readable_events(page)]
            orphans -= {fact.segment for fact in facts if isinstance(fact, WithSegment)}
    return [Problem("segments", f"segment {key.hex()}", "no event names it") for key in orphans]
