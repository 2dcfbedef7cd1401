"""The errors of SQLAlchemy and of the drivers, as ours."""

from __future__ import annotations

from typing import Any

from pysqlite3 import dbapi2
from sqlalchemy.exc import DBAPIError, IntegrityError

from trinity_buffer.errors import (
    ReadOnlyStoreError,
    StoreBusyError,
    StoreError,
    UnknownStoreError,
)
from trinity_buffer.store import sqlite
from trinity_buffer.store.transaction import TakenKeyError


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
    if "database is locked" in lowered or "database is busy" in lowered:
        return StoreBusyError(
            f"{name}: another process held the database for over "
            f"{sqlite.BUSY_TIMEOUT_MS // 1000} s; "
            "`trinity-buffer stats` shows what is at work"
        )
    if "readonly database" in lowered or "read-only transaction" in lowered:
        return ReadOnlyStoreError(f"{name} cannot be written: {cause}")
    if "not a database" in lowered or "file is encrypted" in lowered:
        return UnknownStoreError(f"{name} is not a Trinity Buffer store, nor a SQLite database")
    if "no space left" in lowered or ("full" in lowered and "disk" in lowered):
        return StoreError(f"{name}: the disk is full; nothing of this transaction was written")
    return StoreError(f"{name}: {cause}")
