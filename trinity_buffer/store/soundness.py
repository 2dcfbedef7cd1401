"""Is the database itself as it was made: its triggers, indexes, views, and on SQLite its pages?"""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import inspect, select, text

from trinity_buffer.store.guards import guards
from trinity_buffer.store.tables import metadata, segment
from trinity_buffer.store.transaction import Transaction
from trinity_buffer.store.views import VIEWS, created

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
        if found.get(name) != (created(name) if dialect == "sqlite" else ""):
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
    known = inspect(tx.connection).get_multi_indexes(filter_names=list(metadata.tables))
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
