"""The first tables: truth, its triggers, and the projections.

Written out, not made from `store.tables`: that module goes on, this revision stays what it was.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TRIGGERS = {
    "sqlite": (
        (
            "CREATE TRIGGER experiment_forbids_update BEFORE UPDATE ON experiment BEGIN SELECT "
            "RAISE(ABORT, 'experiment: UPDATE is forbidden, the log is append-only'); END"
        ),
        (
            "CREATE TRIGGER experiment_forbids_delete BEFORE DELETE ON experiment BEGIN SELECT "
            "RAISE(ABORT, 'experiment: DELETE is forbidden, the log is append-only'); END"
        ),
        (
            "CREATE TRIGGER event_forbids_update BEFORE UPDATE ON event BEGIN SELECT "
            "RAISE(ABORT, 'event: UPDATE is forbidden, the log is append-only'); END"
        ),
        (
            "CREATE TRIGGER event_forbids_delete BEFORE DELETE ON event BEGIN SELECT "
            "RAISE(ABORT, 'event: DELETE is forbidden, the log is append-only'); END"
        ),
        (
            "CREATE TRIGGER segment_forbids_update BEFORE UPDATE ON segment BEGIN SELECT "
            "RAISE(ABORT, 'segment: UPDATE is forbidden, the log is append-only'); END"
        ),
        (
            "CREATE TRIGGER segment_forbids_delete BEFORE DELETE ON segment WHEN NOT EXISTS "
            "(SELECT 1 FROM archived WHERE archived.segment = OLD.key) BEGIN SELECT RAISE(ABORT, "
            "'segment: DELETE is forbidden, archive it first (trinity-buffer compact)'); END"
        ),
    ),
    "postgresql": (
        (
            "CREATE FUNCTION experiment_forbids_update() RETURNS trigger LANGUAGE plpgsql AS $$ "
            "BEGIN RAISE EXCEPTION 'experiment: UPDATE is forbidden, the log is append-only'; "
            "END $$"
        ),
        (
            "CREATE TRIGGER experiment_forbids_update BEFORE UPDATE ON experiment FOR EACH "
            "STATEMENT EXECUTE FUNCTION experiment_forbids_update()"
        ),
        (
            "CREATE FUNCTION experiment_forbids_delete() RETURNS trigger LANGUAGE plpgsql AS $$ "
            "BEGIN RAISE EXCEPTION 'experiment: DELETE is forbidden, the log is append-only'; "
            "END $$"
        ),
        (
            "CREATE TRIGGER experiment_forbids_delete BEFORE DELETE ON experiment FOR EACH "
            "STATEMENT EXECUTE FUNCTION experiment_forbids_delete()"
        ),
        (
            "CREATE FUNCTION event_forbids_update() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "RAISE EXCEPTION 'event: UPDATE is forbidden, the log is append-only'; END $$"
        ),
        (
            "CREATE TRIGGER event_forbids_update BEFORE UPDATE ON event FOR EACH STATEMENT "
            "EXECUTE FUNCTION event_forbids_update()"
        ),
        (
            "CREATE FUNCTION event_forbids_delete() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "RAISE EXCEPTION 'event: DELETE is forbidden, the log is append-only'; END $$"
        ),
        (
            "CREATE TRIGGER event_forbids_delete BEFORE DELETE ON event FOR EACH STATEMENT "
            "EXECUTE FUNCTION event_forbids_delete()"
        ),
        (
            "CREATE FUNCTION segment_forbids_update() RETURNS trigger LANGUAGE plpgsql AS $$ "
            "BEGIN RAISE EXCEPTION 'segment: UPDATE is forbidden, the log is append-only'; END $$"
        ),
        (
            "CREATE TRIGGER segment_forbids_update BEFORE UPDATE ON segment FOR EACH STATEMENT "
            "EXECUTE FUNCTION segment_forbids_update()"
        ),
        (
            "CREATE FUNCTION segment_forbids_delete() RETURNS trigger LANGUAGE plpgsql AS $$ "
            "BEGIN IF NOT EXISTS (SELECT 1 FROM archived WHERE archived.segment = OLD.key) THEN "
            "RAISE EXCEPTION 'segment: DELETE is forbidden, archive it first (trinity-buffer "
            "compact)'; END IF; RETURN OLD; END $$"
        ),
        (
            "CREATE TRIGGER segment_forbids_delete BEFORE DELETE ON segment FOR EACH ROW EXECUTE "
            "FUNCTION segment_forbids_delete()"
        ),
    ),
}


def upgrade() -> None:
    """Create everything."""
    _create_truth()
    _create_configuration_and_batch()
    _create_plan_and_experience()
    _create_consumer_and_waiting()
    _create_annotation_and_rejection()
    _create_delivery_and_step()
    _create_policy_and_assigned_reward()
    _create_archived_and_lease()
    for statement in TRIGGERS[op.get_bind().dialect.name]:
        op.execute(sa.text(statement))


def _create_truth() -> None:
    op.create_table(
        "experiment",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_experiment")),
        sa.UniqueConstraint("name", name=op.f("uq_experiment_name")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "event",
        sa.Column("experiment", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("position", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("recorded_at", sa.BigInteger(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.CheckConstraint("kind <> ''", name=op.f("ck_event_kind")),
        sa.CheckConstraint("position >= 1", name=op.f("ck_event_position")),
        sa.PrimaryKeyConstraint("experiment", "position", name=op.f("pk_event")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "segment",
        sa.Column("key", sa.LargeBinary(), autoincrement=False, nullable=False),
        sa.Column("family", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("part", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("checksum", sa.BigInteger(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.CheckConstraint("part >= 0", name=op.f("ck_segment_part")),
        sa.PrimaryKeyConstraint("key", "family", "part", name=op.f("pk_segment")),
    )


def _create_configuration_and_batch() -> None:
    op.create_table(
        "configuration",
        sa.Column("experiment", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("config", sa.Text(), nullable=False),
        sa.Column("finished", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("experiment", name=op.f("pk_configuration")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "batch",
        sa.Column("experiment", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("batch", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("batch_is_int", sa.Boolean(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("rollouts_per_group", sa.Integer(), nullable=True),
        sa.Column("planned_at", sa.BigInteger(), nullable=True),
        sa.Column("sealed_at", sa.BigInteger(), nullable=True),
        sa.Column("expected", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("experiment", "batch", name=op.f("pk_batch")),
        sqlite_with_rowid=False,
    )


def _create_plan_and_experience() -> None:
    op.create_table(
        "plan",
        sa.Column("experiment", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("batch", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("task", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("task_is_int", sa.Boolean(), nullable=False),
        sa.Column("ordinal", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("experiment", "batch", "task", name=op.f("pk_plan")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "experience",
        sa.Column("experiment", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("address", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("batch", sa.Text(), nullable=False),
        sa.Column("task", sa.Text(), nullable=False),
        sa.Column("run", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("suffix", sa.Text(), nullable=False),
        sa.Column("int_keys", sa.Integer(), nullable=False),
        sa.Column("reward", sa.Float(precision=53), nullable=True),
        sa.Column("policy_version", sa.BigInteger(), nullable=True),
        sa.Column("prompt_length", sa.Integer(), nullable=False),
        sa.Column("length", sa.Integer(), nullable=False),
        sa.Column("trained_tokens", sa.Integer(), nullable=False),
        sa.Column("finish_reason", sa.Text(), nullable=True),
        sa.Column("refused", sa.Text(), nullable=True),
        sa.Column("segment", sa.LargeBinary(), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("experiment", "address", name=op.f("pk_experience")),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_plan_ordinal", "plan", ["experiment", "ordinal"], unique=False)
    op.create_index(
        "uq_experience_eid",
        "experience",
        ["experiment", "batch", "task", "run", "step", "suffix"],
        unique=True,
    )


def _create_consumer_and_waiting() -> None:
    op.create_table(
        "consumer",
        sa.Column("experiment", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("name", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("config", sa.Text(), nullable=False),
        sa.Column("cursor", sa.BigInteger(), nullable=False),
        sa.Column("calls", sa.BigInteger(), nullable=False),
        sa.Column("rejected_groups", sa.BigInteger(), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("leased_step", sa.BigInteger(), nullable=False),
        sa.Column("committed_step", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("kind IN ('strategy', 'trainer')", name=op.f("ck_consumer_kind")),
        sa.CheckConstraint(
            "committed_step <= leased_step", name=op.f("ck_consumer_committed_after_leased")
        ),
        sa.PrimaryKeyConstraint("experiment", "name", name=op.f("pk_consumer")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "waiting",
        sa.Column("experiment", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("consumer", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("address", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("experiment", "consumer", "address", name=op.f("pk_waiting")),
        sqlite_with_rowid=False,
    )


def _create_annotation_and_rejection() -> None:
    op.create_table(
        "annotation",
        sa.Column("experiment", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("consumer", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("address", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("experience", sa.BigInteger(), nullable=False),
        sa.Column("group_slot", sa.Integer(), nullable=False),
        sa.Column("planned", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("experiment", "consumer", "address", name=op.f("pk_annotation")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "rejection",
        sa.Column("experiment", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("consumer", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("address", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("experiment", "consumer", "address", name=op.f("pk_rejection")),
        sqlite_with_rowid=False,
    )
    op.create_index(
        "ix_annotation_experience",
        "annotation",
        ["experiment", "experience", "consumer"],
        unique=False,
    )


def _create_delivery_and_step() -> None:
    op.create_table(
        "delivery",
        sa.Column("experiment", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("consumer", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("source", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("address", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(
            "experiment", "consumer", "source", "address", name=op.f("pk_delivery")
        ),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "step",
        sa.Column("experiment", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("consumer", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("leased_at", sa.BigInteger(), nullable=False),
        sa.Column("rows", sa.Integer(), nullable=False),
        sa.Column("groups", sa.Integer(), nullable=False),
        sa.Column("planned_groups_so_far", sa.BigInteger(), nullable=False),
        sa.Column("manifest_digest", sa.LargeBinary(), nullable=False),
        sa.Column("committed_at", sa.BigInteger(), nullable=True),
        sa.Column("checkpoint", sa.Text(), nullable=True),
        sa.Column("checkpoint_digest", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("experiment", "consumer", "step", name=op.f("pk_step")),
        sqlite_with_rowid=False,
    )


def _create_policy_and_assigned_reward() -> None:
    op.create_table(
        "policy",
        sa.Column("experiment", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("position", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("uri", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("experiment", "position", name=op.f("pk_policy")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "assigned_reward",
        sa.Column("experiment", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("scoring", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("address", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("reward", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint(
            "experiment", "scoring", "address", name=op.f("pk_assigned_reward")
        ),
        sqlite_with_rowid=False,
    )


def _create_archived_and_lease() -> None:
    op.create_table(
        "archived",
        sa.Column("experiment", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("segment", sa.LargeBinary(), autoincrement=False, nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("uri", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("experiment", "segment", name=op.f("pk_archived")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "lease",
        sa.Column("experiment", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("consumer", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("experiment", "consumer", name=op.f("pk_lease")),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_archived_segment", "archived", ["segment"], unique=False)


TABLES = (
    "lease",
    "archived",
    "assigned_reward",
    "policy",
    "step",
    "delivery",
    "rejection",
    "annotation",
    "waiting",
    "consumer",
    "experience",
    "plan",
    "batch",
    "configuration",
    "segment",
    "event",
    "experiment",
)
FUNCTIONS = (
    "event_forbids_delete",
    "event_forbids_update",
    "experiment_forbids_delete",
    "experiment_forbids_update",
    "segment_forbids_delete",
    "segment_forbids_update",
)


def downgrade() -> None:
    """Drop everything, the experiences included."""
    for table in TABLES:
        op.drop_table(table)
    if op.get_bind().dialect.name == "postgresql":
        for function in FUNCTIONS:
            op.execute(sa.text(f"DROP FUNCTION {function}()"))
