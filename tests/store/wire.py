"""A wire to a PostgreSQL server that can be cut, or swallow what it is given."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Self

from sqlalchemy import make_url


class Wire:
    """Listens on a port of its own, and carries what comes there to a server's socket and back.

    Attributes:
        loses: a word of a client, after which it hears nothing and its connection is cut: the
            server has done what it said. Once.
        cuts: a word of a client at which the connection is cut, before the server hears it. Once.
        swallows: a word of a client that the server never hears, with all that comes with it. Once.
        cut: the number of connections that were cut so.
    """

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._server: asyncio.Server
        self._ends: list[asyncio.StreamWriter] = []
        self._carrying: list[asyncio.Task[None]] = []
        self._silent = set[asyncio.StreamWriter]()
        self.loses = self.cuts = self.swallows = b""
        self.cut = 0

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def open(self) -> Self:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        return self

    def silence(self) -> None:
        """Swallow from now on what the connections carry that there are."""
        self._silent.update(self._ends)

    async def close(self) -> None:
        self._server.close()
        for end in self._ends:
            end.transport.abort()
        await asyncio.gather(*self._carrying, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._carrying.append(task)
        there, back = await asyncio.open_unix_connection(self._socket)
        self._ends += [writer, back]
        with suppress(OSError):
            await asyncio.gather(self._pump(reader, back, writer), self._pump(there, writer, None))
        for end in (writer, back):
            end.transport.abort()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        client: asyncio.StreamWriter | None,
    ) -> None:
        while chunk := await reader.read(1 << 16):
            if writer in self._silent:
                continue
            if client is not None and self.swallows and self.swallows in chunk:
                self.swallows = b""
                continue
            if client is not None and self.cuts and self.cuts in chunk:
                self.cuts, self.cut = b"", self.cut + 1
                raise ConnectionResetError
            if client is not None and self.loses and self.loses in chunk:
                self.loses, self.cut = b"", self.cut + 1
                self._silent.add(client)
                writer.write(chunk)
                writer.write(_TERMINATE)
                continue
            writer.write(chunk)
            await writer.drain()
        raise ConnectionResetError  # one end is enough


_TERMINATE = b"X\x00\x00\x00\x04"
"""After what came before it, the server ends the connection."""


@asynccontextmanager
async def wired(url: str) -> AsyncIterator[tuple[str, Wire]]:
    """Yield the URL of a server behind a wire, and the wire."""
    parsed = make_url(url)
    wire = await Wire(f"{parsed.query['host']}/.s.PGSQL.5432").open()
    try:
        yield f"postgresql://postgres@127.0.0.1:{wire.port}/{parsed.database}", wire
    finally:
        await wire.close()
