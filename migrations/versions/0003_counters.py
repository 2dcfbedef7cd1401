"""Counters of what is asked often, and how many rollouts of a batch are planned and stored.

Written out, not made from `store.tables`: that module goes on, this revision stays what it was.
"""

from __future__ import annotations

from hashlib import sha256

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

COUNTS = (
    "SELECT experiment, '', kind, count(*) FROM event "
    "WHERE kind IN ('ExperiencesRecorded', 'ExperiencesAnnotated') GROUP BY experiment, kind",
    "SELECT experiment, '', 'recorded', count(*) FROM experience GROUP BY experiment",
    "SELECT experiment, '', 'lowest version', min(policy_version) FROM experience "
    "WHERE policy_version IS NOT NULL GROUP BY experiment",
    "SELECT experiment, '', 'highest version', max(policy_version) FROM experience "
    "WHERE policy_version IS NOT NULL GROUP BY experiment",
    "SELECT experiment, '', 'rejected: ' || refused, count(*) FROM experience "
    "WHERE refused IS NOT NULL GROUP BY experiment, refused",
    "SELECT experiment, consumer, 'annotated', count(DISTINCT experience) FROM annotation "
    "GROUP BY experiment, consumer",
    "SELECT experiment, consumer, 'rows', count(*) FROM annotation GROUP BY experiment, consumer",
    "SELECT experiment, consumer, 'rejected: ' || reason, count(*) FROM rejection "
    "GROUP BY experiment, consumer, reason",
)
PLANNED = (
    "UPDATE batch SET planned_groups = (SELECT count(*) FROM plan p "
    "WHERE p.experiment = batch.experiment AND p.batch = batch.batch) "
    "WHERE planned_at IS NOT NULL"
)
STORED = (
    "UPDATE batch SET stored_rollouts = (SELECT coalesce(sum((SELECT count(DISTINCT e.run) "
    "FROM experience e WHERE e.experiment = p.experiment AND e.batch = p.batch "
    "AND e.task = p.task AND e.run < batch.rollouts_per_group)), 0) FROM plan p "
    "WHERE p.experiment = batch.experiment AND p.batch = batch.batch) "
    "WHERE sealed_at IS NOT NULL"
)

VIEWS = {
    "rejected_rollouts": (
        "SELECT x.name AS experiment, r.consumer AS rejected_by, r.reason, e.batch, e.task, "
        "e.run, e.step, e.suffix, e.reward, r.position FROM rejection r JOIN experiment x ON "
        "x.id = r.experiment JOIN consumer c ON c.experiment = r.experiment AND c.name = "
        "r.consumer AND c.kind = 'strategy' JOIN experience e ON e.experiment = r.experiment "
        "AND e.address = r.address UNION ALL SELECT x.name, r.consumer, r.reason, e.batch, "
        "e.task, e.run, e.step, e.suffix, e.reward, r.position FROM rejection r JOIN "
        "experiment x ON x.id = r.experiment JOIN consumer c ON c.experiment = r.experiment "
        "AND c.name = r.consumer AND c.kind = 'trainer' JOIN consumer s ON s.experiment = "
        "r.experiment AND s.kind = 'strategy' CROSS JOIN annotation a JOIN experience e ON "
        "e.experiment = a.experiment AND e.address = a.experience WHERE a.experiment = "
        "s.experiment AND a.consumer = s.name AND a.address = r.address"
    ),
    "trained_rollouts": (
        "SELECT x.name AS experiment, d.consumer AS trainer, d.step AS gradient_step, d.step "
        "<= c.committed_step AS committed, a.consumer AS annotation_set, e.batch, e.task, "
        "e.run, e.step, e.suffix, e.reward, e.policy_version FROM delivery d JOIN experiment "
        "x ON x.id = d.experiment JOIN consumer c ON c.experiment = d.experiment AND c.name ="
        " d.consumer JOIN consumer s ON s.experiment = d.experiment AND s.kind = 'strategy' "
        "CROSS JOIN annotation a JOIN experience e ON e.experiment = a.experiment AND "
        "e.address = a.experience WHERE d.source = '' AND a.experiment = s.experiment AND "
        "a.consumer = s.name AND a.address = d.address"
    ),
}
"""The views that look at annotations last: see `store.schema`."""


def key_of(state: str) -> str:
    """Return a state, or its digest where it is too long for an index of PostgreSQL."""
    said = state.encode(errors="surrogatepass")
    return state if len(said) <= 200 else sha256(said).hexdigest()


def upgrade() -> None:
    """Add the table and two columns, and count what is there."""
    table = op.create_table(
        "counter",
        sa.Column("experiment", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("consumer", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("key", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("experiment", "consumer", "key", name=op.f("pk_counter")),
        sqlite_with_rowid=False,
    )
    op.add_column("batch", sa.Column("planned_groups", sa.BigInteger(), nullable=True))
    op.add_column("batch", sa.Column("stored_rollouts", sa.BigInteger(), nullable=True))
    for count in COUNTS:
        rows = op.get_bind().execute(sa.text(count)).all()
        made = [
            {"experiment": of, "consumer": name, "key": key_of(state), "state": state, "number": n}
            for of, name, state, n in rows
        ]
        if made:
            op.bulk_insert(table, made)
    op.execute(sa.text(PLANNED))
    op.execute(sa.text(STORED))
    for name, query in VIEWS.items():
        op.execute(sa.text(f"DROP VIEW {name}"))
        op.execute(sa.text(f"CREATE VIEW {name} AS {query}"))


def downgrade() -> None:
    """Take back what 0003 added."""
    op.drop_column("batch", "stored_rollouts")
    op.drop_column("batch", "planned_groups")
    op.drop_table("counter")
