"""A throw-away database of projections, in which a log is folded again beside the live ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from trinity_buffer.errors import StoreError
from trinity_buffer.events import PlacedFact
from trinity_buffer.store import fold, sqlite, tables
from trinity_buffer.store.access import StoreFiles
from trinity_buffer.store.sqlite import dbapi2
from trinity_buffer.store.sqlite_seats import SQLiteTransaction
from trinity_buffer.store.transaction import Transaction

P = ParamSpec("P")
T = TypeVar("T")

# Nothing here outlives the process: no journal, no fsync, and one connection that keeps the file to
# itself.
_PRAGMAS = (
    "PRAGMA main.journal_mode=OFF",
    "PRAGMA main.synchronous=OFF",
    "PRAGMA main.locking_mode=EXCLUSIVE",
    "PRAGMA main.cache_size=-32768",
    "PRAGMA temp_store=MEMORY",
)


@dataclass(frozen=True, slots=True)
class Unfoldable:
    """The event that the fold could not apply, and why."""

    position: int
    kind: str
    cause: str


class Scratch:
    """Projections of one experiment, folded from its log alone. Made by `open_scratch`.

    Attributes:
        experiment: key of the experiment in its own store, and here.
        position: the last event that was folded.
        sees_live: whether the live projections are attached, as the schema ``live``.
    """

    def __init__(self, tx: SQLiteTransaction, experiment: int, *, sees_live: bool) -> None:
        self._tx = tx
        self.experiment = experiment
        self.position = 0
        self.sees_live = sees_live

    def ask(
        self,
        f: Callable[Concatenate[Transaction, P], T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Return what a function of `store` says of these projections. Not on an event loop."""
        # A transaction of its own: an attached store must not be held in one state for long.
        return self._tx.run(lambda tx: f(tx, *args, **kwargs), writes=False)

    def fold(self, events: Sequence[PlacedFact]) -> Unfoldable | None:
        """Apply ``events``, which follow `position`; return the first that cannot be applied.

        After that one the scratch is of no more use. Not on an event loop.
        """
        return self.ask(self._fold, events)

    def _fold(self, tx: Transaction, events: Sequence[PlacedFact]) -> Unfoldable | None:
        stored = 0
        for new in events:
            try:
                stored += fold.fold_rows(tx, self.experiment, new)
            except _CANNOT_FOLD as error:
                cause = " ".join(str(getattr(error, "orig", error)).split())
                return Unfoldable(new.position, new.kind, f"{type(error).__name__}: {cause}")
            self.position = new.position
        # No fold reads a counter, so a page needs but one statement for all of them.
        fold.fold_counters(tx, self.experiment, events, stored)
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


@contextmanager
def open_scratch(experiment: int, live: Path | None = None) -> Iterator[Scratch]:
    """Open empty projections for ``experiment`` in a temporary SQLite file.

    Args:
        live: file of a SQLite store, to be read beside them.
    """
    sqlite.require_safe_library()
    with TemporaryDirectory(prefix="trinity-buffer-") as folder:
        path = Path(folder) / "scratch.db"
        tx = SQLiteTransaction(_connected(path, live), StoreFiles(path, with_log=False))
        with closing(tx):
            tx.run(_create, writes=True)
            yield Scratch(tx, experiment, sees_live=live is not None)


def _create(tx: Transaction) -> None:
    tables.metadata.create_all(tx.connection, tables=list(tables.PROJECTIONS))
    for index in _NEEDLESS:
        tx.rows(f"DROP INDEX {index}", ())


# What no fold asks for, and every fold would keep up to date.
_NEEDLESS = ("ix_annotation_experience", "ix_archived_segment")


def _connected(path: Path, live: Path | None) -> Any:
    driver = dbapi2.connect(
        f"file:{path}?mode=rwc", uri=True, isolation_level=None, check_same_thread=False
    )
    for statement in _PRAGMAS:
        driver.execute(statement)
    if live is not None:
        driver.execute("ATTACH ? AS live", (sqlite.uri_of(live),))
    return driver
