"""Heartbeats of processes: who is alive in which role, and what each waits for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import bindparam, delete, select

from trinity_buffer.store.tables import presence
from trinity_buffer.store.transaction import Prepared, Transaction, by_dialect, dialect_module

FORGOTTEN_AFTER_US = 3_600_000_000
"""A process without a heartbeat for an hour is removed by the next process of that name."""


@dataclass(frozen=True, slots=True)
class PresenceRow:
    """A process in a role of an experiment; times in microseconds since 1970.

    Attributes:
        role: ``explorer``, ``strategy`` or ``trainer``; of a rank above 0 ``rank N``.
        name: actor, annotation set or trainer.
        waiting_for: what it said last that it waits for; None: it works.
    """

    role: str
    name: str
    host: str
    pid: int
    started_at: int
    last_seen: int
    waiting_for: str | None


def record(tx: Transaction, experiment: int, row: PresenceRow) -> None:
    """Record that a process is alive, and what it waits for."""
    before = row.last_seen - FORGOTTEN_AFTER_US
    _FORGET.execute_later(tx, of=experiment, role=row.role, by=row.name, before=before)
    _noted(tx.dialect.name).execute_later(tx, experiment=experiment, **asdict(row))


_NAMED = (
    presence.c.experiment == bindparam("of"),
    presence.c.role == bindparam("role"),
    presence.c.name == bindparam("by"),
)
_FORGET = Prepared(delete(presence).where(*_NAMED, presence.c.last_seen < bindparam("before")))


@by_dialect
def _noted(dialect: str) -> Prepared:
    made: Any = dialect_module(dialect).insert(presence)
    renewed = {"last_seen": made.excluded.last_seen, "waiting_for": made.excluded.waiting_for}
    keys = ["experiment", "role", "name", "host", "pid"]
    return Prepared(made.on_conflict_do_update(index_elements=keys, set_=renewed))


def remove(tx: Transaction, experiment: int, row: PresenceRow) -> None:
    """Take back what `record` wrote."""
    tx.execute(
        delete(presence).where(
            presence.c.experiment == experiment,
            presence.c.role == row.role,
            presence.c.name == row.name,
            presence.c.host == row.host,
            presence.c.pid == row.pid,
        )
    )


def processes(tx: Transaction, experiment: int) -> list[PresenceRow]:
    """Return the processes that sent a heartbeat, the latest first."""
    query = select(presence).where(presence.c.experiment == experiment)
    rows = tx.execute(query.order_by(presence.c.last_seen.desc())).all()
    return [PresenceRow(*row[1:]) for row in rows]
