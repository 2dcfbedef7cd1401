"""Queries for people: reads only, and no explorer or trainer waits for one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Select, func, or_, select, text

from trinity_buffer.identity import EID
from trinity_buffer.limits import sizes
from trinity_buffer.store import log, writer_queries
from trinity_buffer.store.rows import EXPERIENCE_COLUMNS, ExperienceRow, experience_row
from trinity_buffer.store.tables import (
    annotation,
    consumer,
    delivery,
    event,
    experience,
    lease,
    rejection,
    waiting,
)
from trinity_buffer.store.trainer_queries import guest_name
from trinity_buffer.store.transaction import Statement, Transaction, bind_list, has_row, in_list


def position_before(
    tx: Transaction, experiment: int, count: int, wanted: Sequence[str], up_to: int
) -> int:
    """Return the position before the last ``count`` events of ``wanted`` kinds up to ``up_to``."""
    query = select(event.c.position).where(
        event.c.experiment == experiment, event.c.kind.in_(wanted), event.c.position <= up_to
    )
    query = query.order_by(event.c.position.desc()).offset(count).limit(1)
    return int(tx.execute(query).scalar_one_or_none() or 0)


def known_policy_versions(
    tx: Transaction, experiment: int, addresses: Sequence[int]
) -> dict[int, int]:
    """Return address -> policy version of the experiences whose version is known."""
    query = select(experience.c.address, experience.c.policy_version).where(
        experience.c.experiment == experiment,
        experience.c.policy_version.is_not(None),
        in_list(tx, experience.c.address, addresses),
    )
    return {int(address): int(version) for address, version in tx.execute(query).all()}


def size_bytes(tx: Transaction) -> int:
    """Return the size of the database on disk, without its write-ahead log."""
    if tx.dialect.name == "sqlite":
        pages = int(tx.execute(text("PRAGMA page_count")).scalar_one())
        return pages * int(tx.execute(text("PRAGMA page_size")).scalar_one())
    query = text("SELECT pg_database_size(current_database())")
    return int(tx.execute(query).scalar_one())


def newest_groups(
    tx: Transaction, experiment: int, limit: int, before: int | None = None
) -> list[tuple[str, str]]:
    """Return (batch, task) of the groups that were recorded last, the newest first.

    With ``before``, only of groups whose experiences all have a lower address.
    """
    groups: dict[tuple[str, str], None] = {}
    # A group that goes on behind the page was shown on the one before.
    whole: list[ColumnElement[bool]] = [] if before is None else [~_goes_on(before)]
    while len(groups) < limit:
        query = select(experience.c.address, experience.c.batch, experience.c.task)
        query = query.where(experience.c.experiment == experiment, *whole)
        if before is not None:
            query = query.where(experience.c.address < before)
        query = query.order_by(experience.c.address.desc()).limit(sizes().rows_per_page)
        rows = tx.execute(query).all()
        if not rows:
            break
        groups.update(dict.fromkeys((row.batch, row.task) for row in rows))
        before = int(rows[-1].address)
    return list(groups)[:limit]


def _goes_on(address: int) -> ColumnElement[bool]:
    """Return the condition that a group has an experience at ``address`` or later."""
    later = experience.alias()
    return has_row(
        later.c.experiment == experience.c.experiment,
        later.c.batch == experience.c.batch,
        later.c.task == experience.c.task,
        later.c.address >= address,
    )


def groups_of_batch(
    tx: Transaction, experiment: int, key: str, limit: int, before: int | None = None
) -> list[tuple[str, str]]:
    """Return the groups of one batch, as `newest_groups` does."""
    newest = func.max(experience.c.address)
    query = select(experience.c.task, newest).where(
        experience.c.experiment == experiment, experience.c.batch == key
    )
    # A batch has few tasks, unlike an experiment: they can be grouped before they are ordered.
    query = query.group_by(experience.c.task).order_by(newest.desc())
    if before is not None:
        query = query.having(newest < before)
    return [(key, row.task) for row in tx.execute(query.limit(limit)).all()]


def members(
    tx: Transaction, experiment: int, groups: Sequence[tuple[str, str]]
) -> list[ExperienceRow]:
    """Return the experiences of (batch, task) groups, by address."""
    # A batch at a time: of several at once, SQLite looks at every experience.
    tasks_of: dict[str, list[str]] = {}
    for batch_key, task in groups:
        tasks_of.setdefault(batch_key, []).append(task)
    rows: list[ExperienceRow] = []
    for batch_key, tasks in tasks_of.items():
        wanted = bind_list(tx, tasks)
        records = _MEMBERS.fetch_all(tx, of=experiment, batch=batch_key, tasks=wanted)
        rows += map(experience_row, records)
    return sorted(rows, key=lambda row: row.address)


_MEMBERS = writer_queries.in_batch(
    ", ".join(column.name for column in EXPERIENCE_COLUMNS), writer_queries.IN_TASKS
)


def find(tx: Transaction, experiment: int, eid: EID) -> ExperienceRow | None:
    """Return the experience of this address, or None."""
    query: Select[Any] = select(*EXPERIENCE_COLUMNS).where(
        experience.c.experiment == experiment,
        experience.c.batch == str(eid.batch),
        experience.c.task == str(eid.task),
        experience.c.run == eid.run,
        experience.c.step == eid.step,
        experience.c.suffix == eid.suffix,
    )
    row = tx.execute(query).one_or_none()
    return None if row is None else experience_row(row)


def annotation_rows(
    tx: Transaction, experiment: int, addresses: Sequence[int]
) -> list[tuple[str, int, int]]:
    """Return (set, address of the experience, address of the annotation), sorted."""
    # Only what its index holds, and sorted here: else SQLite walks through every annotation.
    query = select(annotation.c.consumer, annotation.c.experience, annotation.c.address).where(
        annotation.c.experiment == experiment, in_list(tx, annotation.c.experience, addresses)
    )
    rows = [(name, int(of), int(address)) for name, of, address in tx.execute(query).all()]
    return sorted(rows, key=lambda row: (row[0], row[2]))


def deliveries(
    tx: Transaction,
    experiment: int,
    trainers: Sequence[str],
    addresses: Sequence[int],
    source: str = "",
) -> list[tuple[str, int, int]]:
    """Return (trainer, address of the annotation, step) of the steps that hold annotation rows.

    Args:
        experiment: the trainers'.
        source: the experiment of the rows, where it is another one.
    """
    query = select(delivery.c.consumer, delivery.c.address, delivery.c.step).where(
        delivery.c.experiment == experiment,
        in_list(tx, delivery.c.consumer, trainers),
        delivery.c.source == source,
        in_list(tx, delivery.c.address, addresses),
    )
    query = query.order_by(delivery.c.consumer, delivery.c.step)
    return [(name, int(address), int(step)) for name, address, step in tx.execute(query).all()]


@dataclass(frozen=True, slots=True)
class Guest:
    """A trainer of another experiment that was handed rows of this one, its expert.

    Attributes:
        experiment: the trainer's; ``key`` is that experiment's.
        name: by which it rejects here, ``EXPERIMENT/TRAINER``.
        source: by which name its deliveries call this experiment.
    """

    experiment: str
    key: int
    trainer: str
    committed_step: int
    name: str
    source: str


def guests(tx: Transaction, experiment: int) -> list[Guest]:
    """Return the trainers of other experiments that were handed rows of ``experiment``.

    There are none where the projections hold one experiment alone.
    """
    others = (consumer.c.kind == "trainer", consumer.c.experiment != experiment)
    if tx.execute(select(consumer.c.name).where(*others).limit(1)).first() is None:
        return []
    names = {key: name for name, key in log.experiment_names(tx).items()}
    # A look at the primary key for each trainer: joined, PostgreSQL may read every delivery.
    first = select(func.min(delivery.c.address)).where(
        delivery.c.experiment == consumer.c.experiment,
        delivery.c.consumer == consumer.c.name,
        delivery.c.source == names[experiment],
    )
    first_address = first.correlate(consumer).scalar_subquery()
    query = select(consumer.c.experiment, consumer.c.name, consumer.c.committed_step, first_address)
    query = query.where(*others).order_by(consumer.c.experiment, consumer.c.name)
    return [
        Guest(names[key], key, name, step, guest_name(names[key], name), names[experiment])
        for key, name, step, address in tx.execute(query).all()
        if address is not None
    ]


class RejectedRow(NamedTuple):
    """A row of `tables.rejection`: an experience, or of a trainer an annotation, left out."""

    consumer: str
    address: int
    reason: str
    position: int


_REJECTED = (rejection.c.consumer, rejection.c.address, rejection.c.reason, rejection.c.position)


def rejections(
    tx: Transaction, experiment: int, consumers: Sequence[str], addresses: Sequence[int]
) -> list[RejectedRow]:
    """Return which of ``addresses`` these consumers rejected."""
    query = select(*_REJECTED).where(
        rejection.c.experiment == experiment,
        in_list(tx, rejection.c.consumer, consumers),
        in_list(tx, rejection.c.address, addresses),
    )
    query = query.order_by(rejection.c.consumer, rejection.c.address)
    return [RejectedRow(*row) for row in tx.execute(query).all()]


def still_waiting(
    tx: Transaction, experiment: int, strategies: Sequence[str], addresses: Sequence[int]
) -> set[tuple[str, int]]:
    """Return (set, address) of the experiences that ``strategies`` have read and not decided."""
    query = select(waiting.c.consumer, waiting.c.address).where(
        waiting.c.experiment == experiment,
        in_list(tx, waiting.c.consumer, strategies),
        in_list(tx, waiting.c.address, addresses),
    )
    return {(name, int(address)) for name, address in tx.execute(query).all()}


class LeaseRow(NamedTuple):
    """A row of `tables.lease`; ``expires_at`` in microseconds since 1970."""

    consumer: str
    owner: str
    token: int
    expires_at: int


def rejected(
    tx: Transaction,
    experiment: int,
    name: str,
    *,
    reason: str | None,
    limit: int,
    before: int | None = None,
) -> list[RejectedRow]:
    """Return rows that a consumer rejected, by descending address, below ``before`` if given."""
    query = select(*_REJECTED)
    query = query.where(rejection.c.experiment == experiment, rejection.c.consumer == name)
    if reason is not None:
        query = query.where(_for(rejection.c.reason, reason))
    if before is not None:
        query = query.where(rejection.c.address < before)
    rows = tx.execute(query.order_by(rejection.c.address.desc()).limit(limit)).all()
    return [RejectedRow(*row) for row in rows]


def _for(recorded: ColumnElement[Any], reason: str) -> ColumnElement[bool]:
    """Return the condition that a recorded reason is ``reason``, or is of that kind."""
    # No LIKE, for which upper and lower case are the same in SQLite alone.
    kind = f"{reason}:"
    return or_(recorded == reason, func.substr(recorded, 1, len(kind)) == kind)


def refused(
    tx: Transaction, experiment: int, *, reason: str | None, limit: int, before: int | None = None
) -> list[ExperienceRow]:
    """Return the experiences refused at the door, from the newest, or ``before``, down."""
    query = select(*EXPERIENCE_COLUMNS).where(
        experience.c.experiment == experiment, experience.c.refused.is_not(None)
    )
    if reason is not None:
        query = query.where(_for(experience.c.refused, reason))
    if before is not None:
        query = query.where(experience.c.address < before)
    rows = tx.execute(query.order_by(experience.c.address.desc()).limit(limit)).all()
    return [experience_row(row) for row in rows]


def who_rejected(tx: Transaction, experiment: int) -> list[str]:
    """Return the consumers that rejected rows, trainers of other experiments too."""
    names: list[str] = []
    while name := _NEXT.value(tx, of=experiment, after=names[-1] if names else ""):
        names.append(name)  # a look at the index for each, and not at each row
    return names


_NEXT = Statement(
    "SELECT min(consumer) FROM rejection WHERE experiment = :of AND consumer > :after"
)


def leases(tx: Transaction, experiment: int) -> list[LeaseRow]:
    """Return the leases of an experiment, by consumer."""
    query = select(lease.c.consumer, lease.c.owner, lease.c.token, lease.c.expires_at)
    rows = tx.execute(query.where(lease.c.experiment == experiment).order_by(lease.c.consumer))
    return [LeaseRow(*row) for row in rows.all()]


def actors(tx: Transaction, experiment: int, positions: Sequence[int]) -> dict[int, str]:
    """Return position -> the actor that recorded the event."""
    query = select(event.c.position, event.c.actor).where(
        event.c.experiment == experiment, in_list(tx, event.c.position, positions)
    )
    return {int(row.position): row.actor for row in tx.execute(query).all()}


def annotated_experiences(
    tx: Transaction, experiment: int, sets: Sequence[str], addresses: Sequence[int]
) -> dict[int, int]:
    """Return address of annotation -> address of experience."""
    query = select(annotation.c.address, annotation.c.experience).where(
        annotation.c.experiment == experiment,
        in_list(tx, annotation.c.consumer, sets),
        in_list(tx, annotation.c.address, addresses),
    )
    return {int(row.address): int(row.experience) for row in tx.execute(query).all()}
