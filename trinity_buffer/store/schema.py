"""The schema in a database: triggers, views, how it is created, and checks that it is intact.

Triggers protect the log: no event is changed, deleted or left unchained. Views are for people who
query in SQL; the package itself reads none of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import CheckConstraint
from sqlalchemy import inspect as inspect_engine
from sqlalchemy.schema import CreateIndex, CreateTable

from trinity_buffer.errors import SchemaOutdatedError, SchemaTooNewError, UnknownStoreError
from trinity_buffer.store import tables
from trinity_buffer.store.tables import metadata
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

    def statements(self, dialect: str) -> list[str]:
        """Return the statements that create it on ``dialect``."""
        head = f"CREATE TRIGGER {self.name} BEFORE {self.operation} ON {self.table} "
        message = f"{self.table}: {self.operation} is forbidden, {self.why}"
        if dialect == "sqlite":
            when = f"WHEN {self.condition} " if self.condition else ""
            return [f"{head}{when}BEGIN SELECT RAISE(ABORT, '{message}'); END"]
        asks = "SELECT" in self.condition  # PostgreSQL's WHEN takes no query
        body, each = f"RAISE EXCEPTION '{message}';", "STATEMENT"
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
    triggers = [
        _forbids(table, operation)
        for table in ("experiment", "event")
        for operation in ("UPDATE", "DELETE")
    ]
    triggers.append(_forbids("segment", "UPDATE"))
    triggers.append(_forbids("segment", "DELETE", _ARCHIVE_FIRST, _NOT_ARCHIVED))
    # A process of an older version, which opened the store before it was migrated, ends here.
    triggers.append(Guard("event_needs_head", "event", "INSERT", _NEWER_SCHEMA, "NEW.head IS NULL"))
    if dialect == "postgresql":
        triggers += [_forbids(table, "TRUNCATE") for table in ("experiment", "event", "segment")]
    return triggers


_UID = "e.batch, e.task, e.run, e.step, e.suffix"
_OF_THE_ROW = "JOIN experience e ON e.experiment = a.experiment AND e.address = a.experience"
# An annotation's address names no set: asked for in each set, the primary key finds it. The CROSS
# JOIN tells SQLite to look at annotations last; left alone it walks all of them for each row.
_IN_EACH_SET = (
    "JOIN consumer s ON s.experiment = {row}.experiment AND s.kind = 'strategy' "
    "CROSS JOIN annotation a"
)
_BY_ADDRESS = "a.experiment = s.experiment AND a.consumer = s.name AND a.address = {row}.address"

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
    f"AND c.kind = 'trainer' {_IN_EACH_SET.format(row='r')} {_OF_THE_ROW} "
    f"WHERE {_BY_ADDRESS.format(row='r')}",
    "trained_rollouts": "SELECT x.name AS experiment, d.consumer AS trainer, "
    "d.step AS gradient_step, d.step <= c.committed_step AS committed, "
    f"a.consumer AS annotation_set, {_UID}, e.reward, e.policy_version "
    "FROM delivery d JOIN experiment x ON x.id = d.experiment "
    "JOIN consumer c ON c.experiment = d.experiment AND c.name = d.consumer "
    f"{_IN_EACH_SET.format(row='d')} {_OF_THE_ROW} "
    f"WHERE d.source = '' AND {_BY_ADDRESS.format(row='d')}",
    "gradient_steps": "SELECT x.name AS experiment, t.consumer AS trainer, t.step, "
    "h.recorded_at / 1000000.0 AS handed_out_at, k.recorded_at / 1000000.0 AS committed_at, "
    't."rows", t."groups", t.checkpoint, t.leased_at AS handed_out_position, '
    "t.committed_at AS committed_position FROM step t "
    "JOIN experiment x ON x.id = t.experiment "
    "JOIN event h ON h.experiment = t.experiment AND h.position = t.leased_at "
    "LEFT JOIN event k ON k.experiment = t.experiment AND k.position = t.committed_at",
}
"""Name -> what it shows; the same words on every backend. Times are seconds since 1970."""


KNOWN_REVISIONS = ("0001", "0002", "0003", "0004")
"""Revisions that can be migrated from, oldest first, up to `tables.SCHEMA_REVISION`."""

_CREATE_LOCK = 0x54425546
_REVISION_TABLE = (
    "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL, "
    "CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num))"
)


def revision_of(tx: Transaction, name: str) -> str:
    """Return the revision of the schema; "" for an empty database.

    Raises:
        UnknownStoreError: it holds something else, or a store that names no revision, or several.
        SchemaTooNewError: it holds a store of a newer version.
    """
    names = set(inspect_engine(tx.connection).get_table_names())
    if not names:
        return ""
    if not names.issuperset({"alembic_version", "event"}):
        examples = ", ".join(sorted(names)[:3])
        raise UnknownStoreError(
            f"{name} is not a Trinity Buffer store: it holds other tables ({examples})"
        )
    revisions = [str(row[0]) for row in tx.fetch_all("SELECT version_num FROM alembic_version", ())]
    if len(revisions) != 1:
        raise UnknownStoreError(
            f"{name} is damaged: its table alembic_version names "
            f"{', '.join(sorted(revisions)) or 'none'}, where it must name one schema: put a copy "
            "back"
        )
    if revisions[0] not in KNOWN_REVISIONS:
        raise SchemaTooNewError(
            f"{name} was written by a newer version (schema {revisions[0]}, this is "
            f"{tables.SCHEMA_REVISION}): upgrade with `pip install --upgrade trinity-buffer`"
        )
    return revisions[0]


_OTHER_STORE = (
    "SELECT nspname, current_user, current_schema() FROM pg_class "
    "JOIN pg_namespace n ON n.oid = relnamespace "
    "WHERE relname IN ('event', 'segment', 'experience', 'alembic_version') AND relkind = 'r' "
    "AND (SELECT source IN ('default', 'configuration file') FROM pg_settings "
    "WHERE pg_settings.name = 'search_path') GROUP BY nspname HAVING count(*) = 4 LIMIT 1"
)
"""Finds a store outside the default search path; no row if the path was set on purpose."""


def inspect(tx: Transaction, name: str) -> bool:
    """Return whether the database holds a store of this version; False: it is empty.

    Raises:
        UnknownStoreError: it holds something else, or a store in another schema. A role makes its
            tables in a schema of its own name, if there is one: explorers and trainers of two roles
            would then have a store each, and wait for each other for ever.
        SchemaOutdatedError: it holds a store of an older version.
        SchemaTooNewError: it holds a store of a newer version.
    """
    revision = revision_of(tx, name)
    if revision not in ("", tables.SCHEMA_REVISION):
        raise SchemaOutdatedError(
            f"{name} was written by an older version (schema {revision}, this is "
            f"{tables.SCHEMA_REVISION}): run `trinity-buffer migrate --store {name}`"
        )
    look_elsewhere = not revision and tx.dialect.name == "postgresql"
    for where, role, own in tx.fetch_all(_OTHER_STORE, ()) if look_elsewhere else ():
        raise UnknownStoreError(
            f"{name} holds a store in the schema {where!r}, not on the search path of the role "
            f"{role!r}: "
            f'ALTER ROLE "{role}" SET search_path = "{where}", or "{own}" if it is to have a '
            "second one"
        )
    return bool(revision)


def create(tx: Transaction, name: str) -> None:
    """Create tables and views, and stamp the revision, unless another process did."""
    is_server = tx.dialect.name == "postgresql"
    if is_server:
        tx.fetch_all(f"SELECT pg_advisory_xact_lock({_CREATE_LOCK})", ())
        # Said in `tables`, it would load SQLAlchemy's drivers of PostgreSQL for SQLite too.
        for index in (*tables.event.indexes, *tables.batch.indexes):
            index.kwargs["postgresql_where"] = index.kwargs["sqlite_where"]
    if inspect(tx, name):
        return
    statements = [statement for _, made, _ in _objects(tx) for statement in made]
    if is_server:  # it tries to compress every blob otherwise: 1.5 times the time of a write
        statements.append("ALTER TABLE segment ALTER COLUMN data SET STORAGE EXTERNAL")
    statements.append(f"INSERT INTO alembic_version VALUES ('{tables.SCHEMA_REVISION}')")
    for statement in statements:
        tx.fetch_all(statement, ())


def _objects(tx: Transaction) -> Iterator[tuple[str, list[str], str]]:
    """Yield name, statements and problem if missing of all that a store has, in order."""
    dialect, gone = tx.dialect, "table {} is missing or was changed"
    for table in metadata.sorted_tables:
        made = str(CreateTable(table).compile(dialect=dialect))
        yield table.name, [made], gone.format(table.name)
        for index in table.indexes:
            made = str(CreateIndex(index).compile(dialect=dialect))
            yield str(index.name), [made], _INDEX_GONE.format(index=index)
    yield "alembic_version", [_REVISION_TABLE], gone.format("alembic_version")
    for guard in guards(dialect.name):
        yield guard.name, guard.statements(dialect.name), _GUARD_GONE.format(guard=guard)
    for name, shown in VIEWS.items():
        yield name, [f"CREATE VIEW {name} AS {shown}"], _VIEW_GONE.format(name=name)


def unsound(tx: Transaction) -> list[str]:
    """Return the problems of tables, triggers, indexes and views."""
    if tx.dialect.name == "sqlite":
        return [*_other_words(tx), *_foreign(tx, _FOREIGN_ON_SQLITE)]
    other = list(_other_tables(tx))
    views = () if other else _lacking_views(tx)  # which cannot be planned on other tables
    problems = [*other, *_lacking_guards(tx), *_lacking_indexes(tx), *views]
    return [*problems, *_foreign(tx, _FOREIGN_ON_POSTGRESQL)]


_FOREIGN_ON_SQLITE = "SELECT 'trigger', name, tbl_name FROM sqlite_master WHERE type = 'trigger'"
_FOREIGN_ON_POSTGRESQL = (
    "SELECT 'trigger', tgname, relname FROM pg_trigger t JOIN pg_class c ON c.oid = tgrelid "
    "WHERE NOT tgisinternal AND relnamespace = current_schema()::regnamespace "
    "UNION ALL SELECT 'rule', rulename, tablename FROM pg_rules "
    "WHERE schemaname = current_schema() "
    "UNION ALL SELECT 'row security', '', relname FROM pg_class "
    "WHERE relrowsecurity AND relnamespace = current_schema()::regnamespace"
)


def _foreign(tx: Transaction, query: str) -> Iterator[str]:
    """Yield foreign triggers and rules on our tables: they may drop or change what is written."""
    ours = {guard.name for guard in guards(tx.dialect.name)}
    for kind, name, table in tx.fetch_all(query, ()):
        if table in metadata.tables and name not in ours:
            what = "was not created by trinity-buffer and may alter or drop writes: remove it"
            yield f"{f'{kind} {name}'.strip()} on {table} {what}"


_GUARD_GONE = (
    "trigger {guard.name} is missing or disabled: {guard.table} is not protected from changes"
)
_INDEX_GONE = "index {index.name} of {index.table.name} is missing or was changed"
_VIEW_GONE = "view {name} is missing or was changed: SQL queries on it return wrong results"


def _other_words(tx: Transaction) -> Iterator[str]:
    """Yield objects of a SQLite file whose stored statement differs from ours."""
    rows = tx.fetch_all("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL", ())
    stored = {str(name): str(sql) for name, sql in rows}
    for name, (made, *_), gone in _objects(tx):
        if name not in stored:
            yield gone
        elif clauses_of(stored[name]) != clauses_of(made):
            yield f"{gone}; found: {stored[name]}"


def clauses_of(sql: str) -> tuple[str, ...]:
    """Split a CREATE TABLE at its commas, and sort: a migration appends new columns.

    Columns follow once more, in their order. Spaces and quotes do not count.
    """
    flat = re.sub(r"\s+", " ", sql.strip()).replace('"', "").replace("( ", "(").replace(" )", ")")
    head, _, rest = flat.partition("(")
    if not head.upper().startswith("CREATE TABLE"):
        return (flat,)
    body, _, tail = rest.rpartition(")")
    parts, depth = [""], 0
    for character in body:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    parts = [part.strip() for part in parts]
    columns = [part for part in parts if not part.startswith(_CONSTRAINTS)]
    return (head.strip(), *sorted(parts), *columns, tail.strip())


_CONSTRAINTS = ("CONSTRAINT", "PRIMARY KEY", "UNIQUE", "CHECK", "FOREIGN")


def _other_tables(tx: Transaction) -> Iterator[str]:
    """Yield tables with other columns or checks; PostgreSQL does not keep their statements."""
    known, names = inspect_engine(tx.connection), list(metadata.tables)
    columns = known.get_multi_columns(filter_names=names)
    checks = known.get_multi_check_constraints(filter_names=names)
    for table in metadata.sorted_tables:
        key = (None, table.name)
        there = {(str(c["name"]), bool(c["nullable"])) for c in columns.get(key, [])}
        there |= {(str(check["name"]), False) for check in checks.get(key, [])}
        wanted = {(c.name, bool(c.nullable)) for c in table.columns}
        rules = (c for c in table.constraints if isinstance(c, CheckConstraint))
        wanted |= {(str(rule.name), False) for rule in rules}
        if there != wanted:
            differ = ", ".join(sorted({name for name, _ in there ^ wanted}))
            yield f"table {table.name} is missing or was changed: compare {differ}"


_TRIGGERS = (
    "SELECT tgname, pg_get_triggerdef(t.oid), prosrc FROM pg_trigger t "
    "JOIN pg_proc p ON p.oid = tgfoid WHERE NOT tgisinternal AND tgenabled IN ('O', 'A')"
)


def _lacking_guards(tx: Transaction) -> Iterator[str]:
    triggers = {name: (made, body) for name, made, body in tx.fetch_all(_TRIGGERS, ())}
    for guard in guards("postgresql"):
        function, made = guard.statements("postgresql")
        there, body = triggers.get(guard.name, ("", ""))
        if not there:
            yield _GUARD_GONE.format(guard=guard)
        elif body != function.split("$$")[1] or _plain(there, guard) != _plain(made, guard):
            yield f"{_GUARD_GONE.format(guard=guard)}; found: {there} {body}"


def _plain(made: str, guard: Guard) -> str:
    """Return the statement of a trigger without what PostgreSQL adds: brackets and schemas."""
    bare = re.sub(r"[()]", "", made).lower()
    return re.sub(rf"\b\w+\.({guard.table}|{guard.name})\b", r"\1", bare)


def _lacking_indexes(tx: Transaction) -> Iterator[str]:
    known = inspect_engine(tx.connection).get_multi_indexes(filter_names=list(metadata.tables))
    stored = {
        index["name"]: (
            index["column_names"],
            bool(index["unique"]),
            bool(index.get("dialect_options", {}).get("postgresql_where")),
        )
        for indexes in known.values()
        for index in indexes
    }
    for table in metadata.sorted_tables:
        for index in table.indexes:
            is_partial = index.dialect_options["sqlite"]["where"] is not None
            wanted = ([column.name for column in index.columns], bool(index.unique), is_partial)
            if stored.get(str(index.name)) != wanted:
                yield _INDEX_GONE.format(index=index)


def _lacking_views(tx: Transaction) -> Iterator[str]:
    """Yield views that are missing, or that the server plans otherwise than ours."""
    names = inspect_engine(tx.connection).get_view_names()
    for name, words in sorted(VIEWS.items()):
        if name not in names or _plan(tx, name) != _plan(tx, f"({words})"):
            yield _VIEW_GONE.format(name=name)


def _plan(tx: Transaction, source: str) -> list[tuple[Any, ...]]:
    return tx.fetch_all(f"EXPLAIN (VERBOSE, COSTS OFF) SELECT * FROM {source} AS shown", ())


_DAMAGES_TOLD = 20


def damaged_pages(tx: Transaction) -> list[str]:
    """Return the problems that SQLite finds in its file; PostgreSQL has no such check."""
    if tx.dialect.name != "sqlite":
        return []
    rows = tx.fetch_all(f"PRAGMA integrity_check({_DAMAGES_TOLD})", ())
    return [str(row[0]) for row in rows if row[0] != "ok"]
