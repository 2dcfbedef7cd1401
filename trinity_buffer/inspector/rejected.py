"""What was left out, by whom and why; and who holds what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trinity_buffer.errors import UnknownNameError
from trinity_buffer.inspector.source import Source
from trinity_buffer.pipeline.handle import now_us
from trinity_buffer.store import counters, inspection, writer_queries
from trinity_buffer.store.inspection import LeaseRow
from trinity_buffer.store.rows import ConsumerRow, position_of, written_as
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
        state: ``held``, ``expired`` (nobody took it since), or ``free``; ``forgotten`` where it is
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


class _Page(NamedTuple):
    """Which rows: of one reason, a kind of them or any, at most so many, below an address."""

    reason: str | None
    limit: int
    before: int | None


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
    known = await source.read(_names, source.key)
    if by is not None and by not in {*known, DOOR}:
        there = ", ".join([*known, DOOR])
        raise UnknownNameError(f"nobody is called {by!r} in {source.name!r} (there: {there})")

    names = [name for name in known if by in (None, name)]
    page = _Page(reason, limit, before)
    rejected = await source.read(_rejected, source.key, names, page)
    if by in (None, DOOR):
        rejected += await source.read(_refused, source.key, page)
    return sorted(rejected, key=lambda row: (-row.position, row.address))[:limit]


def _names(tx: Transaction, experiment: int) -> list[str]:
    """Return who may have rejected something."""
    others = inspection.who_rejected(tx, experiment)
    return list(dict.fromkeys([*writer_queries.consumers(tx, experiment), *others]))


def _rejected(
    tx: Transaction, experiment: int, names: Sequence[str], page: _Page
) -> list[Rejected]:
    known = {name: row.kind for name, row in writer_queries.consumers(tx, experiment).items()}
    kinds = {name: known.get(name, "trainer") for name in names}
    rows = [
        row for name in names for row in inspection.rejected(tx, experiment, name, **page._asdict())
    ]
    noted = [row.address for row in rows if kinds[row.consumer] == "trainer"]
    sets = [name for name, kind in known.items() if kind == "strategy"]
    of = inspection.annotated_experiences(tx, experiment, sets, noted)
    experiences = {row.address: of.get(row.address, row.address) for row in rows}
    stored = writer_queries.experience_rows(tx, experiment, sorted(set(experiences.values())))
    uids = {row.address: row.eid.uid for row in stored}
    return [
        Rejected(
            row.consumer,
            kinds[row.consumer],
            row.reason,
            uids.get(experiences[row.address], ""),
            row.position,
            written_as(row.address),
        )
        for row in rows
    ]


def _refused(tx: Transaction, experiment: int, page: _Page) -> list[Rejected]:
    if not counters.reasons(counters.counted_of(tx, experiment, ""), ""):
        return []  # not looked for among all that were recorded
    rows = inspection.refused(tx, experiment, **page._asdict())
    return [
        Rejected(
            *(DOOR, DOOR, row.refused or "", row.eid.uid),
            position_of(row.address),
            written_as(row.address),
        )
        for row in rows
    ]


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

    def look(tx: Transaction) -> dict[str, LeaseRow]:
        return {row.consumer: row for row in inspection.leases(tx, source.key)}

    rows = (await source.read(writer_queries.consumers, source.key)).values()
    held = await source.database.read(look) if source.position is None else None
    trainers = [row for row in rows if row.kind == "trainer"]
    strategies = [row for row in rows if row.kind == "strategy" and row.name in (held or {})]
    return [_lease_of(row, held) for row in (*trainers, *strategies)]


def _lease_of(row: ConsumerRow, held: Mapping[str, LeaseRow] | None) -> Lease:
    lease = None if held is None else held.get(row.name)
    left = None if lease is None else (lease.expires_at - now_us()) / 1e6
    state = "free" if left is None else "held" if left > 0 else "expired"
    trains = row.kind == "trainer"
    return Lease(
        row.name,
        "forgotten" if held is None else state,
        None if lease is None else lease.owner,
        row.token if lease is None else lease.token,
        left,
        row.leased_step if trains else None,
        row.committed_step if trains else None,
        row.kind,
    )
