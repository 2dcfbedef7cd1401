"""A second fold of a log in a scratch database, and how the live projections compare with it.

Rows are read as the driver gives them: a million rows twice are a few seconds this way, and how a
damaged value is stored is seen. The folded side sets the limits of each span, as its keys can be
trusted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ParamSpec, TypeVar

from sqlalchemy import Boolean, Integer, Table
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from sqlalchemy.schema import CreateIndex, CreateTable
from typing_extensions import override

from trinity_buffer.errors import StoreError
from trinity_buffer.events import PlacedFact
from trinity_buffer.limits import sizes
from trinity_buffer.store import fold, sqlite, tables
from trinity_buffer.store.connection import SQLiteTransaction
from trinity_buffer.store.rows import format_address
from trinity_buffer.store.sqlite import StoreFiles, dbapi2
from trinity_buffer.store.tables import PROJECTIONS, archived, experience, plan
from trinity_buffer.store.transaction import InTransaction, Statement, Transaction

Row = tuple[Any, ...]

_TABLES: Mapping[str, Table] = {table.name: table for table in PROJECTIONS}

# Tables that are read in spans by another number than the last one of their key.
_NUMBER_OF = {plan.name: "ordinal", archived.name: "position"}
STATEFUL = frozenset({"configuration", "batch", "consumer", "counter", "waiting", "step"})
"""Tables whose rows the fold makes of other rows, so that one error may make others."""


@cache
def _order_of(name: str) -> tuple[tuple[str, ...], str]:
    """Return by which columns the rows of a table are apart, and by which number then in order.

    An empty name: the table is small, or has no such number, and is read as a whole.
    """
    if name in _NUMBER_OF:
        return (), _NUMBER_OF[name]
    _, *keys = _TABLES[name].primary_key
    if not keys or not isinstance(keys[-1].type, Integer):
        return (), ""
    return tuple(column.name for column in keys[:-1]), keys[-1].name


@dataclass(frozen=True, slots=True)
class Span:
    """A range of one projection: ``after`` < number <= ``up_to``, of one owner if it has any.

    None is no limit; tables without a number are one span. The owner is all of the key before the
    number, such as a trainer and a source: a span over several sources would scan all deliveries
    of the trainer each time.
    """

    table: str
    owner: tuple[str, ...] = ()
    after: int | None = None
    up_to: int | None = None

    @property
    def whole(self) -> Span:
        """The same without limits."""
        return replace(self, after=None, up_to=None)


@dataclass(frozen=True, slots=True)
class Difference:
    """A row that differs from the log.

    Attributes:
        table: name of the projection.
        key: its primary key, without the experiment.
        live, folded: the whole row as column -> value; None if it is missing.
    """

    table: str
    key: Mapping[str, Any]
    live: Mapping[str, Any] | None
    folded: Mapping[str, Any] | None

    @override
    def __str__(self) -> str:
        key = ", ".join(f"{name}={_shown(name, value)}" for name, value in self.key.items())
        if self.table == experience.name:
            row = self.folded or self.live or {}
            uid = "/".join(str(row[name]) for name in ("batch", "task", "run", "step", "suffix"))
            key = f"{key}, uid={uid!r}"
        if self.live is None:
            return f"{self.table}({key}) is missing"
        if self.folded is None:
            return f"{self.table}({key}) is there, but no event made it"
        changed = "; ".join(
            f"{name} is {_shown(name, value)}, the log says {_shown(name, self.folded[name])}"
            for name, value in self.live.items()
            if value != self.folded[name]
        )
        return f"{self.table}({key}): {changed}"


def _shown(column: str, value: Any) -> str:
    if column in ("address", "experience") and isinstance(value, int):
        return format_address(value)
    return value.hex() if isinstance(value, bytes) else repr(value)


def _fetch(tx: Transaction, experiment: int, span: Span, sql: str, **values: object) -> list[Row]:
    """Execute ``sql``, in which ``{table}``, ``{columns}`` and ``{span}`` are those of ``span``."""
    owner, number = _order_of(span.table)
    wanted = ["experiment = :of", *(f'"{name}" = :owner{n}' for n, name in enumerate(owner))]
    wanted += [f'"{number}" > :after'] if span.after is not None else []
    wanted += [f'"{number}" <= :up_to'] if span.up_to is not None else []
    columns = ", ".join(f'"{column.name}"' for column in _TABLES[span.table].c)
    values |= {f"owner{n}": name for n, name in enumerate(span.owner)}
    values |= {"of": experiment, "after": span.after, "up_to": span.up_to}
    named = {"table": f'"{span.table}"', "number": f'"{number}"', "span": " AND ".join(wanted)}
    return Statement(sql.format(columns=columns, **named)).fetch_all(tx, **values)


def spans(tx: Transaction, experiment: int) -> list[Span]:
    """Return the unlimited spans that together cover all projections."""
    whole = []
    for name in _TABLES:
        owner, _ = _order_of(name)
        if not owner:
            whole.append(Span(name))
            continue
        query = f"SELECT DISTINCT {', '.join(owner)} FROM {name} WHERE experiment = :of"
        owners = Statement(query).fetch_all(tx, of=experiment)
        whole += [Span(name, owner) for owner in sorted(owners, key=repr)]
    return whole


def next_limit(folded: Transaction, experiment: int, span: Span) -> int | None:
    """Return where to cut ``span`` so that `rows_per_span` folded rows lie before; None: no cut."""
    if not _order_of(span.table)[1]:
        return None
    sql = "SELECT {number} FROM {table} WHERE {span} ORDER BY {number} LIMIT 1 OFFSET :before"
    limit = _fetch(folded, experiment, span, sql, before=sizes.rows_per_span - 1)
    return int(limit[0][0]) if limit else None


def rows_of(tx: Transaction, experiment: int, span: Span) -> list[Row]:
    """Return the rows of ``span`` in one order on every backend."""
    rows = "SELECT {columns} FROM {table} WHERE {span}"
    if _order_of(span.table)[1]:
        return _fetch(tx, experiment, span, rows + " ORDER BY {number}")
    # Texts are sorted here: a PostgreSQL may have a collation of its own. By what they look like: a
    # damaged key may be of another type.
    key = len(_TABLES[span.table].primary_key)
    return sorted(_fetch(tx, experiment, span, rows), key=lambda row: repr(row[:key]))


def differences(span: Span, live: Sequence[Row], folded: Sequence[Row]) -> list[Difference]:
    """Return the rows that differ; computes nothing where all are equal."""
    if live == folded:
        return []
    table = _TABLES[span.table]
    key, names = len(table.primary_key), [column.name for column in table.c]
    # SQLite stores NaN as NULL, and PostgreSQL as it is; NaN alone differs from itself.
    here, there = (
        {
            row[:key]: {n: v if v == v else None for n, v in zip(names, row, strict=True)}  # noqa: PLR0124
            for row in rows
        }
        for rows in (live, folded)
    )
    return [
        Difference(
            table.name, dict(zip(names[1:key], at[1:], strict=True)), here.get(at), there.get(at)
        )
        for at in there | here
        if here.get(at) != there.get(at)
    ]


def mend(tx: Transaction, wrong: Iterable[Difference]) -> None:
    """Replace live rows by the folded ones."""
    missing: dict[str, list[Row]] = {}
    for difference in wrong:
        table = _TABLES[difference.table]
        if (live := difference.live) is not None:
            keys = {f"key{n}": live[column.name] for n, column in enumerate(table.primary_key)}
            same = " AND ".join(f"{c.name} = :key{n}" for n, c in enumerate(table.primary_key))
            Statement(f"DELETE FROM {table.name} WHERE {same}").execute_later(tx, **keys)
        if (folded := difference.folded) is not None:
            # The scratch is SQLite's, which knows no booleans.
            booleans = {column.name for column in table.c if isinstance(column.type, Boolean)}
            row = (bool(v) if name in booleans else v for name, v in folded.items())
            # Inserted when all wrong rows are gone: a changed key may be that of another row.
            missing.setdefault(table.name, []).append(tuple(row))
    for name, rows in missing.items():
        tx.insert_many(_TABLES[name], rows)


def counts(tx: Transaction, experiment: int) -> dict[str, int]:
    """Return how many rows each projection has."""
    counting = "SELECT count(*) FROM {} WHERE experiment = :of"
    return {n: Statement(counting.format(n)).value(tx, of=experiment) for n in _TABLES}


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


class UnfoldableError(StoreError):
    """An event that contradicts those before it: the fold could not apply it.

    Attributes:
        position, kind: of the event.
        cause: why.
    """

    def __init__(self, position: int, kind: str, cause: str) -> None:
        super().__init__(
            f"event {position} ({kind}) cannot be folded: {cause}; run `trinity-buffer verify` and "
            "restore the store from a backup"
        )
        self.position, self.kind, self.cause = position, kind, cause


class Scratch:
    """Projections of one experiment, folded from its log alone. Made by `open_scratch`.

    Attributes:
        experiment: key of the experiment in its own store, and here.
        position: the last event that was folded.
    """

    def __init__(self, tx: SQLiteTransaction, experiment: int) -> None:
        self._tx = tx
        self.experiment = experiment
        self.position = 0
        self._contradiction: UnfoldableError | None = None

    def ask(self, f: InTransaction[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of ``f`` on these projections. Not on an event loop."""
        return self._tx.run(f, args, kwargs, writes=False)

    def fold(self, events: Sequence[PlacedFact]) -> None:
        """Apply ``events``, which follow `position`. Not on an event loop.

        Raises:
            UnfoldableError: one cannot be applied, now or before.
        """
        if self._contradiction is not None:
            raise self._contradiction
        self.ask(self._fold, events)

    def _fold(self, tx: Transaction, events: Sequence[PlacedFact]) -> None:
        stored = 0
        for new in events:
            try:
                stored += fold.fold_rows(tx, self.experiment, new)
            except _DISK_ERRORS:
                raise  # of the scratch, and not of the log
            except CANNOT_FOLD as error:
                self._contradiction = UnfoldableError(new.position, new.kind, _cause(error))
                raise self._contradiction from error
            self.position = new.position
        # No fold reads a counter, so a page needs but one statement for all of them.
        fold.count(tx, self.experiment, events, stored)


# What a body of the wrong form makes of a fold, and what contradicts the events before it.
CANNOT_FOLD = (
    SQLAlchemyError,
    dbapi2.Error,
    StoreError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    OverflowError,
)
_DISK_ERRORS = (OperationalError, dbapi2.OperationalError)


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(getattr(error, 'orig', error)).split())}"


@contextmanager
def open_scratch(experiment: int) -> Iterator[Scratch]:
    """Open empty projections for ``experiment`` in a temporary SQLite file.

    Raises:
        StoreError: the folder of temporary files is full.
    """
    sqlite.require_safe_library()
    with TemporaryDirectory(prefix="trinity-buffer-") as folder:
        path = Path(folder) / "scratch.db"
        driver = dbapi2.connect(
            f"file:{path}?mode=rwc", uri=True, isolation_level=None, check_same_thread=False
        )
        tx = SQLiteTransaction(driver, StoreFiles(path, with_log=False))
        try:
            with closing(tx):
                for statement in _PRAGMAS:
                    driver.execute(statement)
                tx.run(_make_tables, ("TABLE", _NEEDLESS), {}, writes=True)
                yield Scratch(tx, experiment)
        except _DISK_ERRORS as error:
            raise StoreError(
                f"the log cannot be folded in {path.parent.parent} ({_cause(error)}): free space "
                "there, or let TMPDIR name another folder"
            ) from error


def _make_tables(tx: Transaction, kind: str, without: Collection[str] = ()) -> None:
    """Make empty projections, ``kind`` of tables, with their indexes but some."""
    for table in tables.PROJECTIONS:
        made = str(CreateTable(table).compile(dialect=tx.dialect))
        tx.fetch_all(made.replace("TABLE", kind, 1), ())
        for index in table.indexes:
            if index.name not in without:
                tx.fetch_all(str(CreateIndex(index).compile(dialect=tx.dialect)), ())


# What no fold asks for, and every fold would keep up to date.
_NEEDLESS = ("ix_annotation_experience", "ix_archived_segment")


def make_temporary_tables(tx: Transaction) -> None:
    """Make empty projections that hide the live ones, on a dedicated connection."""
    if tx.dialect.name == "sqlite":
        tx.fetch_all("PRAGMA query_only=OFF", ())  # the file itself is open read-only, or is ours
        # In memory, the projections of a long run would take hundreds of megabytes.
        tx.fetch_all("PRAGMA temp_store=FILE", ())
        tx.fetch_all("PRAGMA temp.cache_size=-32768", ())
    else:
        # Whatever the path was: what is temporary must come first, or the fold would write into
        # the live tables.
        ((live,),) = tx.fetch_all(_SCHEMA, ())
        tx.fetch_all("SELECT set_config('search_path', $1, false)", (f"pg_temp, {live}",))
    _make_tables(tx, "TEMPORARY TABLE")


_SCHEMA = (
    "SELECT quote_ident(nspname) FROM pg_namespace JOIN pg_class ON relnamespace = pg_namespace.oid"
    " WHERE pg_class.oid = 'experience'::regclass"
)
