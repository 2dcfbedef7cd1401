"""What was left out, by whom and why; and who holds what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trinity_buffer.errors import UnknownNameError
from trinity_buffer.inspector.source import Source
from trinity_buffer.pipeline.handle import now_us
from trinity_buffer.store import counters, inspection, writer_queries
from trinity_buffer.store.rows import position_of, written_as
from trinity_buffer.store.transaction import Transaction
from trinity_buffer.store.writer_queries import DOOR


@dataclass(frozen=True, slots=True)
class Rejected:
    """One experience that was left out.

    Attributes:
        by: the strategy or trainer, or ``door``; a trainer of another experiment, which mixes in
            rows of this one, is ``EXPERIMENT/TRAINER``.
        kind: ``strategy``, ``trainer`` or ``door``.
        position: of the event that says so.
        address: ``position:slot`` of the experience; of a trainer, of the annotation.
    """

    by: str
    kind: str
    reason: str
    uid: str
    position: int
    address: str


@dataclass(frozen=True, slots=True)
class Lease:
    """Who holds a trainer's work, or decides for a strategy.

    Attributes:
        trainer: its name; of a strategy that of its set.
        state: ``held``, ``expired`` (and not taken since), or ``free``; ``forgotten`` where it is
            asked how it was: leases are in no log.
        expires_in_s: seconds from now; negative: so long ago.
        leased_step, committed_step: the last handed out, and the last committed; None of a
            strategy.
        kind: ``trainer`` or ``strategy``.
    """

    trainer: str
    state: str
    owner: str | None
    token: int
    expires_in_s: float | None
    leased_step: int | None
    committed_step: int | None
    kind: str


async def rejections(
    source: Source,
    *,
    by: str | None = None,
    reason: str | None = None,
    limit: int = 20,
    before: int | None = None,
) -> list[Rejected]:
    """Return what was rejected last, the newest first.

    Args:
        by: only by this strategy or trainer; ``door``: what was late or invalid.
        reason: only for this reason, or for those of this kind: ``invalid`` finds
            ``invalid: reward`` too.
        limit: at most so many.
        before: only below this address; a page of one consumer begins where the last one ended.

    Raises:
        UnknownNameError: no such consumer.
    """
    key = source.key
    page: dict[str, Any] = {"reason": reason, "limit": limit, "before": before}

    def read(tx: Transaction) -> list[Rejected]:
        consumers = writer_queries.consumers(tx, key)
        # A trainer of another experiment rejects rows of this one, and is no consumer of it.
        names = list(dict.fromkeys([*consumers, *inspection.who_rejected(tx, key)]))
        if by is not None and by not in {*names, DOOR}:
            there = ", ".join([*names, DOOR])
            raise UnknownNameError(f"nobody is called {by!r} in {source.name!r} (there: {there})")
        kinds = {name: consumers[name].kind if name in consumers else "trainer" for name in names}
        asked = [name for name in names if by in (None, name)]
        rows = [row for name in asked for row in inspection.rejected(tx, key, name, **page)]
        sets = [name for name, row in consumers.items() if row.kind == "strategy"]
        noted = [row.address for row in rows if kinds[row.consumer] == "trainer"]
        # A trainer rejects annotations; people look for the experience.
        of_note = inspection.annotated_experiences(tx, key, sets, noted)
        addresses = [of_note.get(row.address, row.address) for row in rows]
        stored = writer_queries.experience_rows(tx, key, sorted(set(addresses)))
        uids = {row.address: row.eid.uid for row in stored}
        rejected = [
            Rejected(
                row.consumer,
                kinds[row.consumer],
                row.reason,
                uids.get(address, ""),
                row.position,
                written_as(row.address),
            )
            for row, address in zip(rows, addresses, strict=True)
        ]
        if by in (None, DOOR) and counters.reasons(counters.counted_of(tx, key, ""), ""):
            # No index finds what was refused: where nothing was, all rows would be read for it.
            rejected += [
                Rejected(
                    *(DOOR, DOOR, row.refused or "", row.eid.uid),
                    position_of(row.address),
                    written_as(row.address),
                )
                for row in inspection.refused(tx, key, **page)
            ]
        return rejected

    rejected = await source.read(read)
    # Each consumer has given its newest; the newest of all are among them.
    return sorted(rejected, key=lambda row: (-row.position, row.address))[:limit]


async def rejection_counts(source: Source) -> Mapping[str, Mapping[str, int]]:
    """Return consumer -> reason -> how many it rejected; ``door`` is who refuses at the door."""
    numbers = await source.read(counters.numbers_of, source.key)
    names = sorted({name for name, _ in numbers if name})
    counted = {name: counters.reasons(numbers, name) for name in names}
    counted[DOOR] = counters.reasons(numbers, "")
    return {name: reasons for name, reasons in counted.items() if reasons}


async def leases(source: Source) -> list[Lease]:
    """Return every trainer and who holds its work, and the strategies that a process decides for.

    As it was: how far each trainer had come.
    """
    consumers = (await source.read(writer_queries.consumers, source.key)).values()
    held = {}
    if source.position is None:
        held = {
            row.consumer: row for row in await source.database.read(inspection.leases, source.key)
        }
    leases = []
    for row in sorted(consumers, key=lambda row: row.kind != "trainer"):
        lease, trains = held.get(row.name), row.kind == "trainer"
        if not trains and lease is None:
            continue
        # Leases are in no log, so how they were is unknown: `forgotten`.
        left = None if lease is None else (lease.expires_at - now_us()) / 1e6
        state = "free" if left is None else "held" if left > 0 else "expired"
        leases.append(
            Lease(
                row.name,
                state if source.position is None else "forgotten",
                None if lease is None else lease.owner,
                row.token if lease is None else lease.token,
                left,
                row.leased_step if trains else None,
                row.committed_step if trains else None,
                row.kind,
            )
        )
    return leases
