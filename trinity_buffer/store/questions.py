"""Lists that people ask for, a page at a time, each found by key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import select

from trinity_buffer.store.dialect import among
from trinity_buffer.store.rows import EXPERIENCE_COLUMNS, ExperienceRow, experience_row
from trinity_buffer.store.tables import annotation, event, experience, lease, rejection
from trinity_buffer.store.transaction import Transaction


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """A row of `tables.rejection`."""

    consumer: str
    address: int
    reason: str
    position: int


@dataclass(frozen=True, slots=True)
class LeaseRow:
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
    """Return what one consumer rejected, by address from the highest, or from ``before``, down."""
    query = select(
        rejection.c.consumer, rejection.c.address, rejection.c.reason, rejection.c.position
    )
    query = query.where(rejection.c.experiment == experiment, rejection.c.consumer == name)
    if reason is not None:
        query = query.where(rejection.c.reason == reason)
    if before is not None:
        query = query.where(rejection.c.address < before)
    rows = tx.execute(query.order_by(rejection.c.address.desc()).limit(limit)).all()
    return [RejectedRow(row.consumer, int(row.address), row.reason, row.position) for row in rows]


def refused(
    tx: Transaction, experiment: int, *, reason: str | None, limit: int, before: int | None = None
) -> list[ExperienceRow]:
    """Return the experiences refused at the door, from the newest, or ``before``, down."""
    query = select(*EXPERIENCE_COLUMNS).where(
        experience.c.experiment == experiment, experience.c.refused.is_not(None)
    )
    if reason is not None:
        query = query.where(experience.c.refused == reason)
    if before is not None:
        query = query.where(experience.c.address < before)
    rows = tx.execute(query.order_by(experience.c.address.desc()).limit(limit)).all()
    return [experience_row(row) for row in rows]


def rejections_of(
    tx: Transaction, experiment: int, consumers: Sequence[str], addresses: Sequence[int]
) -> dict[tuple[str, int], int]:
    """Return (consumer, address) -> position of the event that rejected it."""
    query = select(rejection.c.consumer, rejection.c.address, rejection.c.position).where(
        rejection.c.experiment == experiment,
        among(tx, rejection.c.consumer, consumers),
        among(tx, rejection.c.address, addresses),
    )
    return {(row.consumer, int(row.address)): int(row.position) for row in tx.execute(query).all()}


def leases(tx: Transaction, experiment: int) -> list[LeaseRow]:
    """Return the leases of an experiment, by consumer."""
    query = select(lease.c.consumer, lease.c.owner, lease.c.token, lease.c.expires_at)
    rows = tx.execute(query.where(lease.c.experiment == experiment).order_by(lease.c.consumer))
    return [LeaseRow(row[0], row[1], int(row[2]), int(row[3])) for row in rows.all()]


def actors(tx: Transaction, experiment: int, positions: Sequence[int]) -> dict[int, str]:
    """Return position -> who recorded the event."""
    query = select(event.c.position, event.c.actor).where(
        event.c.experiment == experiment, among(tx, event.c.position, positions)
    )
    return {int(row.position): row.actor for row in tx.execute(query).all()}


def annotated_experiences(
    tx: Transaction, experiment: int, sets: Sequence[str], addresses: Sequence[int]
) -> dict[int, int]:
    """Return address of annotation -> address of experience."""
    query = select(annotation.c.address, annotation.c.experience).where(
        annotation.c.experiment == experiment,
        among(tx, annotation.c.consumer, sets),
        among(tx, annotation.c.address, addresses),
    )
    return {int(row.address): int(row.experience) for row in tx.execute(query).all()}
