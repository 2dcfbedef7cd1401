"""A store in memory, in which a process goes through its work before there is any.

What a process does for the first time takes some ten times as long: modules are imported,
statements compiled, and libraries allocate what they keep. Nothing of that depends on the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy.engine import URL

from trinity_buffer.store import schema
from trinity_buffer.store.access import StoreFiles
from trinity_buffer.store.database import Database
from trinity_buffer.store.sqlite import dbapi2
from trinity_buffer.store.sqlite_seats import SQLiteTransaction
from trinity_buffer.store.transaction import SegmentParts, Transaction

P = ParamSpec("P")
T = TypeVar("T")

_URL = URL.create("sqlite", database="/:memory:")  # absolute: the folder of the process may be gone


class Scratch:
    """A session of the store.

    Attributes:
        database: stands for the store where one is named, and keeps its segments; never opened.
    """

    def __init__(self, database: Database, tx: SQLiteTransaction) -> None:
        self.database = database
        self._tx = tx

    def read(
        self, f: Callable[Concatenate[Transaction, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return ``f(tx, ...)``, as any session does."""
        return self._tx.run(lambda tx: f(tx, *args, **kwargs), writes=False)

    def write(
        self, f: Callable[Concatenate[Transaction, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return ``f(tx, ...)``, as any session does."""
        return self._tx.run(lambda tx: f(tx, *args, **kwargs), writes=True)

    def compute(self, f: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return ``f(...)``."""
        return f(*args, **kwargs)

    def segments(self, keys: Sequence[bytes], families: Sequence[str]) -> SegmentParts:
        """Return the parts of some segments."""
        return self.database.segments.get(self, keys, families)


@contextmanager
def scratch() -> Iterator[Scratch]:
    """Yield a session of an empty store, which ends with the context. Computes: not on the loop."""
    database = Database(_URL, read_only=False, durability="normal")
    driver = dbapi2.connect(":memory:", isolation_level=None, cached_statements=256)
    tx = SQLiteTransaction(driver, StoreFiles(database.path, with_log=False))
    try:
        found = Scratch(database, tx)
        found.write(schema.create, database.name)
        yield found
    finally:
        tx.close()
