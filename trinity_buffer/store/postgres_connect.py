"""Connections to PostgreSQL: how one is made, and what becomes of work when it is lost."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
from sqlalchemy.engine import URL

from trinity_buffer.errors import StoreUnavailableError
from trinity_buffer.lazy import extra
from trinity_buffer.store.transaction import dialect_module

T = TypeVar("T")

_logger = logging.getLogger(__name__)

APPLICATION = f"trinity-buffer {os.getpid()}@{socket.gethostname()}"[:63]
"""Our name in the server's list of connections."""

CONNECT_TIMEOUT_S = 10.0
"""Of a host that takes a connection and does not answer."""

CLOSE_TIMEOUT_S = 5.0

COMMAND_TIMEOUT_S = 40.0
"""Of a statement that is not answered: longer than any wait for a lock."""

RECONNECT_S = 120.0
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0

_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}
"""With these the kernel notices within half a minute that a peer has vanished."""

_PASSING = frozenset({"57P01", "57P02", "57P03", "57P05", "25P03", "25P04", "53300"})
"""SQLSTATE of a shutdown, a start, a connection that was idle for too long, and of too many."""


def passes_by(error: object) -> bool:
    """Return whether an error says that the server is not there, or ended the connection."""
    state = str(getattr(error, "sqlstate", None) or "")
    # asyncpg loses count of its operations where the server ends a connection in the middle of one.
    # By its name: SQLAlchemy wraps it in an error that is called the same.
    is_confused = type(error).__name__ == "InternalClientError"
    return is_confused or isinstance(error, OSError) or state[:2] == "08" or state in _PASSING


def arguments_of(url: URL) -> dict[str, Any]:
    """Return the arguments of `connect` for the database at ``url``."""
    # What libpq and asyncpg's own URLs call sslmode is an argument ssl of its connections.
    query = {"ssl" if key == "sslmode" else key: value for key, value in url.query.items()}
    query.pop("reconnect_s", None)
    dialect = dialect_module("postgresql").asyncpg.dialect()
    arguments: dict[str, Any] = dialect.create_connect_args(url.set(query=query))[1]
    return arguments


async def connect(*, host: Any = None, port: Any = None, **arguments: Any) -> Any:
    """Return a new connection of asyncpg to the first host that takes it.

    Raises:
        ConnectionError: none is there, or none is what was asked for (``target_session_attrs``).
    """
    asyncpg = extra("asyncpg", "postgresql")
    several = isinstance(host, list)
    failures = []
    for place in zip(host, port, strict=True) if several else ((host, port),):
        try:
            connection = await asyncpg.connect(
                host=place[0],
                port=place[1],
                server_settings={"application_name": APPLICATION},
                timeout=CONNECT_TIMEOUT_S,
                **{"command_timeout": COMMAND_TIMEOUT_S, **arguments},
            )
        except (OSError, asyncpg.PostgresError, asyncpg.InternalClientError) as error:
            if not passes_by(error):
                raise
            cause = str(error) or "it does not answer"
            failures.append(f"{place[0]}: {cause}" if several else cause)
            continue
        _keep_alive(connection)
        return connection
    raise ConnectionError("; ".join(failures))


def errors() -> tuple[type[Exception], ...]:
    """Return the errors of asyncpg; its TimeoutError is an OSError."""
    asyncpg = extra("asyncpg", "postgresql")
    return OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError


async def close(connection: Any) -> None:
    """Close a connection of asyncpg, whatever has become of its server."""
    with anyio.CancelScope(shield=True):
        try:
            await connection.close(timeout=CLOSE_TIMEOUT_S)
        except errors():
            connection.terminate()


def _keep_alive(connection: Any) -> None:
    """Let the kernel look whether the peer of an idle or waiting connection is still there."""
    peer = connection._transport.get_extra_info("socket")  # noqa: SLF001 - asyncpg offers no other way
    if peer is None or peer.family not in (socket.AF_INET, socket.AF_INET6):
        return
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _ALIVE.items():
        if hasattr(socket, name):  # not on every system
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Outage:
    """Retries calls that failed because the server was away.

    All calls to one server share it: once one has given up, later ones try once.

    Args:
        name: of the database, for messages.

    Attributes:
        reconnect_s: for how long; 0 until the store is open, so that opening it fails at once.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.reconnect_s = 0.0
        self._since: float | None = None
        self._silent_until = 0.0
        self._tries = 0

    async def outlived(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``attempt``, retried until the server answers.

        Raises:
            StoreUnavailableError: the server was not there for ``reconnect_s``.
        """
        began, pause_s = None, FIRST_PAUSE_S
        while True:
            try:
                done = await attempt()
            except StoreUnavailableError as error:
                now = time.monotonic()
                self._since, began = self._since or now, began or now
                left_s = self.reconnect_s - (now - min(self._since, began))
                if left_s <= 0:
                    raise
                self._say(error, now, left_s, pause_s)
            else:
                self._over()
                return done
            await anyio.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _say(self, error: Exception, now: float, left_s: float, pause_s: float) -> None:
        """Say one line for a try, however many wait for it."""
        if now < self._silent_until:
            return
        self._silent_until = now + pause_s
        self._tries += 1
        _logger.warning("%s; try %d, given up in %.0f s", error, self._tries, left_s)

    def _over(self) -> None:
        if self._tries:
            _logger.warning("%s is there again", self._name)
        self._since, self._tries, self._silent_until = None, 0, 0.0
