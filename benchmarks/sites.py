"""Where the stores of a benchmark live, and the raw limit there."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from typing_extensions import override

from benchmarks import bare, bare_postgresql
from benchmarks.bare import Transaction
from tests.postgres import PostgresServer


class Site(ABC):
    """One backend: new stores on it, and the same work without us."""

    backend: str

    def __init__(self) -> None:
        self._numbers = count()

    @abstractmethod
    def new_url(self) -> str:
        """Return the URL of a store that does not exist yet."""

    @abstractmethod
    def drop(self, url: str) -> None:
        """Remove a store."""

    @abstractmethod
    def written(self, url: str, kind: str, projection: str) -> list[Transaction]:
        """Return what each event of ``kind`` wrote."""

    @abstractmethod
    def time_writes(self, url: str, transactions: Sequence[Transaction]) -> float:
        """Return the seconds for ``transactions`` in a new database with the schema of ``url``."""

    @abstractmethod
    def time_reads(
        self, url: str, batches: Sequence[Sequence[bytes]], families: Sequence[str]
    ) -> float:
        """Return the seconds in which the bytes of the segments are read."""


class SQLiteSite(Site):
    """Files in a folder."""

    backend = "sqlite"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    @override
    def new_url(self) -> str:
        """Return a file in a folder of its own."""
        folder = self._folder / f"ours-{next(self._numbers)}"
        folder.mkdir()
        return f"sqlite:///{folder / 'ours.db'}"

    def path(self, url: str) -> Path:
        """Return the file of a store."""
        return Path(url.removeprefix("sqlite:///"))

    @override
    def drop(self, url: str) -> None:
        """Remove the file and its log."""
        shutil.rmtree(self.path(url).parent)

    @override
    def written(self, url: str, kind: str, projection: str) -> list[Transaction]:
        """Return what each event of ``kind`` wrote."""
        return bare.written(self.path(url), kind, projection)

    @override
    def time_writes(
        self,
        url: str,
        transactions: Sequence[Transaction],
        before: Callable[[int], None] = lambda _: None,
    ) -> float:
        """Return the seconds of bare inserts, and of ``before``, see `bare.time_writes`."""
        folder = self._folder / f"bare-{next(self._numbers)}"
        return bare.time_writes(folder, bare.schema_of(self.path(url)), transactions, before)

    @override
    def time_reads(
        self, url: str, batches: Sequence[Sequence[bytes]], families: Sequence[str]
    ) -> float:
        """Return the seconds of bare selects."""
        return bare.time_reads(self.path(url), batches, families)


class PostgresSite(Site):
    """Databases of a server that was started for this run, with the settings it comes with."""

    backend = "postgresql"

    def __init__(self, server: PostgresServer) -> None:
        super().__init__()
        self._server = server

    @override
    def new_url(self) -> str:
        """Return a new, empty database."""
        return self._server.create_database(f"bench_{next(self._numbers)}")

    @override
    def drop(self, url: str) -> None:
        """Drop the database."""
        self._server.drop_database(url.partition("@/")[2].partition("?")[0])

    @override
    def written(self, url: str, kind: str, projection: str) -> list[Transaction]:
        """Return what each event of ``kind`` wrote."""
        return bare_postgresql.written(url, kind, projection)

    @override
    def time_writes(self, url: str, transactions: Sequence[Transaction]) -> float:
        """Return the seconds of the same transactions through bare psycopg."""
        other = self.new_url()
        try:
            return bare_postgresql.time_writes(other, transactions)
        finally:
            self.drop(other)

    @override
    def time_reads(
        self, url: str, batches: Sequence[Sequence[bytes]], families: Sequence[str]
    ) -> float:
        """Return the seconds of bare selects."""
        return bare_postgresql.time_reads(url, batches, families)


@contextmanager
def site(backend: str, folder: Path) -> Iterator[Site]:
    """Open the place for the stores of one backend; ``folder`` is for SQLite's files."""
    if backend == "sqlite":
        yield SQLiteSite(folder)
    else:
        with PostgresServer() as server:
            yield PostgresSite(server)
