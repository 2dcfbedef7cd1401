"""PostgreSQL by psycopg: connections, transactions, and what becomes of both when it is away.

A whole function runs in a thread, as on SQLite. Round trips are most of the time of a short
transaction. So a transaction begins together with its first statement, what it changes waits for
what it asks next, and the last changes travel with the notification and the commit.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial
from threading import Event, Timer
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

import anyio
import anyio.from_thread
import anyio.to_thread
from sqlalchemy import Connection, Table
from sqlalchemy.engine import URL, Engine
from sqlalchemy.exc import DBAPIError, IntegrityError
from typing_extensions import override

from trinity_buffer import errors
from trinity_buffer.lazy import extra
from trinity_buffer.limits import sizes
from trinity_buffer.store import log, sqlite, transaction
from trinity_buffer.store.tables import SCHEMA_REVISION

if TYPE_CHECKING:
    import psycopg

T = TypeVar("T")

_logger = logging.getLogger(__name__)


# What ends a pipeline or a COPY is raised as an error of ours: psycopg's line about what followed
# from it would say it twice.
logging.getLogger("psycopg").addFilter(
    lambda record: not str(record.msg).startswith("error ignored terminating")
)

CHANNEL = "trinity_buffer"
"""On which commits are announced."""

CONNECT_TIMEOUT_S = 10
"""Of a host that takes a connection and does not answer."""

COMMAND_TIMEOUT_S = 40.0
"""Of a statement that is not answered: longer than any wait for a lock."""

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0

LOOKS_FOR_A_POOLER = 3
"""A pooler with few connections shows itself at the second look."""

KEPT_CONNECTIONS = 4
MORE_CONNECTIONS = 8

_PASSING = frozenset({"57P01", "57P02", "57P03", "57P05", "25P03", "25P04", "53300"})
"""SQLSTATE of a shutdown, a start, a connection that was idle for too long, and of too many."""

# What a server answers to a client that it will not take later either. libpq passes on no code of
# such an answer, only its words. A connection that ends as TLS begins is no refusal.
_NEVER = re.compile(
    "authentication|password|pg_hba|does not exist|permission|not permitted|certificate"
    "|SSL(?! SYSCALL error| error: unexpected eof| connection has been closed)"
)


def passes_by(error: object) -> bool:
    """Return whether an error says that the server is not there, or ended the connection."""
    state = str(getattr(error, "sqlstate", None) or "")
    return isinstance(error, OSError) or state[:2] == "08" or state in _PASSING


def connect(url: URL) -> psycopg.Connection[Any]:
    """Return a new connection in autocommit to the first host of ``url`` that takes it.

    Raises:
        ConnectionError: none is there, or none is what was asked for (``target_session_attrs``).
    """
    library = extra("psycopg", "postgresql")
    types = extra("psycopg.types", "postgresql")
    query = {key: value for key, value in url.query.items() if key != "reconnect_s"}
    arguments = url.get_dialect()().create_connect_args(url.set(query=query))[1]
    arguments.pop("context", None)
    try:
        driver: psycopg.Connection[Any] = library.connect(
            **arguments,
            # The kernel notices within half a minute that a peer has vanished.
            keepalives_idle=10,
            keepalives_interval=5,
            keepalives_count=4,
            tcp_user_timeout=30_000,
            autocommit=True,
            cursor_factory=library.RawCursor,
            application_name=application_name(),
            client_encoding="UTF8",  # whatever the environment or the role says
            connect_timeout=CONNECT_TIMEOUT_S,
        )
    except library.errors.ConnectionTimeout as error:
        raise ConnectionError("it does not answer") from error
    except library.OperationalError as error:
        if _NEVER.search(str(error)):
            raise errors.StoreError(f"the server refuses the connection: {_line(error)}") from error
        hint = " (which can be opened read-only)" if "hot standby mode" in str(error) else ""
        raise ConnectionError(f"{_line(error)}{hint}") from error
    # One type for all: by the size of a number psycopg would prepare a statement anew.
    driver.adapters.register_dumper(int, types.numeric.Int8BinaryDumper)
    # Registered last, it serves COPY: else what DB-API calls Binary does, in Python.
    driver.adapters.register_dumper(bytes, types.string.BytesBinaryDumper)
    return driver


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


@contextmanager
def driver_errors(driver: psycopg.Connection[Any]) -> Iterator[None]:
    """Raise what a connection raises as an error that `foreign_errors` knows."""
    psycopg = extra("psycopg", "postgresql")
    try:
        yield
    except (psycopg.Error, DBAPIError) as error:
        cause = getattr(error, "orig", error)
        if passes_by(cause) or driver.closed:
            raise ConnectionError(f"the connection was lost: {_line(cause)}") from error
        if isinstance(error, DBAPIError):
            raise
        kind = IntegrityError if isinstance(error, psycopg.IntegrityError) else DBAPIError
        raise kind(_line(error), None, error) from error


def cut(driver: psycopg.Connection[Any]) -> None:
    """End a connection from another thread than the one that waits on it, which hears of it."""
    with suppress(OSError, extra("psycopg", "postgresql").Error):  # it is closed
        file = socket.socket(fileno=os.dup(driver.pgconn.socket))
        with file:
            file.shutdown(socket.SHUT_RDWR)


@contextmanager
def cut_after(driver: psycopg.Connection[Any], seconds: float | None) -> Iterator[None]:
    """End a connection on which something takes longer than so many ``seconds``."""
    if seconds is None:
        yield
        return
    timer = Timer(seconds, cut, [driver])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Outage:
    """Retries calls that failed because the server was away.

    All calls to one server share it: once one has given up, later ones try once.

    Args:
        name: of the database, for messages.

    Attributes:
        reconnect_s: for how long; 0 until the store is open, so that opening it fails at once.
        closed: ends every wait.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.reconnect_s = 0.0
        self.closed = Event()
        self._since: float | None = None
        self._silent_until = 0.0
        self._tries = 0

    def outlived(self, attempt: Callable[[], T]) -> T:
        """Return the result of ``attempt``, retried until the server answers. Not on a loop.

        Raises:
            StoreUnavailableError: the server was not there for ``reconnect_s``.
        """
        began, pause_s = None, FIRST_PAUSE_S
        while True:
            try:
                done = attempt()
            except errors.StoreUnavailableError as error:
                now = time.monotonic()
                self._since, began = self._since or now, began or now
                left_s = self.reconnect_s - (now - min(self._since, began))
                if left_s <= 0:
                    raise
                if now >= self._silent_until:  # one line for a try, however many wait for it
                    self._silent_until = now + pause_s
                    self._tries += 1
                    _logger.warning("%s; try %d, given up in %.0f s", error, self._tries, left_s)
                self._wait(min(pause_s, left_s), error)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                if self._tries:
                    _logger.warning("%s is there again", self._name)
                self._since, self._tries, self._silent_until = None, 0, 0.0
                return done

    def _wait(self, pause_s: float, error: errors.StoreUnavailableError) -> None:
        """Wait; who is cancelled meanwhile, or closes the store, waits no longer."""
        until = time.monotonic() + pause_s
        while (left_s := until - time.monotonic()) > 0:
            anyio.from_thread.check_cancelled()
            if self.closed.wait(min(left_s, FIRST_PAUSE_S)):
                raise error


class PostgresTransaction(transaction.Transaction):
    """A connection in autocommit, whose transactions `run` begins and ends, one after another.

    Attributes:
        asked_at: when the server was asked what it may not have answered yet; None between
            transactions.
        in_doubt: the commit was sent, and not answered.
    """

    driver: psycopg.Connection[Any]

    def __init__(self, engine: Engine, driver: psycopg.Connection[Any]) -> None:
        super().__init__(engine, driver)
        self.asked_at: float | None = None
        self.in_doubt = False
        self._later: list[tuple[str, Sequence[Any]]] = []
        self._locked: set[int] = set()
        self._statements_left: int | None = None
        self._announces = False

    def run(self, f: Callable[[transaction.Transaction], T], begin: str) -> T:
        """Return ``f(tx)``, in a transaction of its own.

        Args:
            f: is run once.
            begin: the statement that begins it; "" for a single statement that needs none.
        """
        self.seen, self.appended, self._locked = [], {}, set()
        self._later = [(begin, ())] if begin else []
        self._statements_left = None if begin else 1
        self.in_doubt = self._announces = False
        try:
            done = f(self)
            self._commit()
        except BaseException as error:
            self._roll_back(error)
            raise
        finally:
            self.asked_at = None
            if self._connection.in_transaction():  # in SQLAlchemy's idea; nothing is left to undo
                with suppress(DBAPIError):
                    self._connection.rollback()
        return done

    @property
    @override
    def connection(self) -> Connection:
        """SQLAlchemy's connection inside the transaction, for DDL, inspection and migrations."""
        self._count_statement()
        if self._later:
            self._send()
        self.asked_at = time.monotonic()
        return super().connection

    @override
    def fetch_all(self, sql: transaction.Statement | str, values: Any) -> list[tuple[Any, ...]]:
        """Execute a statement, or SQL of the driver's own style, and return all rows."""
        self._count_statement()
        self.execute_later(sql, values)
        cursor = self._send()
        return cursor.fetchall() if cursor.description else []

    @override
    def execute_later(self, sql: transaction.Statement | str, values: Any) -> None:
        """Queue a statement, to be sent together with others."""
        if isinstance(sql, transaction.Statement):
            for name, kind in sql.lists.items():
                values[name] = list(values[name] if kind == "BYTES" else map(str, values[name]))
            if sql.has_rows:
                for number, column in enumerate(zip(*values["rows"], strict=True)):
                    values[f"column{number}"] = list(map(str, column))
            values = [values[name] for name in sql.names]
            sql = sql.postgresql
        self._later.append((sql, values))

    @override
    def insert_many(self, table: Table, rows: Sequence[tuple[Any, ...]], more: str = "") -> None:
        """Insert ``rows``, each with all columns of ``table`` in their order."""
        if more or len(rows) < sizes.rows_to_copy:
            self._later += [(_insert(table) + more, row) for row in rows]
            return
        if self._later:
            self._send()
        self.asked_at = time.monotonic()
        statement = f"COPY {table.name} FROM STDIN (FORMAT BINARY)"
        with self.driver.cursor() as cursor, cursor.copy(statement) as copy:
            copy.set_types(column_types(table))
            for row in rows:
                copy.write_row(row)

    @override
    def lock(self, experiment: int) -> None:
        """Take the lock, once for the transaction, together with the next statement."""
        if experiment not in self._locked:
            self._locked.add(experiment)
            lock = f"SELECT pg_advisory_xact_lock({_SPACE}, {experiment})"
            # Statements of their own: they must see what was committed while the lock was waited
            # for.
            self._later += [(lock, ()), (_NEWER, ())]

    @override
    def announce(self) -> None:
        """Notify the other processes at the commit."""
        self._announces = True

    def _count_statement(self) -> None:
        if self._statements_left is not None:
            if not self._statements_left:
                raise RuntimeError("a function of `one_statement` executed a second one")
            self._statements_left -= 1

    def _send(self) -> psycopg.Cursor[Any]:
        """Send what waits, in one round trip; return the cursor of its last statement.

        Raises:
            SchemaTooNewError: the store was migrated before a lock was taken. What follows the lock
                may have failed because of that, or would have.
        """
        statements, self._later = self._later, []
        self.asked_at = time.monotonic()
        others, newer = self.driver.cursor(), self.driver.cursor()
        last = self.driver.cursor(binary=True)
        try:
            with self.driver.pipeline() if len(statements) > 1 else nullcontext():
                for number, (sql, values) in enumerate(statements, 1):
                    cursor = last if number == len(statements) else others
                    # Without values a text may be of one experiment alone: it is not prepared.
                    (newer if sql is _NEWER else cursor).execute(sql, values, prepare=bool(values))
        finally:
            if newer.rowcount > 0:
                revision = newer.fetchall()[0][0]
                raise errors.SchemaTooNewError(
                    f"the store was migrated to schema {revision} while it was open here (this is "
                    f"{SCHEMA_REVISION}): upgrade with `pip install --upgrade trinity-buffer`"
                )
        return last

    def _commit(self) -> None:
        """Send what waits, and commit.

        Raises:
            StoreError: an earlier error was ignored; nothing was written.
        """
        if self._statements_left is not None:
            return
        if self.asked_at is None and len(self._later) == 1 and not self._announces:
            return  # it has not even begun
        if (_NEWER, ()) in self._later:  # looked at before the commit
            self._send()
        if self._announces or self.appended:
            self._later.append((f"NOTIFY {CHANNEL}", ()))
        self._later.append(("COMMIT", ()))
        self.in_doubt = True
        ended = self._send()
        self.in_doubt = False
        if ended.statusmessage != "COMMIT":
            raise errors.StoreError(
                "the transaction had failed before its commit; nothing was written"
            )

    def _roll_back(self, why: BaseException) -> None:
        """End the transaction; a connection on which that fails is not used again."""
        error = getattr(why, "orig", why)
        ended = getattr(getattr(error, "diag", None), "severity_nonlocalized", "")
        try:
            if passes_by(error) or ended in {"FATAL", "PANIC"}:
                self.driver.close()
            else:
                self.driver.rollback()
        except extra("psycopg", "postgresql").Error:
            self.driver.close()


_SPACE = 7
"""Of the locks of experiments, among the advisory locks of a database."""

_NEWER = (
    "SELECT max(version_num) FROM alembic_version "
    f"HAVING max(version_num) IS DISTINCT FROM '{SCHEMA_REVISION}'"
)
# The lock of an experiment needs READ COMMITTED: a transaction that waited for the lock must see
# what its holder committed, whatever the database's default is.
_WRITING = "BEGIN ISOLATION LEVEL READ COMMITTED"
_READING = "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY"
_APART = "BEGIN ISOLATION LEVEL REPEATABLE READ"  # may make what is temporary


@cache
def _insert(table: Table) -> str:
    places = ", ".join(f"${number}" for number in range(1, len(table.columns) + 1))
    return f"INSERT INTO {table.name} VALUES ({places})"


@cache
def column_types(table: Table) -> list[str]:
    """Return the types of the columns of ``table``, as psycopg's COPY takes them."""
    kinds = {"INTEGER": "int4", "BIGINT": "int8", "FLOAT": "float8", "BLOB": "bytea"}
    names = (str(column.type).partition("(")[0] for column in table.columns)
    return [kinds.get(name, name.lower()) for name in names]


class PostgresConnection:
    """A connection for one transaction after the other, made anew when it is lost."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.tx: PostgresTransaction | None = None

    def run(
        self,
        f: Callable[..., T],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        writes: bool,
        once: bool = False,
    ) -> T:
        """Return ``f(tx, ...)``, in a transaction of its own.

        Where the connection is lost it is run once more, so that ``f`` keeps nothing to itself. If
        that was during its commit, the log is searched for its events first: nothing is written
        twice. What appends no event (a lease, a presence) writes the same again.

        Args:
            once: do not try again.
        """
        begin = _WRITING if writes else "" if f in transaction.OF_ONE_STATEMENT else _READING
        if self._server.is_dedicated:
            begin = _APART
        doubted: dict[int, tuple[int, bytes]] = {}
        results: list[T] = []

        def work(tx: transaction.Transaction) -> T:
            # The lock waits for the end of the transaction in doubt, which the server may not know
            # of.
            for experiment in sorted(doubted):
                tx.lock(experiment)
            if not any(log.holds(tx, key, *place) for key, place in doubted.items()):
                doubted.clear()
                results[:] = [f(tx, *args, **kwargs)]
            return results[0]

        def attempt() -> T:
            with transaction.foreign_errors(self._server.name):
                tx = self._connected()
                try:
                    with driver_errors(tx.driver):
                        done = tx.run(work, begin)
                except Exception:
                    if tx.in_doubt and not doubted:
                        doubted.update(tx.appended)
                    raise
                transaction.note_ends(self._server.ends, tx)
                return done

        if once or self._server.is_dedicated:
            return attempt()
        return self._server.outage.outlived(attempt)

    def _connected(self) -> PostgresTransaction:
        if self.tx is not None and (self.tx.driver.closed or _has_news(self.tx.driver)):
            self.tx.driver.close()
            if self._server.is_dedicated:  # another one would have nothing temporary
                raise ConnectionError("the connection was lost: try again")
            self.tx = None
        if self.tx is None:
            self.tx = self._server.connected()
        return self.tx


def _has_news(driver: psycopg.Connection[Any]) -> bool:
    """Return whether an idle connection says something: of all that it could, it says its end."""
    poll = select.poll()  # which takes any number, as select does not: it may be above 1023
    poll.register(driver.pgconn.socket, select.POLLIN)
    return bool(poll.poll(0))


class Server:
    """Connections to one server, replaced when they are lost.

    Args:
        url: of the database.
        name: of the database, for messages.
        outage: retries while the server is away.
        is_timed: False where a statement may take as long as it likes.
        is_dedicated: one connection, which is not replaced.
    """

    def __init__(
        self, url: URL, name: str, outage: Outage, *, is_timed: bool, is_dedicated: bool = False
    ) -> None:
        extra("psycopg", "postgresql")
        self.name = name
        self.outage = outage
        self.is_dedicated = is_dedicated
        self._url = url
        self._timeout_s = COMMAND_TIMEOUT_S if is_timed else None
        number = 1 if is_dedicated else KEPT_CONNECTIONS + MORE_CONNECTIONS
        self._free = anyio.CapacityLimiter(number)
        self.ends: transaction.Ends = {}
        self._idle: list[PostgresConnection] = []
        self._busy: set[PostgresConnection] = set()
        self._trips = 0
        self._is_closed = False
        self._watching: asyncio.TimerHandle | None = None
        self._engine = transaction.engine_without_connections(
            "postgresql+psycopg://", paramstyle="numeric_dollar", use_native_hstore=False
        )

    async def run_in_thread(
        self,
        work: Callable[[transaction.Session], T],
        session: transaction.Session,
        *,
        writes: bool,  # noqa: ARG002 - SQLite has one writer
    ) -> T:
        """Return ``work(session)``, in a thread, with a connection of its own.

        Once begun, it goes on to its end (`Database.session`).
        """

        def lent() -> T:
            # Statements are prepared on each connection: the one that was used last knows most.
            connection = self._idle.pop() if self._idle else PostgresConnection(self)
            self._busy.add(connection)
            session.run = connection.run
            try:
                return work(session)
            finally:
                self._busy.remove(connection)
                if len(self._idle) < KEPT_CONNECTIONS and not self._is_closed:
                    self._idle.append(connection)
                elif connection.tx is not None:
                    connection.tx.driver.close()

        self._trips += 1
        if self._watching is None and self._timeout_s is not None:
            self._watch(self._timeout_s)
        try:
            return await anyio.to_thread.run_sync(lent, limiter=self._free)
        finally:
            self._trips -= 1

    def _watch(self, timeout_s: float) -> None:
        """End connections over which no answer comes, and look again as long as there are any."""
        self._watching = None
        for tx in [connection.tx for connection in list(self._busy)]:
            if tx is not None and time.monotonic() - (tx.asked_at or math.inf) > timeout_s:
                cut(tx.driver)
        if self._trips or self._busy:
            later = asyncio.get_running_loop().call_later
            self._watching = later(timeout_s / 8, self._watch, timeout_s)

    def one_more(self) -> Server:
        """Return one more connection; its temporary tables are its own."""
        # Not one of the pool: it may have prepared statements on tables that views hide here.
        timed = self._timeout_s is not None
        return Server(self._url, self.name, self.outage, is_timed=timed, is_dedicated=True)

    async def require_suitable(self) -> str:
        """Return the server's version.

        Raises:
            UnsafeStoreError: the database does not store UTF-8, or a pooler hands out a server
                connection for a transaction only.
        """
        version, longest_lock_s = await anyio.to_thread.run_sync(self._suitable)
        if self._timeout_s and self._timeout_s <= longest_lock_s:
            self._timeout_s = 2 * longest_lock_s
        return version

    def _suitable(self) -> tuple[str, float]:
        """Return the version of the server, and its limit of a wait for a lock in seconds."""
        # SQLAlchemy closes what is not referred to any more.
        pair = self.connected(), self.connected()
        first, other = (tx.driver for tx in pair)
        with first, other, driver_errors(first), driver_errors(other):
            for driver in (first, other):  # whose transactions keep what a pooler lends
                driver.execute(_WRITING)
            version, encoding, lock_ms = first.execute(_ABOUT).fetchall()[0]
            if encoding != "UTF8":
                raise errors.UnsafeStoreError(
                    f"{self.name} stores texts as {encoding}, which cannot represent most of them: "
                    "make a database with CREATE DATABASE ... ENCODING 'UTF8' TEMPLATE template0"
                )
            mark = uuid4().hex
            first.execute(_SET_MARK, (mark,))
            first.commit()
            # A pooler of transactions gives the other connection, sooner or later, the server's
            # session of the first one; or the first gets another while the other keeps that.
            pooled = False
            for _ in range(LOOKS_FOR_A_POOLER):
                other.rollback()
                other.execute(_WRITING)
                pooled = pooled or other.execute(_GET_MARK).fetchall() == [(mark,)]
            # Not asked where it is known: of one server connection, the other has it.
            if pooled or first.execute(_GET_MARK).fetchall() != [(mark,)]:
                raise errors.UnsafeStoreError(f"{self.name} {transaction.POOLED}")
            for driver in (first, other):
                driver.rollback()  # here, where errors are translated, not as it is closed
        return version, float(lock_ms) / 1000

    async def close(self) -> None:
        """Close every connection; what is at work was cancelled, and hears of its end."""
        self._is_closed = True
        if self._watching is not None:
            self._watching.cancel()
        for connection in list(self._busy):  # which its thread closes
            if connection.tx is not None:
                cut(connection.tx.driver)
        while self._idle:
            tx = self._idle.pop().tx
            if tx is not None:
                tx.driver.close()

    def connected(self) -> PostgresTransaction:
        """Return a new connection, whose commits are durable and whose waits for locks end.

        With ``synchronous_commit=off`` an acknowledged commit could be lost in a crash. A wait for
        a lock ends as soon as on SQLite, unless a limit is configured: by default it has none.

        Raises:
            StoreReplacedError: what was seen over another connection is not there any more.
        """
        driver = connect(self._url)
        try:
            with driver_errors(driver), cut_after(driver, self._timeout_s):
                driver.execute(SETTINGS, (str(sqlite.BUSY_TIMEOUT_MS),))
                tx = PostgresTransaction(self._engine, driver)
                if known := dict(self.ends):  # of now: other threads note more
                    tx.run(partial(log.require_ends, store=self.name, ends=known), _READING)
                return tx
        except BaseException:
            driver.close()
            raise


SETTINGS = (
    "SELECT set_config('synchronous_commit', CASE found WHEN 'off' THEN 'on' ELSE found END, false)"
    ", set_config('lock_timeout', CASE waits WHEN '0' THEN $1 ELSE waits END, false)"
    # The locks of a process whose host is gone, or that was stopped in a transaction, are free
    # soon: a transaction sends one statement after the other.
    ", set_config('tcp_keepalives_idle', '10', false)"
    ", set_config('tcp_keepalives_interval', '5', false)"
    ", set_config('tcp_keepalives_count', '4', false)"
    ", set_config('idle_in_transaction_session_timeout', '20s', false)"
    # Else libpq doubles the backslashes of bytes in a list, as in a literal: none would be found.
    ", set_config('standard_conforming_strings', 'on', false)"
    " FROM current_setting('synchronous_commit') AS found, current_setting('lock_timeout') AS waits"
)
"""Settings of each new connection; ``$1``: its timeout of locks in milliseconds."""
_ABOUT = (
    "SELECT current_setting('server_version'), current_setting('server_encoding'), "
    "(SELECT setting FROM pg_settings WHERE name = 'lock_timeout')"  # in milliseconds
)
_SET_MARK = "SELECT set_config('trinity_buffer.session', $1, false)"
_GET_MARK = "SELECT current_setting('trinity_buffer.session', true)"


def application_name() -> str:
    """Return our name in the server's list of connections: another one after a fork."""
    return f"trinity-buffer {os.getpid()}@{socket.gethostname()}"[:63]


def others(tx: transaction.Transaction) -> list[str]:
    """Return the other processes that have this database open, old versions without name too."""
    rows = tx.fetch_all(_OTHERS, ())
    names = {str(row[0]) or "a process of an older version" for row in rows}
    return sorted(names - {application_name()})


_OTHERS = (
    "SELECT application_name FROM pg_stat_activity WHERE datname = current_database() "
    "AND backend_type = 'client backend' AND pid <> pg_backend_pid() "
    "AND (application_name = '' OR application_name LIKE 'trinity-buffer%')"
)
