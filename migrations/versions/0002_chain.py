"""Heads of events, more guards of truth, what commits say of their step, who is present, views.

Written out, not made from `store.tables`: that module goes on, this revision stays what it was.
"""

from __future__ import annotations

import json
import struct
import time
from hashlib import sha256
from typing import Any

import msgpack
import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

NOT_FREQUENT = "kind NOT IN ('ExperiencesRecorded', 'ExperiencesAnnotated')"
TRIGGERS = {
    "sqlite": (
        (
            "CREATE TRIGGER event_needs_head BEFORE INSERT ON event WHEN NEW.head IS NULL BEGIN "
            "SELECT RAISE(ABORT, 'event: INSERT is forbidden, this store has schema 0002 or newer, "
            "which chains its events: pip install --upgrade trinity-buffer'); END"
        ),
    ),
    "postgresql": (
        (
            "CREATE FUNCTION event_needs_head() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE "
            "EXCEPTION 'event: INSERT is forbidden, this store has schema 0002 or newer, which "
            "chains its events: pip install --upgrade trinity-buffer'; END $$"
        ),
        (
            "CREATE TRIGGER event_needs_head BEFORE INSERT ON event FOR EACH ROW WHEN "
            "(NEW.head IS NULL) EXECUTE FUNCTION event_needs_head()"
        ),
        (
            "CREATE FUNCTION experiment_forbids_truncate() RETURNS trigger LANGUAGE plpgsql AS $$ "
            "BEGIN RAISE EXCEPTION 'experiment: TRUNCATE is forbidden, the log is append-only'; "
            "END $$"
        ),
        (
            "CREATE TRIGGER experiment_forbids_truncate BEFORE TRUNCATE ON experiment FOR EACH "
            "STATEMENT EXECUTE FUNCTION experiment_forbids_truncate()"
        ),
        (
            "CREATE FUNCTION event_forbids_truncate() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "RAISE EXCEPTION 'event: TRUNCATE is forbidden, the log is append-only'; END $$"
        ),
        (
            "CREATE TRIGGER event_forbids_truncate BEFORE TRUNCATE ON event FOR EACH STATEMENT "
            "EXECUTE FUNCTION event_forbids_truncate()"
        ),
        (
            "CREATE FUNCTION segment_forbids_truncate() RETURNS trigger LANGUAGE plpgsql AS $$ "
            "BEGIN RAISE EXCEPTION 'segment: TRUNCATE is forbidden, the log is append-only'; END $$"
        ),
        (
            "CREATE TRIGGER segment_forbids_truncate BEFORE TRUNCATE ON segment FOR EACH STATEMENT "
            "EXECUTE FUNCTION segment_forbids_truncate()"
        ),
        "ALTER TABLE segment ALTER COLUMN data SET STORAGE EXTERNAL",
    ),
}

VIEWS = {
    "rollouts": (
        "SELECT x.name AS experiment, e.batch, e.task, e.run, e.step, e.suffix, e.reward, "
        "e.policy_version, e.prompt_length, e.length AS tokens, e.trained_tokens, "
        "e.finish_reason, e.refused, e.address >> 20 AS position FROM experience e JOIN "
        "experiment x ON x.id = e.experiment"
    ),
    "annotated_rollouts": (
        "SELECT x.name AS experiment, a.consumer AS annotation_set, e.batch, e.task, e.run, "
        "e.step, e.suffix, e.reward, a.address >> 20 AS position FROM annotation a JOIN "
        "experiment x ON x.id = a.experiment JOIN experience e ON e.experiment = a.experiment "
        "AND e.address = a.experience"
    ),
    "rejected_rollouts": (
        "SELECT x.name AS experiment, r.consumer AS rejected_by, r.reason, e.batch, e.task, "
        "e.run, e.step, e.suffix, e.reward, r.position FROM rejection r JOIN experiment x ON "
        "x.id = r.experiment JOIN consumer c ON c.experiment = r.experiment AND c.name = "
        "r.consumer AND c.kind = 'strategy' JOIN experience e ON e.experiment = r.experiment "
        "AND e.address = r.address UNION ALL SELECT x.name, r.consumer, r.reason, e.batch, "
        "e.task, e.run, e.step, e.suffix, e.reward, r.position FROM rejection r JOIN experiment"
        " x ON x.id = r.experiment JOIN consumer c ON c.experiment = r.experiment AND c.name = "
        "r.consumer AND c.kind = 'trainer' JOIN consumer s ON s.experiment = r.experiment AND "
        "s.kind = 'strategy' JOIN annotation a ON a.experiment = s.experiment AND a.consumer = "
        "s.name AND a.address = r.address JOIN experience e ON e.experiment = a.experiment AND "
        "e.address = a.experience"
    ),
    "trained_rollouts": (
        "SELECT x.name AS experiment, d.consumer AS trainer, d.step AS gradient_step, d.step <="
        " c.committed_step AS committed, a.consumer AS annotation_set, e.batch, e.task, e.run, "
        "e.step, e.suffix, e.reward, e.policy_version FROM delivery d JOIN experiment x ON x.id"
        " = d.experiment JOIN consumer c ON c.experiment = d.experiment AND c.name = d.consumer"
        " JOIN consumer s ON s.experiment = d.experiment AND s.kind = 'strategy' JOIN "
        "annotation a ON a.experiment = s.experiment AND a.consumer = s.name AND a.address = "
        "d.address JOIN experience e ON e.experiment = a.experiment AND e.address = "
        "a.experience WHERE d.source = ''"
    ),
    "gradient_steps": (
        "SELECT x.name AS experiment, t.consumer AS trainer, t.step, h.recorded_at / 1000000.0 "
        'AS handed_out_at, k.recorded_at / 1000000.0 AS committed_at, t."rows", t."groups", '
        "t.checkpoint, t.leased_at AS handed_out_position, t.committed_at AS committed_position"
        " FROM step t JOIN experiment x ON x.id = t.experiment JOIN event h ON h.experiment = "
        "t.experiment AND h.position = t.leased_at LEFT JOIN event k ON k.experiment = "
        "t.experiment AND k.position = t.committed_at"
    ),
}


def upgrade() -> None:
    """Add columns, index, table, triggers and views; start the chain of each log that is there."""
    op.add_column("event", sa.Column("head", sa.LargeBinary(), nullable=True))
    op.create_index(
        "ix_event_kind",
        "event",
        ["experiment", "kind", "position"],
        unique=False,
        sqlite_where=sa.text(NOT_FREQUENT),
        postgresql_where=sa.text(NOT_FREQUENT),
    )
    op.add_column("step", sa.Column("chain", sa.LargeBinary(), nullable=True))
    op.add_column("step", sa.Column("rows_by_rank", sa.Text(), nullable=True))
    op.create_table(
        "presence",
        sa.Column("experiment", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("role", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("name", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("host", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("pid", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("started_at", sa.BigInteger(), nullable=False),
        sa.Column("last_seen", sa.BigInteger(), nullable=False),
        sa.Column("waiting_for", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint(
            "experiment", "role", "name", "host", "pid", name=op.f("pk_presence")
        ),
        sqlite_with_rowid=False,
    )
    for experiment, name in op.get_bind().execute(sa.text("SELECT id, name FROM experiment")).all():
        _start_chain(experiment, name)
    _fill_chains_of_steps()
    for statement in TRIGGERS[op.get_bind().dialect.name]:
        op.execute(sa.text(statement))
    for name, query in VIEWS.items():
        op.execute(sa.text(f"CREATE VIEW {name} AS {query}"))


_PAGE = sa.text(
    "SELECT position, kind, actor, recorded_at, body FROM event "
    "WHERE experiment = :experiment AND position > :after ORDER BY position LIMIT 512"
)
_START = sa.text(
    "INSERT INTO event (experiment, position, kind, actor, recorded_at, body, head) "
    "VALUES (:experiment, :position, 'ChainStarted', 'migration', :now, :body, :head)"
)


def _start_chain(experiment: int, name: str) -> None:
    """Append an event that names the head of all before it; ``docs/events.md`` has the bytes."""
    bind, last = op.get_bind(), 0
    head = sha256(b"trinity-buffer log\0" + name.encode()).digest()
    while page := bind.execute(_PAGE, {"experiment": experiment, "after": last}).all():
        for row in page:
            head = _head(head, *row)
        last = page[-1][0]
    now, body = time.time_ns() // 1000, msgpack.packb({"v": 1, "digest": head})
    said = (last + 1, "ChainStarted", "migration", now, body)
    values = {"experiment": experiment, "position": last + 1, "now": now, "body": body}
    bind.execute(_START, values | {"head": _head(head, *said)})


def _head(previous: bytes, position: int, kind: str, actor: str, at: int, body: bytes) -> bytes:
    what, who = kind.encode(), actor.encode()
    numbers = struct.pack(">qqII", position, at, len(what), len(who))
    return sha256(previous + numbers + what + who + bytes(body)).digest()


_COMMITS = sa.text(
    "SELECT experiment, consumer, max(step), committed_at FROM step "
    "WHERE committed_at IS NOT NULL GROUP BY experiment, consumer, committed_at"
)
_BODY = sa.text("SELECT body FROM event WHERE experiment = :experiment AND position = :position")
_CHAIN = sa.text(
    "UPDATE step SET chain = :chain, rows_by_rank = :rows "
    "WHERE experiment = :experiment AND consumer = :consumer AND step = :step"
)


_ROWS = "rows_by_rank"


def _fill_chains_of_steps() -> None:
    """Write beside the last step of each commit what its event says of it.

    Rows by rank no event of 0001 says; one of a log that was at 0002 and was taken back may.
    """
    bind = op.get_bind()
    for experiment, consumer, step, position in bind.execute(_COMMITS).all():
        of = {"experiment": experiment, "position": position}
        body: Any = msgpack.unpackb(bind.execute(_BODY, of).scalar_one(), strict_map_key=False)
        values = {"experiment": experiment, "consumer": consumer, "step": step}
        rows = json.dumps(list(by[-1]), separators=(",", ":")) if (by := body.get(_ROWS)) else None
        bind.execute(_CHAIN, values | {"chain": body["chain"], "rows": rows})


FUNCTIONS = (
    "event_needs_head",
    "experiment_forbids_truncate",
    "event_forbids_truncate",
    "segment_forbids_truncate",
)


def downgrade() -> None:
    """Take back what 0002 added; the `ChainStarted` events stay, as the log is append-only."""
    postgresql = op.get_bind().dialect.name == "postgresql"
    for name in VIEWS:
        op.execute(sa.text(f"DROP VIEW {name}"))
    for name in FUNCTIONS if postgresql else FUNCTIONS[:1]:
        table = name.partition("_")[0]
        op.execute(sa.text(f"DROP TRIGGER {name}" + (f" ON {table}" if postgresql else "")))
        if postgresql:
            op.execute(sa.text(f"DROP FUNCTION {name}()"))
    if postgresql:
        op.execute(sa.text("ALTER TABLE segment ALTER COLUMN data SET STORAGE EXTENDED"))
    op.drop_table("presence")
    op.drop_column("step", "rows_by_rank")
    op.drop_column("step", "chain")
    op.drop_index("ix_event_kind", "event")
    op.drop_column("event", "head")
