"""Heartbeats of processes: who is alive in which role, and what each waits for."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from trinity_buffer.store.transaction import Statement, Transaction

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
    _NOTE.execute_later(tx, experiment=experiment, **asdict(row))


_FORGET = Statement(
    "DELETE FROM presence "
    "WHERE experiment = :of AND role = :role AND name = :by AND last_seen < :before"
)
_NOTE = Statement(
    "INSERT INTO presence "
    "(experiment, role, name, host, pid, started_at, last_seen, waiting_for) VALUES "
    "(:experiment, :role, :name, :host, :pid, :started_at, :last_seen, :waiting_for) "
    "ON CONFLICT (experiment, role, name, host, pid) "
    "DO UPDATE SET last_seen = excluded.last_seen, waiting_for = excluded.waiting_for"
)


def remove(tx: Transaction, experiment: int, row: PresenceRow) -> None:
    """Take back what `record` wrote."""
    _REMOVE.execute_later(tx, of=experiment, role=row.role, by=row.name, host=row.host, pid=row.pid)


_REMOVE = Statement(
    "DELETE FROM presence WHERE experiment = :of AND role = :role AND name = :by "
    "AND host = :host AND pid = :pid"
)


def processes(tx: Transaction, experiment: int) -> list[PresenceRow]:
    """Return the processes that sent a heartbeat, the latest first."""
    return [PresenceRow(*row) for row in _PROCESSES.fetch_all(tx, of=experiment)]


_PROCESSES = Statement(
    "SELECT role, name, host, pid, started_at, last_seen, waiting_for FROM presence "
    "WHERE experiment = :of ORDER BY last_seen DESC"
)
