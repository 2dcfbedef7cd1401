"""Counters of batches and of all kinds of events, an index of open batches, a step's rows so far.

Written out, not made from `store.tables`: that module goes on, this revision stays what it was.
"""

from __future__ import annotations

from hashlib import sha256

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

COUNTS = (
    "SELECT experiment, '', kind, count(*) FROM event "
    "WHERE kind NOT IN ('ExperiencesRecorded', 'ExperiencesAnnotated') GROUP BY experiment, kind",
    "SELECT experiment, '', 'planned by: ' || actor, count(*) FROM batch "
    "WHERE planned_at IS NOT NULL GROUP BY experiment, actor",
    "SELECT experiment, '', 'planned groups', CAST(sum(planned_groups) AS BIGINT) FROM batch "
    "WHERE planned_at IS NOT NULL GROUP BY experiment",
    "SELECT experiment, '', 'planned rollouts', "
    "CAST(sum(planned_groups * rollouts_per_group) AS BIGINT) FROM batch "
    "WHERE planned_at IS NOT NULL GROUP BY experiment",
    "SELECT experiment, '', 'stored rollouts', CAST(sum(stored_rollouts) AS BIGINT) FROM batch "
    "WHERE sealed_at IS NOT NULL GROUP BY experiment",
)
OWN_ROWS = (
    "UPDATE step SET own_rows_so_far = f.own FROM (SELECT s.experiment, s.consumer, s.step, "
    "CAST(sum(s.rows - coalesce(g.number, 0)) OVER (PARTITION BY s.experiment, s.consumer "
    "ORDER BY s.step) AS BIGINT) AS own FROM step s LEFT JOIN (SELECT experiment, consumer, step, "
    "count(*) AS number FROM delivery WHERE source <> '' GROUP BY experiment, consumer, step) g "
    "ON g.experiment = s.experiment AND g.consumer = s.consumer AND g.step = s.step) f "
    "WHERE f.experiment = step.experiment AND f.consumer = step.consumer AND f.step = step.step"
)
GONE = (
    "DELETE FROM counter WHERE consumer = '' AND (state LIKE 'planned by: %' OR state IN "
    "('planned groups', 'planned rollouts', 'stored rollouts') OR "
    "(upper(substr(state, 1, 1)) = substr(state, 1, 1) "
    "AND state NOT IN ('ExperiencesRecorded', 'ExperiencesAnnotated')))"
)


def key_of(state: str) -> str:
    """Return a state, or its digest where it is too long for an index of PostgreSQL."""
    said = state.encode(errors="surrogatepass")
    return state if len(said) <= 200 else sha256(said).hexdigest()


def upgrade() -> None:
    """Add a column and an index, and count what is there."""
    op.create_index(
        "ix_batch_open",
        "batch",
        ["experiment", "planned_at", "actor"],
        sqlite_where=sa.text("sealed_at IS NULL"),
        postgresql_where=sa.text("sealed_at IS NULL"),
    )
    op.add_column("step", sa.Column("own_rows_so_far", sa.BigInteger(), nullable=True))
    op.execute(sa.text(OWN_ROWS))
    names = ("experiment", "consumer", "key", "state", "number")
    table = sa.table("counter", *map(sa.column, names))
    for count in COUNTS:
        rows = op.get_bind().execute(sa.text(count)).all()
        made = [
            dict(zip(names, (of, by, key_of(state), state, n), strict=True))
            for of, by, state, n in rows
        ]
        if made:
            op.bulk_insert(table, made)


def downgrade() -> None:
    """Take back what 0004 added."""
    op.execute(sa.text(GONE))
    op.drop_column("step", "own_rows_so_far")
    op.drop_index("ix_batch_open", "batch")
