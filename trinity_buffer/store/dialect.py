"""The few places in which SQLite and PostgreSQL are written differently."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Table,
    Text,
    bindparam,
    cast,
    func,
    literal,
    select,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite

from trinity_buffer.errors import SchemaTooNewError
from trinity_buffer.store.tables import SCHEMA_REVISION
from trinity_buffer.store.transaction import Transaction


def among(
    tx: Transaction, column: ColumnElement[Any], values: Iterable[int | str]
) -> ColumnElement[bool]:
    """Return ``column IN (values)`` with one bound parameter, however many values there are."""
    listed = list(values)
    if tx.dialect.name == "sqlite":
        return column.in_(select(func.json_each(json.dumps(listed)).table_valued("value").c.value))
    kind = Text() if listed and isinstance(listed[0], str) else BigInteger()
    return column == func.any(cast(literal(listed, postgresql.ARRAY(kind)), postgresql.ARRAY(kind)))


def among_given(dialect: str, column: ColumnElement[Any], name: str) -> ColumnElement[bool]:
    """Return `among` for a statement that is kept: ``name`` is bound to what `given` returns."""
    if dialect == "sqlite":
        each = func.json_each(bindparam(name, type_=Text())).table_valued("value")
        return column.in_(select(each.c.value))
    kind = postgresql.ARRAY(Text() if isinstance(column.type, Text) else BigInteger())
    return column == func.any(cast(bindparam(name, type_=kind), kind))


def given(tx: Transaction, values: Iterable[int | str]) -> Any:
    """Return what a statement made with `among_given` takes for ``values``."""
    listed = list(values)
    return json.dumps(listed) if tx.dialect.name == "sqlite" else listed


def upsert(tx: Transaction, table: Table) -> Any:
    """Return an ``INSERT`` that has ``on_conflict_do_update`` and ``on_conflict_do_nothing``."""
    return sqlite.insert(table) if tx.dialect.name == "sqlite" else postgresql.insert(table)


def lock_experiment(tx: Transaction, experiment: int) -> None:
    """Let this transaction be the only one that appends to ``experiment`` until it ends.

    A position given out under the lock is committed before the next one is given out, so a reader
    that has seen a position has seen every lower one. On SQLite, ``BEGIN IMMEDIATE`` has done it
    already.

    Raises:
        SchemaTooNewError: the store was migrated since it was opened here. On SQLite every
            transaction looks for itself.
    """
    if not tx.lock(experiment):
        revision = tx.execute(_REVISION).scalar()
        raise SchemaTooNewError(
            f"the store was migrated to schema {revision} while it was open here (this is "
            f"{SCHEMA_REVISION}): upgrade with `pip install --upgrade trinity-buffer`"
        )


_REVISION = text("SELECT max(version_num) FROM alembic_version")
