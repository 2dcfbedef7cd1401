"""The road from an empty database to the tables, and the refusal of any other state."""

from __future__ import annotations

from sqlalchemy import inspect as inspect_engine
from sqlalchemy import text

from trinity_buffer.errors import SchemaOutdatedError, SchemaTooNewError, UnknownStoreError
from trinity_buffer.store import guards, tables, views
from trinity_buffer.store.transaction import Transaction

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
    for statement in [*guards.statements(tx.dialect.name), *views.statements()]:
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
