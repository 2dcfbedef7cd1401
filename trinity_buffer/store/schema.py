"""The schema in a database: its triggers and views, how it is made, and whether it is still whole.

Triggers keep truth as it is: nothing of the log is changed, deleted or left unchained. Views have
speaking names, for people who ask in SQL; nothing in here reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy import inspect as inspect_engine
from sqlalchemy import select, text

from trinity_buffer.errors import SchemaOutdatedError, SchemaTooNewError, UnknownStoreError
from trinity_buffer.store import tables
from trinity_buffer.store.tables import metadata, segment
from trinity_buffer.store.transaction import Transaction

_APPEND_ONLY = "the log is append-only"
_ARCHIVE_FIRST = "archive it first (trinity-buffer compact)"
_NOT_ARCHIVED = "NOT EXISTS (SELECT 1 FROM archived WHERE archived.segment = OLD.key)"
_NEWER_SCHEMA = (
    "this store has schema 0002 or newer, which chains its events: "
    "pip install --upgrade trinity-buffer"
)


@dataclass(frozen=True, slots=True)
class Guard:
    """A trigger that makes an operation fail.

    Attributes:
        name: of the trigger, and on PostgreSQL of its function.
        condition: on which rows; empty: on all, and on a statement without rows too.
    """

    name: str
    table: str
    operation: str
    why: str
    condition: str = ""

    @property
    def message(self) -> str:
        """What whoever tries is told."""
        return f"{self.table}: {self.operation} is forbidden, {self.why}"

    def statements(self, dialect: str) -> list[str]:
        """Return the statements that create it on ``dialect``."""
        head = f"CREATE TRIGGER {self.name} BEFORE {self.operation} ON {self.table} "
        if dialect == "sqlite":
            when = f"WHEN {self.condition} " if self.condition else ""
            return [f"{head}{when}BEGIN SELECT RAISE(ABORT, '{self.message}'); END"]
        asks = "SELECT" in self.condition  # PostgreSQL's WHEN takes no query
        body, each = f"RAISE EXCEPTION '{self.message}';", "STATEMENT"
        if self.condition:
            each = "ROW" if asks else f"ROW WHEN ({self.condition})"
        if asks:
            body = f"IF {self.condition} THEN {body} END IF; RETURN OLD;"
        function = f"CREATE FUNCTION {self.name}() RETURNS trigger LANGUAGE plpgsql"
        return [
            f"{function} AS $$ BEGIN {body} END $$",
            f"{head}FOR EACH {each} EXECUTE FUNCTION {self.name}()",
        ]


def _forbids(table: str, operation: str, why: str = _APPEND_ONLY, condition: str = "") -> Guard:
    return Guard(f"{table}_forbids_{operation.lower()}", table, operation, why, condition)


def guards(dialect: str) -> list[Guard]:
    """Return the triggers of a store on ``dialect``.

    A segment may be deleted once an ``archived`` row names it: that row comes with the
    ``SegmentsArchived`` event, in the same transaction. SQLite has no TRUNCATE.
    """
    found = [
        _forbids(table, operation)
        for table in ("experiment", "event")
        for operation in ("UPDATE", "DELETE")
    ]
    found.append(_forbids("segment", "UPDATE"))
    found.append(_forbids("segment", "DELETE", _ARCHIVE_FIRST, _NOT_ARCHIVED))
    # A process of an older version, which opened the store before it was migrated, ends here.
    found.append(Guard("event_needs_head", "event", "INSERT", _NEWER_SCHEMA, "NEW.head IS NULL"))
    if dialect == "postgresql":
        found += [_forbids(table, "TRUNCATE") for table in ("experiment", "event", "segment")]
    return found


def _besides_tables(dialect: str) -> list[str]:
    """Return the statements that create triggers and views, and that store blobs as they are.

    PostgreSQL tries to compress every blob otherwise: 1.5 times the time of a write.
    """
    found = [statement for guard in guards(dialect) for statement in guard.statements(dialect)]
    external = "ALTER TABLE segment ALTER COLUMN data SET STORAGE EXTERNAL"
    found += [external] if dialect == "postgresql" else []
    return found + [view_created(name) for name in VIEWS]


_UID = "e.batch, e.task, e.run, e.step, e.suffix"
_OF_THE_ROW = "JOIN experience e ON e.experiment = a.experiment AND e.address = a.experience"
# An annotation's address names no set: asked for in each set, the primary key finds it.
_BY_ADDRESS = (
    "JOIN consumer s ON s.experiment = {row}.experiment AND s.kind = 'strategy' "
    "JOIN annotation a ON a.experiment = s.experiment AND a.consumer = s.name "
    "AND a.address = {row}.address"
)

VIEWS = {
    "rollouts": f"SELECT x.name AS experiment, {_UID}, e.reward, e.policy_version, "
    "e.prompt_length, e.length AS tokens, e.trained_tokens, e.finish_reason, e.refused, "
    "e.address >> 20 AS position FROM experience e JOIN experiment x ON x.id = e.experiment",
    "annotated_rollouts": f"SELECT x.name AS experiment, a.consumer AS annotation_set, {_UID}, "
    "e.reward, a.address >> 20 AS position FROM annotation a "
    f"JOIN experiment x ON x.id = a.experiment {_OF_THE_ROW}",
    "rejected_rollouts": f"SELECT x.name AS experiment, r.consumer AS rejected_by, r.reason, "
    f"{_UID}, e.reward, r.position FROM rejection r JOIN experiment x ON x.id = r.experiment "
    "JOIN consumer c ON c.experiment = r.experiment AND c.name = r.consumer "
    "AND c.kind = 'strategy' JOIN experience e ON e.experiment = r.experiment "
    "AND e.address = r.address UNION ALL "
    f"SELECT x.name, r.consumer, r.reason, {_UID}, e.reward, r.position FROM rejection r "
    "JOIN experiment x ON x.id = r.experiment "
    "JOIN consumer c ON c.experiment = r.experiment AND c.name = r.consumer "
    f"AND c.kind = 'trainer' {_BY_ADDRESS.format(row='r')} {_OF_THE_ROW}",
    "trained_rollouts": "SELECT x.name AS experiment, d.consumer AS trainer, "
    "d.step AS gradient_step, d.step <= c.committed_step AS committed, "
    f"a.consumer AS annotation_set, {_UID}, e.reward, e.policy_version "
    "FROM delivery d JOIN experiment x ON x.id = d.experiment "
    "JOIN consumer c ON c.experiment = d.experiment AND c.name = d.consumer "
    f"{_BY_ADDRESS.format(row='d')} {_OF_THE_ROW} WHERE d.source = ''",
    "gradient_steps": "SELECT x.name AS experiment, t.consumer AS trainer, t.step, "
    "h.recorded_at / 1000000.0 AS handed_out_at, k.recorded_at / 1000000.0 AS committed_at, "
    't."rows", t."groups", t.checkpoint, t.leased_at AS handed_out_position, '
    "t.committed_at AS committed_position FROM step t "
    "JOIN experiment x ON x.id = t.experiment "
    "JOIN event h ON h.experiment = t.experiment AND h.position = t.leased_at "
    "LEFT JOIN event k ON k.experiment = t.experiment AND k.position = t.committed_at",
}
"""Name -> what it shows; the same words on every backend. Times are seconds since 1970."""


def view_created(name: str) -> str:
    """Return the statement that creates a view."""
    return f"CREATE VIEW {name} AS {VIEWS[name]}"


KNOWN_REVISIONS = ("0001", "0002")
"""Revisions that can be migrated from, oldest first, up to `tables.SCHEMA_REVISION`."""

_CREATE_LOCK = 0x54425546


def inspect(tx: Transaction, name: str) -> bool:
    """Return whether the database holds a store of this version; False: it is empty.

    Raises:
        UnknownStoreError: it holds something else.
        SchemaOutdatedError: it holds a store of an older version.
        SchemaTooNewError: it holds a store of a newer version.
    """
    found = set(inspect_engine(tx.connection).get_table_names())
    if not found:
        return False
    if "alembic_version" not in found or "event" not in found:
        some = ", ".join(sorted(found)[:3])
        raise UnknownStoreError(
            f"{name} is not a Trinity Buffer store: it holds other tables ({some})"
        )
    revision = tx.execute(text("SELECT version_num FROM alembic_version")).scalar_one_or_none()
    if revision == tables.SCHEMA_REVISION:
        return True
    if revision in KNOWN_REVISIONS:
        raise SchemaOutdatedError(
            f"{name} was written by an older version (schema {revision}, this is "
            f"{tables.SCHEMA_REVISION}): "
            f"run `trinity-buffer migrate --store {name}`"
        )
    raise SchemaTooNewError(
        f"{name} was written by a newer version (schema {revision}, this is "
        f"{tables.SCHEMA_REVISION}): "
        "upgrade with `pip install --upgrade trinity-buffer`"
    )


def create(tx: Transaction, name: str) -> None:
    """Create tables and views, and stamp the revision; a no-op where another was quicker."""
    if tx.dialect.name == "postgresql":
        tx.execute(text(f"SELECT pg_advisory_xact_lock({_CREATE_LOCK})"))
    if inspect(tx, name):
        return
    tables.metadata.create_all(tx.connection)
    for statement in _besides_tables(tx.dialect.name):
        tx.connection.exec_driver_sql(statement)
    tx.execute(
        text(
            "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL, "
            "CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num))"
        )
    )
    tx.execute(
        text("INSERT INTO alembic_version VALUES (:revision)"), {"revision": tables.SCHEMA_REVISION}
    )


_DAMAGES_TOLD = 20
_TRIGGERS = {
    "sqlite": "SELECT name, sql FROM sqlite_master WHERE type = 'trigger'",
    "postgresql": (
        "SELECT tgname, pg_get_triggerdef(t.oid) || prosrc FROM pg_trigger t "
        "JOIN pg_proc p ON p.oid = tgfoid WHERE NOT tgisinternal AND tgenabled <> 'D'"
    ),
}


_VIEWS = {
    "sqlite": "SELECT name, sql FROM sqlite_master WHERE type = 'view'",
    "postgresql": "SELECT viewname, '' FROM pg_views WHERE schemaname = current_schema()",
}


def unsound(tx: Transaction) -> list[str]:
    """Return what is wrong with triggers, indexes and views."""
    return [*_lacking_guards(tx), *_lacking_indexes(tx), *_lacking_views(tx)]


def _lacking_views(tx: Transaction) -> Iterator[str]:
    """Yield views that are gone, and on SQLite, which keeps their words, those that are others."""
    dialect = tx.dialect.name
    found: dict[str, str] = dict(tuple(row) for row in tx.execute(text(_VIEWS[dialect])))
    for name in VIEWS:
        if found.get(name) != (view_created(name) if dialect == "sqlite" else ""):
            yield f"view {name} is gone or another: who asks it in SQL is told something else"


def _lacking_guards(tx: Transaction) -> Iterator[str]:
    dialect = tx.dialect.name
    found: dict[str, str] = dict(tuple(row) for row in tx.execute(text(_TRIGGERS[dialect])))
    for guard in guards(dialect):
        if guard.name not in found:
            yield f"trigger {guard.name} is gone or off: {guard.table} is not kept from change"
        elif not all(
            part.lower() in found[guard.name].lower() for part in (guard.message, guard.condition)
        ):
            yield f"trigger {guard.name} was replaced by {found[guard.name]}"


def _lacking_indexes(tx: Transaction) -> Iterator[str]:
    known = inspect_engine(tx.connection).get_multi_indexes(filter_names=list(metadata.tables))
    found = {
        index["name"]: (index["column_names"], bool(index["unique"]))
        for indexes in known.values()
        for index in indexes
    }
    for table in metadata.sorted_tables:
        for index in table.indexes:
            wanted = ([column.name for column in index.columns], bool(index.unique))
            if found.get(str(index.name)) != wanted:
                yield f"index {index.name} of {table.name} is gone or another"


def damaged_pages(tx: Transaction) -> list[str]:
    """Return what SQLite finds wrong in its file; of PostgreSQL nothing can be asked so."""
    if tx.dialect.name != "sqlite":
        return []
    rows = tx.rows(f"PRAGMA integrity_check({_DAMAGES_TOLD})", ())
    return [str(row[0]) for row in rows if row[0] != "ok"]


def segment_keys(tx: Transaction) -> set[bytes]:
    """Return the keys of all segments in the database, of whatever experiment."""
    rows = tx.execute(select(segment.c.key).distinct())
    return {bytes(key) for (key,) in rows}
