"""Promises of processes, which may all be forgotten at any time: leases, and who is there.

A lease is a renewable claim on a consumer name, of a trainer or of a process that runs a strategy.
It can be acquired when one of three holds: nobody has it, it has expired, or its owner is asking.
Acquiring always yields a token above every token that the log or the lease knows. Only a newer
owner fences, a trainer by its token: an expired lease that nobody took can still be renewed and
committed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from sqlalchemy import bindparam, delete, select, update

from trinity_buffer.errors import LeaseHeldError, LeaseLostError
from trinity_buffer.store import log
from trinity_buffer.store.log import Place
from trinity_buffer.store.tables import consumer, event, lease, presence
from trinity_buffer.store.transaction import (
    Prepared,
    Transaction,
    by_dialect,
    dialect_module,
    lock_experiment,
    one_statement,
    upsert,
)


def name_of(host: str) -> str:
    """Return the name of a host; what follows it after ``#`` tells hosts of one name apart."""
    return host.partition("#")[0]


def place_of(owner: str) -> str:
    """Return where the owner of a lease, ``host:pid:start:random``, runs, as people say it."""
    host, *rest = owner.rsplit(":", 3)
    return f"pid {rest[0]} on host {name_of(host)}" if len(rest) == 3 else owner


@one_statement
def holder(tx: Transaction, experiment: int, name: str) -> tuple[str, int, int] | None:
    """Return (owner, token, expires_at in µs) of the lease, or None."""
    rows = _HOLDER.rows(tx, of=experiment, by=name)
    return None if not rows else (rows[0][0], int(rows[0][1]), int(rows[0][2]))


_HOLDER = Prepared(
    select(lease.c.owner, lease.c.token, lease.c.expires_at).where(
        lease.c.experiment == bindparam("of"), lease.c.consumer == bindparam("by")
    )
)
_RECORDED = select(consumer.c.token).where(
    consumer.c.experiment == bindparam("of"), consumer.c.name == bindparam("by")
)
_RECORDED_TOKEN = Prepared(_RECORDED)
_HELD = (lease.c.experiment == bindparam("of"), lease.c.consumer == bindparam("by"))
_NEWEST = Prepared(
    select(
        select(lease.c.owner).where(*_HELD).scalar_subquery(),
        select(lease.c.token).where(*_HELD).scalar_subquery(),
        _RECORDED.scalar_subquery(),
        _RECORDED.with_only_columns(consumer.c.committed_step).scalar_subquery(),
        log.LAST.with_only_columns(event.c.position).scalar_subquery(),
        log.LAST.with_only_columns(event.c.head).scalar_subquery(),
    )
)


def acquire(
    tx: Transaction,
    experiment: int,
    name: str,
    *,
    owner: str,
    now_us: int,
    ttl_us: int,
    dead: str | None = None,
) -> int:
    """Take the lease and return its fencing token.

    Args:
        dead: an owner that the caller knows to be dead (a process of this machine that is gone);
            its lease is free.

    Raises:
        LeaseHeldError: another owner holds it and it has not expired.
    """
    lock_experiment(tx, experiment)
    held = holder(tx, experiment, name)
    if held is not None and held[0] not in (owner, dead) and held[2] > now_us:
        raise LeaseHeldError(
            f"trainer {name!r} is at work in {place_of(held[0])}, whose lease ends in "
            f"{(held[2] - now_us) / 1e6:.0f} s: wait for "
            "it, stop that process, or choose another consumer name"
        )
    recorded = int(_RECORDED_TOKEN.value(tx, of=experiment, by=name) or 0)
    token = max(recorded, held[1] if held else 0) + 1
    row = {"owner": owner, "token": token, "expires_at": now_us + ttl_us}
    statement = upsert(tx, lease).values({"experiment": experiment, "consumer": name, **row})
    tx.execute(statement.on_conflict_do_update(index_elements=["experiment", "consumer"], set_=row))
    return token


def renew(tx: Transaction, experiment: int, name: str, *, token: int, expires_at_us: int) -> None:
    """Extend the lease.

    Raises:
        LeaseLostError: a newer token exists.
    """
    require(tx, experiment, name, token=token)
    mine = (lease.c.experiment == experiment, lease.c.consumer == name, lease.c.token == token)
    tx.execute(update(lease).where(*mine).values(expires_at=expires_at_us))


class Standing(NamedTuple):
    """Of a trainer with the newest token: its last committed step, and where the log ends."""

    committed: int
    end: Place | None


def require(tx: Transaction, experiment: int, name: str, *, token: int) -> Standing:
    """Return how a trainer stands if ``token`` is still the newest, of the lease and of the log.

    All is asked on one trip to a server. The token stays the newest until the transaction ends:
    nobody can acquire meanwhile.

    Raises:
        LeaseLostError: it is not.
    """
    lock_experiment(tx, experiment)
    ((owner, held, recorded, committed, *end),) = _NEWEST.rows(tx, of=experiment, by=name)
    newest = max(recorded or 0, held or 0)
    if newest > token:
        who = place_of(owner) if owner else "another process"
        raise LeaseLostError(
            f"trainer {name!r}: {who} took over (token {newest} fences {token}); what was trained "
            "since the last commit "
            "is not recorded, restart to resume from that commit"
        )
    return Standing(int(committed or 0), _end(tx, experiment, *end))


def release(tx: Transaction, experiment: int, name: str, *, token: int) -> None:
    """Give the lease back, if it is still ours."""
    mine = (lease.c.experiment == experiment, lease.c.consumer == name, lease.c.token == token)
    tx.execute(delete(lease).where(*mine))


def require_holder(tx: Transaction, experiment: int, name: str, *, owner: str) -> Place | None:
    """Return where the log ends, if ``owner`` holds the lease of a strategy.

    Nobody can acquire it until the transaction ends. A lease that is gone is not held: the token of
    a strategy is in no event, so that nothing else tells who had it since.

    Raises:
        LeaseLostError: it does not.
    """
    lock_experiment(tx, experiment)
    ((held, _, _, _, *end),) = _NEWEST.rows(tx, of=experiment, by=name)
    if held != owner:
        who = place_of(held) if held else "another process"
        raise LeaseLostError(
            f"strategy {name!r}: {who} took over; what was not committed is left to it"
        )
    return _end(tx, experiment, *end)


def _end(
    tx: Transaction, experiment: int, position: int | None, head: bytes | None
) -> Place | None:
    """Return where the log ends; None before its first event."""
    if position is None:
        return None
    tx.saw(experiment, position, head)
    return log.place(position, head)


def prolong(tx: Transaction, experiment: int, name: str, *, owner: str, expires_at_us: int) -> bool:
    """Extend the lease if ``owner`` holds it; return whether that is so."""
    mine = (lease.c.experiment == experiment, lease.c.consumer == name, lease.c.owner == owner)
    return tx.execute(update(lease).where(*mine).values(expires_at=expires_at_us)).rowcount > 0


def let_go(tx: Transaction, experiment: int, name: str, *, owner: str) -> None:
    """Give the lease back if ``owner`` holds it."""
    mine = (lease.c.experiment == experiment, lease.c.consumer == name, lease.c.owner == owner)
    tx.execute(delete(lease).where(*mine))


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


def note_presence(tx: Transaction, experiment: int, row: PresenceRow) -> None:
    """Write down that a process is there."""
    before = row.last_seen - FORGOTTEN_AFTER_US
    _FORGET.rows(tx, of=experiment, role=row.role, by=row.name, before=before)
    _noted(tx.dialect.name).change(tx, experiment=experiment, **asdict(row))


_NAMED = (
    presence.c.experiment == bindparam("of"),
    presence.c.role == bindparam("role"),
    presence.c.name == bindparam("by"),
)
_FORGET = Prepared(delete(presence).where(*_NAMED, presence.c.last_seen < bindparam("before")))


@by_dialect
def _noted(dialect: str) -> Prepared:
    made: Any = dialect_module(dialect).insert(presence)
    said = {"last_seen": made.excluded.last_seen, "waiting_for": made.excluded.waiting_for}
    keys = ["experiment", "role", "name", "host", "pid"]
    return Prepared(made.on_conflict_do_update(index_elements=keys, set_=said))


def forget_presence(tx: Transaction, experiment: int, row: PresenceRow) -> None:
    """Take back what `note_presence` wrote."""
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
