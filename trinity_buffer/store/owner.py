"""Who may use an open database: the process and the event loop that opened it, until it closes."""

from __future__ import annotations

import asyncio
import os

from trinity_buffer.errors import StoreUseError


class Owner:
    """The process and the event loop that opened a database.

    Connections, their threads and whoever waits belong to both: elsewhere a call would hang, or
    corrupt the file.

    Args:
        name: of the database, for messages.

    Raises:
        StoreUseError: no event loop of asyncio runs here.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = os.getpid()
        self._loop = _running_loop(name)
        self._closed = False

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that opened the database."""
        return os.getpid() != self._pid

    def close(self) -> None:
        """Let nobody use the database any more."""
        self._closed = True

    def require_open(self) -> None:
        """Do nothing in the process that opened the database, while it is open.

        Raises:
            StoreUseError: it is closed, or this is a forked child.
        """
        self.require_same_process()
        if self._closed:
            raise StoreUseError(f"{self._name} is closed: use it inside its `with` block")

    def require_same_process(self) -> None:
        """Do nothing in the process that opened the database.

        Raises:
            StoreUseError: this is a forked child.
        """
        if self.forked:
            raise StoreUseError(
                f"{self._name} was opened by process {self._pid} and forked into {os.getpid()}: "
                "open it anew in the child, or start the child with spawn or forkserver"
            )

    def require(self) -> None:
        """Do nothing if the caller may use the database.

        Raises:
            StoreUseError: it is closed, or was opened by another process or event loop.
        """
        self.require_open()
        if _running_loop(self._name) is not self._loop:
            raise StoreUseError(
                f"{self._name} was opened in another event loop: open it in each loop that uses it"
            )


def _running_loop(name: str) -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError as error:
        raise StoreUseError(
            f"{name} needs an event loop of asyncio, and none runs here (trio is not supported): "
            "use asyncio.run, or anyio.run with the backend asyncio"
        ) from error
