"""The tables: every column, constraint and index; triggers are in `schema`.

Truth is `experiment`, `event` and `segment`; triggers keep it immutable. `lease` and `presence`
may be lost at any time. Everything else is a projection: written in the
transaction of its event, droppable, and equal row for row when the log is folded again.

An `address` is ``position * 2**20 + slot`` (see `rows.py`): the row of an event that an entry
talks about.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Boolean, Float, Integer, LargeBinary, Text, text
from sqlalchemy.schema import CheckConstraint, Column, Index, MetaData, SchemaItem, Table

SCHEMA_REVISION = "0004"
"""The alembic revision that equals these tables; a test holds them together."""

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    }
)


def _key(name: str, kind: type[Any] = BigInteger) -> Column[Any]:
    return Column(name, kind, primary_key=True, autoincrement=False)


def _required(kind: type[Any], *names: str) -> list[Column[Any]]:
    return [Column(name, kind, nullable=False) for name in names]


def _of_experiment(name: str, *items: SchemaItem) -> Table:
    """Return a table whose rows belong to an experiment, stored in the order of their key."""
    return Table(name, metadata, _key("experiment", Integer), *items, sqlite_with_rowid=False)


experiment = Table(
    "experiment",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    sqlite_autoincrement=True,
)

FREQUENT = frozenset({"ExperiencesRecorded", "ExperiencesAnnotated"})
NOT_FREQUENT = "kind NOT IN ('ExperiencesRecorded', 'ExperiencesAnnotated')"
"""What `ix_event_kind` holds. SQLite uses it where a statement says the same in these words."""

event = _of_experiment(
    "event",
    _key("position"),
    *_required(Text, "kind", "actor"),
    # microseconds since 1970, for people: order is `position`
    Column("recorded_at", BigInteger, nullable=False),
    Column("body", LargeBinary, nullable=False),
    # 32 bytes, see `log.head_of`; None before the `ChainStarted` of an older store
    Column("head", LargeBinary),
    CheckConstraint("position >= 1", name="position"),
    CheckConstraint("kind <> ''", name="kind"),
    # on PostgreSQL too it has this condition, see `schema.create`
    Index("ix_event_kind", "experiment", "kind", "position", sqlite_where=text(NOT_FREQUENT)),
)

# The key is random within its millisecond and not the position: on PostgreSQL the big rows are
# inserted before the experiment's lock is taken, when the position is not known yet.
segment = Table(
    "segment",
    metadata,
    _key("key", LargeBinary),
    _key("family", Text),
    _key("part", Integer),
    Column("checksum", BigInteger, nullable=False),
    Column("data", LargeBinary, nullable=False),
    CheckConstraint("part >= 0", name="part"),
)

configuration = _of_experiment(
    "configuration",
    Column("position", BigInteger, nullable=False),
    Column("config", Text, nullable=False),
    Column("finished", Boolean, nullable=False),
)

_NOT_SEALED = text("sealed_at IS NULL")

batch = _of_experiment(
    "batch",
    _key("batch", Text),
    Column("batch_is_int", Boolean, nullable=False),
    Column("actor", Text, nullable=False),
    Column("rollouts_per_group", Integer),  # None: the batch was never planned
    Column("planned_at", BigInteger),
    Column("sealed_at", BigInteger),
    Column("expected", BigInteger),
    Column("planned_groups", BigInteger),  # None: never planned
    # planned rollouts that are stored; None before the seal, until when it is counted when asked
    Column("stored_rollouts", BigInteger),
    # on PostgreSQL too, see `schema.create`
    Index("ix_batch_open", "experiment", "planned_at", "actor", sqlite_where=_NOT_SEALED),
)

plan = _of_experiment(
    "plan",
    _key("batch", Text),
    _key("task", Text),
    Column("task_is_int", Boolean, nullable=False),
    # 1, 2, ... over the experiment: the last one is their number
    Column("ordinal", BigInteger, nullable=False),
    Index("ix_plan_ordinal", "experiment", "ordinal"),
)

experience = _of_experiment(
    "experience",
    _key("address"),
    *_required(Text, "batch", "task"),
    *_required(Integer, "run", "step"),
    Column("suffix", Text, nullable=False),
    # 1: the batch id is a number, 2: the task id is one
    Column("int_keys", Integer, nullable=False),
    Column("reward", Float(53)),
    Column("policy_version", BigInteger),
    *_required(Integer, "prompt_length", "length", "trained_tokens"),
    Column("finish_reason", Text),
    Column("refused", Text),  # why no strategy will see it: late, invalid; None for all others
    *_required(LargeBinary, "segment", "digest"),
    Index("uq_experience_eid", "experiment", "batch", "task", "run", "step", "suffix", unique=True),
)

consumer = _of_experiment(
    "consumer",
    _key("name", Text),
    *_required(Text, "kind", "config"),
    # Of a strategy: the position up to which the log was seen, how often `add` was called, and how
    # many planned groups it left out as a whole.
    *_required(BigInteger, "cursor", "calls", "rejected_groups"),
    # Of a trainer: the highest fencing token, the last step handed out, and the last one committed
    # on the live line.
    *_required(BigInteger, "token", "leased_step", "committed_step"),
    CheckConstraint("kind IN ('strategy', 'trainer')", name="kind"),
    CheckConstraint("committed_step <= leased_step", name="committed_after_leased"),
)

waiting = _of_experiment("waiting", _key("consumer", Text), _key("address"))

annotation = _of_experiment(
    "annotation",
    _key("consumer", Text),
    _key("address"),
    Column("experience", BigInteger, nullable=False),
    # rows of one event with the same number are one group
    Column("group_slot", Integer, nullable=False),
    # False for copies, and for batches without a plan
    Column("planned", Boolean, nullable=False),
    Index("ix_annotation_experience", "experiment", "experience", "consumer"),
)

# Of a strategy, `address` is an experience's; of a trainer, an annotation's.
rejection = _of_experiment(
    "rejection",
    _key("consumer", Text),
    _key("address"),
    Column("reason", Text, nullable=False),
    Column("position", BigInteger, nullable=False),
)

# A delivery is committed when its step is at most the consumer's `committed_step`: a commit touches
# one row. `source` names the experiment that the address belongs to, "" for the consumer's own: a
# step may mix in the rows of an expert's. Which rows a step holds is asked of its event: an index
# by step would cost every lease a quarter of its time.
delivery = _of_experiment(
    "delivery",
    _key("consumer", Text),
    _key("source", Text),
    _key("address"),
    Column("step", BigInteger, nullable=False),
)

step = _of_experiment(
    "step",
    _key("consumer", Text),
    _key("step"),
    # of the event that says how it is served: its `BatchLeased`, or the last `StepDealt`
    Column("leased_at", BigInteger, nullable=False),
    *_required(Integer, "rows", "groups"),
    # of this and all earlier steps of the consumer
    Column("planned_groups_so_far", BigInteger, nullable=False),
    Column("manifest_digest", LargeBinary, nullable=False),
    Column("committed_at", BigInteger),  # None: not committed on the live line
    Column("checkpoint", Text),
    Column("checkpoint_digest", Text),
    # Of the last step of a commit: the digest of the chain of manifests up to it, and how many rows
    # of it each rank took, where that was recorded.
    Column("chain", LargeBinary),
    Column("rows_by_rank", Text),
    # of this and all earlier steps of the consumer, without those of an expert's experiment
    Column("own_rows_so_far", BigInteger),
)

policy = _of_experiment(
    "policy",
    _key("position"),
    Column("version", BigInteger, nullable=False),
    *_required(Text, "uri", "digest"),
)

# Rewards of a later scoring stand beside the recorded ones, under the name of the scoring.
assigned_reward = _of_experiment(
    "assigned_reward",
    _key("scoring", Text),
    _key("address"),
    Column("reward", Float(53), nullable=False),
)

# What is asked often and would have to be counted row by row; see `store.counters`.
counter = _of_experiment(
    "counter",
    _key("consumer", Text),  # "" for the experiment itself
    _key("key", Text),  # the state, or its digest where it is too long for an index
    Column("state", Text, nullable=False),
    Column("number", BigInteger, nullable=False),
)

# Segments that may leave, or have left, the database; the trigger on `segment` asks this table.
archived = _of_experiment(
    "archived",
    _key("segment", LargeBinary),
    Column("position", BigInteger, nullable=False),
    Column("uri", Text),  # of the Parquet file; None: deleted for good
    Index("ix_archived_segment", "segment"),
)

lease = _of_experiment(
    "lease",
    _key("consumer", Text),
    Column("owner", Text, nullable=False),
    *_required(BigInteger, "token", "expires_at"),  # the latter in microseconds since 1970
)

# Heartbeats of processes, so that a wait can name the one that would end it.
presence = _of_experiment(
    "presence",
    _key("role", Text),
    _key("name", Text),
    _key("host", Text),
    _key("pid"),
    *_required(BigInteger, "started_at", "last_seen"),  # microseconds since 1970
    Column("waiting_for", Text),  # None: it waits for nothing
)

PROJECTIONS = (
    configuration,
    batch,
    plan,
    experience,
    consumer,
    waiting,
    annotation,
    rejection,
    delivery,
    step,
    policy,
    assigned_reward,
    counter,
    archived,
)
