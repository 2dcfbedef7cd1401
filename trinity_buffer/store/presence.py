"""Who is there: a promise of each process, renewed while it works, not a fact of the log."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import delete, select

from trinity_buffer.store.dialect import upsert
from trinity_buffer.store.tables import presence
from trinity_buffer.store.transaction import Transaction

FORGOTTEN_AFTER_US = 3_600_000_000
"""What nobody has renewed for an hour is removed by the next process of that name."""


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


def note(tx: Transaction, experiment: int, row: PresenceRow) -> None:
    """Write down that a process is there."""
    who = {"experiment": experiment, "role": row.role, "name": row.name}
    of_name = (
        presence.c.experiment == experiment,
        presence.c.role == row.role,
        presence.c.name == row.name,
    )
    tx.execute(
        delete(presence).where(*of_name, presence.c.last_seen < row.last_seen - FORGOTTEN_AFTER_US)
    )
    said = {"last_seen": row.last_seen, "waiting_for": row.waiting_for}
    new = {**who, "host": row.host, "pid": row.pid, "started_at": row.started_at, **said}
    statement = upsert(tx, presence).values(new)
    keys = ["experiment", "role", "name", "host", "pid"]
    tx.execute(statement.on_conflict_do_update(index_elements=keys, set_=said))


def forget(tx: Transaction, experiment: int, row: PresenceRow) -> None:
    """Take back what `note` wrote."""
    tx.execute(
        delete(presence).where(
            presence.c.experiment == experiment,
            presence.c.role == row.role,
            presence.c.name == row.name,
            presence.c.host == row.host,
            presence.c.pid == row.pid,
        )
    )


def everybody(tx: Transaction, experiment: int) -> list[PresenceRow]:
    """Return everybody who said that he is there, the last one first."""
    query = select(presence).where(presence.c.experiment == experiment)
    rows = tx.execute(query.order_by(presence.c.last_seen.desc())).all()
    return [PresenceRow(*row[1:]) for row in rows]
