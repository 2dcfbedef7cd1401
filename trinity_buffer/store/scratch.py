"""A throw-away database of projections, in which a log is folded again beside the live ones."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Concatenate, ParamSpec, TypeVar, cast
from urllib.parse import quote

import anyio
import anyio.to_thread
from pysqlite3 import dbapi2
from sqlalchemy import Connection, create_engine
from sqlalchemy import event as listen_to
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from trinity_buffer.errors import StoreError
from trinity_buffer.store import projections, sqlite, tables

P = ParamSpec("P")
T = TypeVar("T")

# Nothing here outlives the process: no journal, no fsync, and one connection that keeps the file to
# itself.
_PRAGMAS = (
    "PRAGMA main.journal_mode=OFF",
    "PRAGMA main.synchronous=OFF",
    "PRAGMA main.locking_mode=EXCLUSIVE",
    "PRAGMA main.cache_size=-262144",
    "PRAGMA temp_store=MEMORY",
)


@dataclass(frozen=True, slots=True)
class DecodedEvent:
    """An event with its body as it is written today."""

    position: int
    kind: str
    actor: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Unfoldable:
    """The event that the fold could not apply, and why."""

    position: int
    kind: str
    cause: str


class _Inline:
    """A plain connection in the form of an `AsyncConnection`, of which folds and reads use this.

    Nothing is ever awaited, so a whole page of events is folded in one go, in one thread: with the
    asynchronous driver each of its statements would change threads four times.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.dialect = connection.dialect

    async def execute(self, statement: Any, parameters: Any = None) -> Any:
        return self._connection.execute(statement, parameters)

    async def exec_driver_sql(self, statement: str, parameters: Any = None) -> Any:
        return self._connection.exec_driver_sql(statement, parameters)


class Scratch:
    """Projections of one experiment, folded from its log alone. Made by `open_scratch`.

    Attributes:
        experiment: key of the experiment in its own store, and here.
        position: the last event that was folded.
        sees_live: whether the live projections are attached, as the schema ``live``.
    """

    def __init__(self, connection: Connection, experiment: int, *, sees_live: bool) -> None:
        self._connection = connection
        self._tx = cast(AsyncConnection, _Inline(connection))
        self.experiment = experiment
        self.position = 0
        self.sees_live = sees_live

    async def ask(
        self,
        function: Callable[Concatenate[AsyncConnection, P], Awaitable[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Return what a function of `store` says of these projections."""
        return await anyio.to_thread.run_sync(
            partial(self._to_its_end, function(self._tx, *args, **kwargs))
        )

    async def fold(self, events: Sequence[DecodedEvent]) -> Unfoldable | None:
        """Apply ``events``, which follow `position`; return the first that cannot be applied.

        After that one the scratch is of no more use.
        """
        return await anyio.to_thread.run_sync(partial(self._to_its_end, self._fold(events)))

    def _to_its_end(self, work: Awaitable[T]) -> T:
        """Return the result of a coroutine that waits for nothing.

        The transaction ends with it: an attached store must not be held in one state for long.
        """
        try:
            cast(Coroutine[Any, Any, T], work).send(None)
        except StopIteration as end:
            return cast(T, end.value)
        finally:
            self._connection.commit()
        raise AssertionError("a function of the store waited for something else than its database")

    async def _fold(self, events: Sequence[DecodedEvent]) -> Unfoldable | None:
        tx, experiment = self._tx, self.experiment
        for new in events:
            try:
                await projections.fold(tx, experiment, new.position, new.kind, new.body, new.actor)
            except _CANNOT_FOLD as error:
                cause = " ".join(str(getattr(error, "orig", error)).split())
                return Unfoldable(new.position, new.kind, f"{type(error).__name__}: {cause}")
            self.position = new.position
        return None


# What a body of the wrong form makes of a fold, and what contradicts the events before it.
_CANNOT_FOLD = (
    SQLAlchemyError,
    dbapi2.Error,
    StoreError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    OverflowError,
)


@asynccontextmanager
async def open_scratch(experiment: int, live: Path | None = None) -> AsyncIterator[Scratch]:
    """Open empty projections for ``experiment`` in a temporary SQLite file.

    Args:
        live: file of a SQLite store, to be read beside them.
    """
    sqlite.require_safe_library()
    with TemporaryDirectory(prefix="trinity-buffer-") as folder:
        engine = create_engine(
            f"sqlite:///file:{Path(folder) / 'scratch.db'}?mode=rwc&uri=true",
            module=dbapi2,
            connect_args={"isolation_level": None, "check_same_thread": False},
        )
        listen_to.listen(engine, "connect", partial(_connected, live))
        listen_to.listen(engine, "begin", _begin)
        try:
            with engine.connect() as connection:
                tables.metadata.create_all(connection, tables=list(tables.PROJECTIONS))
                for index in _NEEDLESS:
                    connection.exec_driver_sql(f"DROP INDEX {index}")
                connection.commit()
                yield Scratch(connection, experiment, sees_live=live is not None)
        finally:
            engine.dispose()


# What no fold asks for, and every fold would keep up to date.
_NEEDLESS = ("ix_annotation_experience", "ix_archived_segment")


def _connected(live: Path | None, connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    for statement in _PRAGMAS:
        cursor.execute(statement)
    if live is not None:
        cursor.execute("ATTACH ? AS live", (f"file:{quote(str(live.resolve()))}?mode=ro",))
    cursor.close()


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN")
