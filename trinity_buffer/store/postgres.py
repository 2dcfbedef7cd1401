"""PostgreSQL: whole functions over asyncpg, in greenlets that wait for the server.

Round trips are most of the time of a short transaction. So a transaction begins together with its
lock, its changes travel together, and its notification goes with its commit.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, Generic, TypeVar
from uuid import uuid4
from weakref import WeakSet

import anyio
from sqlalchemy import Connection, Table, create_engine, insert
from sqlalchemy.engine import URL, Engine
from sqlalchemy.event import listen
from sqlalchemy.exc import DBAPIError, IntegrityError, InvalidatePoolError
from sqlalchemy.util import greenlet_spawn
from typing_extensions import override

from trinity_buffer.errors import StoreError, StoreReplacedError, UnsafeStoreError
from trinity_buffer.lazy import extra
from trinity_buffer.limits import sizes
from trinity_buffer.store import log, postgres_connect, sqlite
from trinity_buffer.store.connection import POOLED, foreign_errors
from trinity_buffer.store.notify import CHANNEL
from trinity_buffer.store.postgres_connect import APPLICATION, Outage, close, passes_by
from trinity_buffer.store.tables import SCHEMA_REVISION
from trinity_buffer.store.transaction import Transaction, dialect_module, lock_experiment

T = TypeVar("T")

LOOKS_FOR_A_POOLER = 3
"""A pooler with few connections shows itself at the second look."""

KEPT_CONNECTIONS = 4
MORE_CONNECTIONS = 8


class PostgresTransaction(Transaction):
    """A transaction whose statements go to a server, past SQLAlchemy where it can be helped.

    Args:
        connection: in autocommit; no transaction may be open.
        begin: the statement that begins it, sent together with the first one; "" for a single
            statement that needs none.
    """

    def __init__(self, connection: Connection, begin: str) -> None:
        super().__init__(connection)
        self._adapted: Any = connection.connection.dbapi_connection
        self._begin = begin
        self._statements_left = 1 if not begin else None
        self._locked: set[int] = set()
        self._changes: dict[str, tuple[str, Sequence[Any]]] = {}
        self._news = ""
        self.in_doubt = False  # its commit was sent, and not answered

    @property
    @override
    def connection(self) -> Connection:
        """SQLAlchemy's connection inside the transaction, for DDL, inspection and migrations."""
        self._catch_up()
        return super().connection

    @override
    def fetch_all(self, sql: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Execute SQL of the driver's own style, and return all rows."""
        self._catch_up()
        return list(map(tuple, self._ask(lambda pg: pg.fetch(sql, *values))))

    @override
    def execute_later(self, table: str, sql: str, values: Sequence[Any]) -> None:
        """Queue a statement that changes ``table``, to be sent together with others.

        Statements that are sent as one see the same rows: only one of them may change a table.
        """
        if table in self._changes:
            self._catch_up()
        self._changes[table] = (sql, values)

    @override
    def insert_many(self, table: Table, rows: Sequence[tuple[Any, ...]]) -> None:
        """Insert ``rows``, each with all columns of ``table`` in their order."""
        if len(rows) == 1:
            self.execute_later(table.name, _insert(table), rows[0])
        elif rows:
            if not self._changes.keys().isdisjoint((table.name,)):
                self._catch_up()
            self._started()
            if len(rows) < sizes().rows_to_copy:
                self._ask(lambda pg: pg.executemany(_insert(table), rows))
            else:
                self._ask(lambda pg: pg.copy_records_to_table(table.name, records=rows))

    @override
    def lock(self, experiment: int) -> bool:
        """Take the lock, once for the transaction; return whether the schema is still ours."""
        if experiment in self._locked:
            return True
        if self._changes:
            self._catch_up()
        self._locked.add(experiment)
        took: str = self._tell(f"SELECT pg_advisory_xact_lock({_SPACE}, {experiment}); {_NEWER}")
        return took == "SELECT 0"  # so many rows has the answer to the last of them

    @override
    def announce(self) -> None:
        """Notify the other processes at the commit."""
        self._news = f"NOTIFY {CHANNEL}; "

    def commit(self) -> None:
        """Send queued statements, and commit.

        Raises:
            StoreError: an earlier error was ignored; nothing was written.
        """
        if self._changes:
            self._catch_up()
        if not self._is_open:
            return
        self.in_doubt = True
        ended = self._tell(f"{self._news}COMMIT")
        self.in_doubt = False
        if ended != "COMMIT":
            raise StoreError("the transaction had failed before its commit; nothing was written")

    def roll_back(self, why: BaseException) -> None:
        """End the transaction, if it began; a connection on which that fails is not used again."""
        if isinstance(why, OSError):  # nothing is to be heard over it any more
            self._lose()
        elif self._is_open and not self._adapted.driver_connection.is_closed():
            try:
                self._tell("ROLLBACK")
            except (DBAPIError, OSError):
                self._lose()

    def _lose(self) -> None:
        """Close the connection for good; calls that wait on it end."""
        self._adapted.driver_connection.terminate()
        self._connection.invalidate()

    @property
    def _is_open(self) -> bool:
        """Whether there is a transaction to be ended, or one to be made for its news."""
        return self._statements_left is None and bool(self._news or not self._begin)

    def _catch_up(self) -> None:
        """Begin, unless that is done, and send the queued changes."""
        if self._statements_left is not None:
            if not self._statements_left:
                raise RuntimeError("a function of `one_statement` executed a second one")
            self._statements_left -= 1
        self._started()
        if self._changes:
            changes, self._changes = list(self._changes.values()), {}
            sql = _together(tuple(sql for sql, _ in changes))
            values = [value for _, own in changes for value in own]
            self._ask(lambda pg: pg.fetch(sql, *values))

    def _started(self) -> None:
        if self._begin:
            self._tell("")

    def _tell(self, statements: str) -> str:
        """Execute statements without values in one round trip; return the status of the last."""
        begin, self._begin = self._begin, ""
        ended: str = self._ask(lambda pg: pg.execute(begin + statements))
        return ended

    def _ask(self, call: Callable[[Any], Awaitable[Any]]) -> Any:
        import asyncpg.exceptions  # noqa: PLC0415 - an optional extra; SQLite users do not have it

        try:
            return self._adapted.run_async(call)
        except asyncpg.exceptions.IntegrityConstraintViolationError as error:
            raise IntegrityError(str(error), None, error) from error
        except (
            asyncpg.PostgresError,
            asyncpg.InterfaceError,
            asyncpg.InternalClientError,
        ) as error:
            if passes_by(error) or self._adapted.driver_connection.is_closed():
                raise ConnectionError(f"the connection was lost: {error}") from error
            if getattr(error, "severity_en", "") in {"FATAL", "PANIC"}:
                self._connection.invalidate()  # the pool would lend it once more
            raise DBAPIError(str(error), None, error) from error


_SPACE = 7
"""Of the locks of experiments, among the advisory locks of a database."""

_NEWER = (
    f"SELECT 1 FROM alembic_version HAVING max(version_num) IS DISTINCT FROM '{SCHEMA_REVISION}'"  # noqa: S608 - ours
)
# The lock of an experiment needs READ COMMITTED: a transaction that waited for the lock must see
# what its holder committed, whatever the database's default is.
_WRITING = "BEGIN ISOLATION LEVEL READ COMMITTED; "
_READING = "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY; "


@cache
def _insert(table: Table) -> str:
    return str(insert(table).compile(dialect=dialect_module("postgresql").asyncpg.dialect()))


@cache
def _together(statements: tuple[str, ...]) -> str:
    """Return one statement that combines ``statements``; their values follow each other."""
    numbered, before = [], 0
    for sql in statements:
        places = {int(number) for number in _PLACE.findall(sql)}
        numbered.append(_PLACE.sub(lambda place: f"${int(place[1]) + before}", sql))  # noqa: B023 - used at once
        before += max(places, default=0)
    *before_last, last = numbered
    named = ", ".join(f"change{number} AS ({sql})" for number, sql in enumerate(before_last))
    return f"WITH {named} {last}" if before_last else last


_PLACE = re.compile(r"\$(\d+)")


class _Work(Generic[T]):
    """The function of a transaction, run once more where the connection was lost.

    If that was during its commit, the log is searched for its events first: nothing is written
    twice. What appends no event (a lease, a presence) writes the same again.
    """

    def __init__(self, f: Callable[[Transaction], T]) -> None:
        self._f = f
        self._done: T
        self._doubted: dict[int, tuple[int, bytes]] = {}

    def __call__(self, tx: Transaction) -> T:
        # The lock waits for the end of the transaction in doubt, which the server may not know of.
        for experiment in sorted(self._doubted):
            lock_experiment(tx, experiment)
        if any(log.holds(tx, key, *place) for key, place in self._doubted.items()):
            return self._done
        self._doubted = {}
        self._done = self._f(tx)
        return self._done

    def failed(self, tx: PostgresTransaction) -> None:
        if tx.in_doubt and not self._doubted:
            self._doubted = dict(tx.appended)


class Server:
    """Connections to one server, replaced when they are lost.

    Args:
        url: of the database, for asyncpg.
        name: of the database, for messages.
        outage: retries while the server is away.
        is_timed: False where a statement may take as long as it likes.
    """

    def __init__(self, url: URL, name: str, outage: Outage, *, is_timed: bool = True) -> None:
        self._url = url
        self._name = name
        self._outage = outage
        self._command_timeout_s = postgres_connect.COMMAND_TIMEOUT_S if is_timed else None
        self._ends: dict[int, tuple[int, bytes]] = {}  # the last events that were seen
        self._drivers = WeakSet[Any]()
        self._engine = self._new_engine()

    async def run(self, f: Callable[[Transaction], T], *, writes: bool) -> T:
        """Return ``f(tx)``, in a transaction of its own. A cancellation waits for its end.

        Where the connection is lost it is run once more, so that ``f`` keeps nothing to itself.
        """
        return await self._transacted(f, _WRITING if writes else _READING)

    async def run_alone(self, f: Callable[[Transaction], T]) -> T:
        """Return ``f(tx)``, which executes a single statement that reads."""
        return await self._transacted(f, "")

    async def run_once(self, f: Callable[[Transaction], T]) -> T:
        """Return ``f(tx)`` of a writing transaction, without trying again."""
        return await self._once(_Work(f), _WRITING)

    async def _transacted(self, f: Callable[[Transaction], T], begin: str) -> T:
        work = _Work(f)
        return await self._outage.outlived(lambda: self._once(work, begin))

    async def _once(self, work: _Work[T], begin: str) -> T:
        def transact() -> T:
            with self._engine.connect() as connection:
                tx = PostgresTransaction(connection, begin)
                try:
                    done = _transact(tx, work)
                except Exception:
                    work.failed(tx)
                    raise
                self._saw(tx)
                return done

        with foreign_errors(self._name), anyio.CancelScope(shield=True):
            done: T = await greenlet_spawn(transact)
        return done

    def _saw(self, tx: Transaction) -> None:
        for experiment, place in (*tx.seen.items(), *tx.appended.items()):
            if self._ends.get(experiment, (0, b""))[0] < place[0]:
                self._ends[experiment] = place

    @asynccontextmanager
    async def dedicated_connection(self) -> AsyncIterator[_Connected]:
        """Open one more connection; its temporary tables are its own."""
        # Not one of the pool: it may have prepared statements on tables that views hide here.
        connected = _Connected(self._new_engine())
        try:
            yield connected
        finally:
            await connected.close()

    async def require_suitable(self, name: str) -> str:
        """Return the server's version.

        Raises:
            UnsafeStoreError: the database does not store UTF-8, or a pooler hands out a server
                connection for a transaction only.
        """
        version, longest_lock_s = await greenlet_spawn(self._suitable, name)
        if self._command_timeout_s and self._command_timeout_s <= longest_lock_s:
            await self.close()
            self._command_timeout_s = 2 * longest_lock_s
            self._engine = self._new_engine()
        return version

    def _suitable(self, name: str) -> tuple[str, float]:
        """Return the version of the server, and its limit of a wait for a lock in seconds."""
        with self._engine.connect() as first, self._engine.connect() as other:
            for connection in (first, other):  # whose transactions keep what a pooler lends
                connection.execution_options(isolation_level="READ COMMITTED")
            about: Any = first.exec_driver_sql(_ABOUT).one()
            version, encoding, lock_ms = str(about[0]), str(about[1]), float(about[2])
            if encoding != "UTF8":
                raise UnsafeStoreError(
                    f"{name} stores texts as {encoding}, which cannot represent most of them: make "
                    "a database with CREATE DATABASE ... ENCODING 'UTF8' TEMPLATE template0"
                )
            mark = uuid4().hex
            first.exec_driver_sql(_SET_MARK, (mark,))
            first.commit()
            # A pooler of transactions gives the other connection, sooner or later, the server's
            # session of the first one; or the first gets another while the other keeps that.
            pooled = False
            for _ in range(LOOKS_FOR_A_POOLER):
                other.rollback()
                pooled = pooled or other.exec_driver_sql(_GET_MARK).scalar() == mark
            # Not asked where it is known: of one server connection, the other has it.
            if pooled or first.exec_driver_sql(_GET_MARK).scalar() != mark:
                raise UnsafeStoreError(f"{name} {POOLED}")
        return version, lock_ms / 1000

    async def close(self) -> None:
        """Close every connection; one that does not answer is left to its server."""
        async with anyio.create_task_group() as tasks:
            for driver in list(self._drivers):
                tasks.start_soon(close, driver)
        await greenlet_spawn(self._engine.dispose)

    def _new_engine(self) -> Engine:
        extra("asyncpg", "postgresql")
        timeout = {"command_timeout": self._command_timeout_s}
        # Transactions are begun and ended here, not by SQLAlchemy, which takes a trip for each.
        # Not `create_async_engine`, whose module loads the ORM: 60 ms at the start of each command.
        engine = create_engine(
            URL.create("postgresql+asyncpg"),
            pool_size=KEPT_CONNECTIONS,
            max_overflow=MORE_CONNECTIONS,
            pool_use_lifo=True,  # a statement is prepared on each connection that executes it
            isolation_level="AUTOCOMMIT",
            connect_args={
                **postgres_connect.arguments_of(self._url),
                **timeout,
                "async_creator_fn": postgres_connect.connect,
            },
        )
        listen(engine, "connect", self._set_up)
        listen(engine, "checkout", _replace_if_lost)
        return engine

    def _set_up(self, connection: Any, _record: object) -> None:
        """Make commits of a new connection durable, and limit its waits for locks.

        With ``synchronous_commit=off`` an acknowledged commit could be lost in a crash. A wait for
        a lock ends as soon as on SQLite, unless a limit is configured: by default it has none.

        Raises:
            StoreReplacedError: what was seen over another connection is not there any more.
        """
        # By a cursor of SQLAlchemy's: an error of asyncpg's own would pass all that knows its
        # errors.
        self._drivers.add(connection.driver_connection)
        cursor = connection.cursor()
        cursor.execute(SETTINGS, (str(sqlite.BUSY_TIMEOUT_MS),))
        lost = []
        if self._ends:
            rows = [(key, position, head.hex()) for key, (position, head) in self._ends.items()]
            cursor.execute(
                _LOST, tuple(list(map(str, column)) for column in zip(*rows, strict=True))
            )
            lost = cursor.fetchall()
        connection.commit()
        if lost:
            connection.driver_connection.terminate()
            name, position, end = lost[0]
            raise StoreReplacedError(
                f"{self._name}: the log of experiment {name!r} has lost its event at position "
                f"{position}, which was acknowledged to this process; it ends at {end} now. The "
                "server was replaced by one that lacks it (a failover, or an older backup): end "
                "every process of the run, bring that server back, or go on from what is there by "
                "starting them again"
            )


class _Connected:
    """One connection for one transaction after the other, and an engine that has no other."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._connection: Connection | None = None
        self._lock = anyio.Lock(fast_acquire=True)

    async def run(self, f: Callable[[Transaction], T], *, writes: bool) -> T:
        """Return ``f(tx)``, in a transaction of its own. A cancellation waits for its end."""

        def transact() -> T:
            if self._connection is None:
                self._connection = self._engine.connect()
            if self._connection.invalidated:  # it would connect anew, and have nothing temporary
                raise ConnectionError("the connection was lost: try again")
            tx = PostgresTransaction(self._connection, _WRITING if writes else _READING)
            return _transact(tx, f)

        with anyio.CancelScope(shield=True):
            async with self._lock:
                done: T = await greenlet_spawn(transact)
        return done

    async def close(self) -> None:
        """Close the connection, and with it all that is temporary there."""

        def close() -> None:
            if self._connection is not None:
                self._connection.close()
            self._engine.dispose()

        with anyio.CancelScope(shield=True):
            await greenlet_spawn(close)


def _transact(tx: PostgresTransaction, f: Callable[[Transaction], T]) -> T:
    try:
        done = f(tx)
        tx.commit()
    except BaseException as error:
        tx.roll_back(error)
        raise
    return done


def _replace_if_lost(connection: Any, _record: object, _proxy: object) -> None:
    """Let the pool replace a connection that was lost while idle, and all older ones."""
    if connection.driver_connection.is_closed():
        raise InvalidatePoolError


SETTINGS = (
    "SELECT set_config('synchronous_commit', CASE found WHEN 'off' THEN 'on' ELSE found END, false)"
    ", set_config('lock_timeout', CASE waits WHEN '0' THEN $1 ELSE waits END, false)"
    # The locks of a process whose host is gone, or that was stopped in a transaction, are free
    # soon: a transaction sends one statement after the other.
    ", set_config('tcp_keepalives_idle', '10', false)"
    ", set_config('tcp_keepalives_interval', '5', false)"
    ", set_config('tcp_keepalives_count', '4', false)"
    ", set_config('idle_in_transaction_session_timeout', '20s', false)"
    " FROM current_setting('synchronous_commit') AS found, current_setting('lock_timeout') AS waits"
)
"""Settings of each new connection; ``$1``: its timeout of locks in milliseconds."""
_LOST = (
    "SELECT (SELECT name FROM experiment WHERE id = seen.of), seen.at, "
    "(SELECT coalesce(max(position), 0) FROM event WHERE experiment = seen.of) "
    "FROM unnest($1::text[]::bigint[], $2::text[]::bigint[], $3::text[]) AS seen(of, at, head), "
    "LATERAL (SELECT (SELECT encode(head, 'hex') FROM event "
    "WHERE experiment = seen.of AND position = seen.at) AS head) AS here "
    "WHERE here.head IS DISTINCT FROM seen.head "
    # A standby that is read may be behind the one that was read before.
    "AND NOT (here.head IS NULL AND pg_is_in_recovery())"
)
_ABOUT = (
    "SELECT current_setting('server_version'), current_setting('server_encoding'), "
    "(SELECT setting FROM pg_settings WHERE name = 'lock_timeout')"  # in milliseconds
)
_SET_MARK = "SELECT set_config('trinity_buffer.session', $1, false)"
_GET_MARK = "SELECT current_setting('trinity_buffer.session', true)"


def others(tx: Transaction) -> list[str]:
    """Return the other processes that have this database open, old versions without name too."""
    rows = tx.fetch_all(_OTHERS, ())
    return sorted({str(row[0]) or "a process of an older version" for row in rows} - {APPLICATION})


_OTHERS = (
    "SELECT application_name FROM pg_stat_activity WHERE datname = current_database() "
    "AND backend_type = 'client backend' AND pid <> pg_backend_pid() "
    "AND (application_name = '' OR application_name LIKE 'trinity-buffer%')"
)
