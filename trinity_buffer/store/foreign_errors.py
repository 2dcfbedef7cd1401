"""The errors of SQLAlchemy and of the drivers, as ours."""

from __future__ import annotations

from typing import Any

from sqlalchemy.exc import DBAPIError, IntegrityError

from trinity_buffer.errors import (
    ReadOnlyStoreError,
    StoreBusyError,
    StoreError,
    UnknownStoreError,
    UnsafeStoreError,
)
from trinity_buffer.store import sqlite
from trinity_buffer.store.sqlite_library import dbapi2
from trinity_buffer.store.transaction import TakenKeyError

POOLED = (
    "is behind a pooler (PgBouncer) that lends a server connection for one transaction: prepared "
    "statements and news of changes do not survive that. Connect to PostgreSQL itself, or set "
    "pool_mode = session"
)


class foreign_errors:  # noqa: N801 - read as a statement: `with foreign_errors(name)`
    """Turn the database's errors into ours, the most specific first."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if isinstance(error, (DBAPIError, dbapi2.Error)):
            raise _translate(error, self.name) from error
        if isinstance(error, (ConnectionError, OSError)) and not isinstance(error, TimeoutError):
            raise StoreError(f"{self.name}: cannot reach the database: {error}") from error


def _translate(error: Exception, name: str) -> Exception:
    cause = " ".join(str(getattr(error, "orig", error)).split())
    if isinstance(error, (IntegrityError, dbapi2.IntegrityError)):
        return TakenKeyError(f"{name}: {cause}")
    lowered = cause.lower()
    for words, kind, what in _MEANINGS:
        if any(word in lowered for word in words):
            return kind(what.format(name=name, cause=cause, busy_s=sqlite.BUSY_TIMEOUT_MS // 1000))
    return StoreError(f"{name}: {cause}")


_MEANINGS: tuple[tuple[tuple[str, ...], type[StoreError], str], ...] = (
    (
        ("database is locked", "database is busy"),
        StoreBusyError,
        "{name}: another process held the database for over {busy_s} s; "
        "`trinity-buffer stats` shows what is at work",
    ),
    (
        ("readonly database", "read-only transaction"),
        ReadOnlyStoreError,
        "{name} cannot be written: {cause}",
    ),
    (
        ("not a database", "file is encrypted"),
        UnknownStoreError,
        "{name} is not a Trinity Buffer store, nor a SQLite database",
    ),
    (
        ("prepared statement", "statement pooling mode"),
        UnsafeStoreError,
        "{name} " + POOLED + " ({cause})",
    ),
    (
        ("no space left", "disk is full", "disk full"),
        StoreError,
        "{name}: the disk is full; nothing of this transaction was written",
    ),
)
