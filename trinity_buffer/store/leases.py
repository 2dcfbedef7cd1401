"""Leases and heartbeats, which may all be lost at any time without harm to what is recorded.

A lease is a renewable claim on a consumer name, of a trainer or of a process that runs a strategy.
Whether a live process has it is judged before it is acquired (`pipeline.coordination.lease`).
Acquiring always yields a token above every token that the log or the lease knows. Only a newer
owner fences, a trainer by its token: an expired lease can be renewed and committed until another
process takes it.

Heartbeats say which process is alive in which role, and what it waits for.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import NamedTuple

from trinity_buffer.errors import LeaseLostError
from trinity_buffer.store.log import Place
from trinity_buffer.store.transaction import Statement, Transaction, one_statement


def name_of(host: str) -> str:
    """Return the name of a host; what follows it after ``#`` tells hosts of one name apart."""
    return host.partition("#")[0]


def describe_owner(owner: str) -> str:
    """Return the process that owns a lease (``host:pid:start:random``), worded for a message."""
    host, *rest = owner.rsplit(":", 3)
    return f"pid {rest[0]} on host {name_of(host)}" if len(rest) == 3 else owner


@one_statement
def holder(tx: Transaction, experiment: int, name: str) -> tuple[str, int, int] | None:
    """Return (owner, token, expires_at in µs) of the lease, or None."""
    rows = _HOLDER.fetch_all(tx, of=experiment, by=name)
    return None if not rows else (rows[0][0], int(rows[0][1]), int(rows[0][2]))


_LEASE = "FROM lease WHERE experiment = :of AND consumer = :by"
_CONSUMER = "FROM consumer WHERE experiment = :of AND name = :by"
_HOLDER = Statement(f"SELECT owner, token, expires_at {_LEASE}")
_PUT = (
    "INSERT INTO lease (experiment, consumer, owner, token, expires_at) "
    "VALUES (:of, :by, :owner, {}, :expires) ON CONFLICT (experiment, consumer) DO UPDATE "
    "SET owner = excluded.owner, token = excluded.token, expires_at = excluded.expires_at"
)
_ACQUIRE = Statement(
    _PUT.format(
        "1 + (SELECT coalesce(max(token), 0) FROM "
        f"(SELECT token {_LEASE} UNION ALL SELECT token {_CONSUMER}) AS known)"
    )
    + " RETURNING token"
)
_RENEW = Statement(_PUT.format(":token"))
_RELEASE = Statement(f"DELETE {_LEASE} AND owner = :owner")
_LAST = "FROM event WHERE experiment = :of ORDER BY position DESC LIMIT 1"
_NEWEST = Statement(
    f"SELECT (SELECT owner {_LEASE}), (SELECT token {_LEASE}), (SELECT token {_CONSUMER}), "
    f"(SELECT committed_step {_CONSUMER}), (SELECT position {_LAST}), (SELECT head {_LAST})"
)


def acquire(
    tx: Transaction, experiment: int, name: str, *, owner: str, now_us: int, ttl_us: int
) -> int:
    """Take the lease from any holder, and return its fencing token."""
    tx.lock(experiment)
    mine = {"of": experiment, "by": name, "owner": owner}
    return int(_ACQUIRE.value(tx, **mine, expires=now_us + ttl_us))


def put(
    tx: Transaction, experiment: int, name: str, *, owner: str, token: int, expires_at_us: int
) -> None:
    """Note who holds the lease, whatever stood there before."""
    row = {"owner": owner, "token": token, "expires": expires_at_us}
    _RENEW.execute_later(tx, of=experiment, by=name, **row)


class Standing(NamedTuple):
    """Of a consumer that holds its lease: its last committed step, and where the log ends."""

    committed: int
    end: Place | None


def require(
    tx: Transaction,
    experiment: int,
    name: str,
    *,
    owner: str | None = None,
    token: int | None = None,
) -> Standing:
    """Raise unless the lease is still held; it is then held until the transaction ends.

    Asks for all that a commit needs to know next, too: on a server that is one trip.

    Args:
        owner: of a strategy. Its token is in no event, so a lease that is gone may have had
            another owner since.
        token: of a trainer, which every commit records: lost once the lease or the log has a newer
            one, but not because it expired.

    Raises:
        LeaseLostError: another process took over.
    """
    tx.lock(experiment)
    ((holds, held, recorded, committed, end, head),) = _NEWEST.fetch_all(tx, of=experiment, by=name)
    newest = max(recorded or 0, held or 0)
    if holds != owner if token is None else newest > token:
        who = describe_owner(holds) if holds else "another process"
        if token is None:
            raise LeaseLostError(
                f"strategy {name!r}: {who} took over; what was not committed is left to it"
            )
        raise LeaseLostError(
            f"trainer {name!r}: {who} took over (token {newest} fences {token}); what was trained "
            "since the last commit is not recorded, restart to resume from that commit"
        )
    tx.seen.append((experiment, end or 0, head))
    return Standing(int(committed or 0), None if end is None else Place(end, head))


def release(tx: Transaction, experiment: int, name: str, *, owner: str) -> None:
    """Give the lease back, if ``owner`` still holds it: another process may take it at once."""
    # Behind a `take` of the same owner that was cancelled, and goes on in its thread all the same.
    tx.lock(experiment)
    _RELEASE.execute_later(tx, of=experiment, by=name, owner=owner)
    tx.announce()


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


def record_presence(tx: Transaction, experiment: int, row: PresenceRow) -> None:
    """Record that a process is alive, and what it waits for."""
    before = row.last_seen - FORGOTTEN_AFTER_US
    _FORGET.execute_later(tx, experiment=experiment, **asdict(row), before=before)
    _NOTE.execute_later(tx, experiment=experiment, **asdict(row))


_OF_ROLE = "WHERE experiment = :experiment AND role = :role AND name = :name"
_FORGET = Statement(f"DELETE FROM presence {_OF_ROLE} AND last_seen < :before")
_NOTE = Statement(
    "INSERT INTO presence "
    "(experiment, role, name, host, pid, started_at, last_seen, waiting_for) VALUES "
    "(:experiment, :role, :name, :host, :pid, :started_at, :last_seen, :waiting_for) "
    "ON CONFLICT (experiment, role, name, host, pid) "
    "DO UPDATE SET last_seen = excluded.last_seen, waiting_for = excluded.waiting_for"
)


def remove_presence(tx: Transaction, experiment: int, row: PresenceRow) -> None:
    """Take back what `record` wrote."""
    _REMOVE.execute_later(tx, experiment=experiment, **asdict(row))


_REMOVE = Statement(f"DELETE FROM presence {_OF_ROLE} AND host = :host AND pid = :pid")


def processes(tx: Transaction, experiment: int) -> list[PresenceRow]:
    """Return the processes that sent a heartbeat, the latest first."""
    return [PresenceRow(*row) for row in _PROCESSES.fetch_all(tx, of=experiment)]


_PROCESSES = Statement(
    "SELECT role, name, host, pid, started_at, last_seen, waiting_for FROM presence "
    "WHERE experiment = :of ORDER BY last_seen DESC"
)
