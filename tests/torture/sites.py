"""Where the stores of rounds are, and what can be done to them from outside."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
from pysqlite3 import dbapi2
from typing_extensions import override

from tests.postgres import PostgresServer
from tests.raw_store import guards

DISK_BYTES = 512 << 20
"""SQLite's log grows up to its limit of 256 MiB while nobody pauses, and 4 MB a second more while
a process that reads is stopped: one that fills the disk can no longer be copied into the database.
PostgreSQL's proof makes a copy of its database."""

TABLESPACE = "small"
RECOVERY_S = 300.0


class Site(ABC):
    """A place for the stores of rounds.

    Attributes:
        kind: which faults it knows, a key of the plan's weights.
    """

    kind: str

    @abstractmethod
    def fresh(self, name: str) -> str:
        """Return the URL of an empty store."""

    @abstractmethod
    def copy(self, url: str) -> str:
        """Return the URL of a copy of a store that nobody has open."""

    @abstractmethod
    def keep(self, url: str, folder: Path) -> None:
        """Leave in ``folder`` a copy of a store that nobody has open; it outlives the site."""

    @abstractmethod
    def remove(self, url: str) -> None:
        """Remove a store."""

    @abstractmethod
    def flip(self, url: str, draw: float) -> tuple[str, str]:
        """Flip one bit of one segment; return its key in hex and its family."""

    def replace(self, url: str) -> None:
        """Put a copy in the place of a store's files, under whoever has it open."""
        raise NotImplementedError

    def hit(self, kind: str, url: str, draw: float) -> bool:
        """Do ``kind`` to the store; return whether there was something to do it to."""
        raise NotImplementedError

    def settle(self) -> None:  # noqa: B027 - a file can always be reached
        """Return when the store can be reached again after the last fault."""

    def fill(self) -> None:
        """Leave no space on the disk."""
        raise NotImplementedError

    def empty(self) -> None:
        """Give the space back."""
        raise NotImplementedError


def _flipped(data: bytes, draw: float) -> bytes:
    bit = int(draw * len(data) * 8)
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


class SQLiteSite(Site):
    """Files in a folder."""

    kind = "sqlite"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @override
    def fresh(self, name: str) -> str:
        return f"sqlite:///{self._folder / f'{name}.db'}"

    @override
    def copy(self, url: str) -> str:
        folder = Path(tempfile.mkdtemp(prefix="copy-", dir=self._folder))
        self.keep(url, folder)
        return f"sqlite:///{folder / 'store.db'}"

    @override
    def keep(self, url: str, folder: Path) -> None:
        path = _path_of(url)
        for suffix in ("", "-wal"):
            source = path.with_name(path.name + suffix)
            if source.exists():
                shutil.copy(source, folder / f"store.db{suffix}")

    @override
    def remove(self, url: str) -> None:
        path = _path_of(url)
        if path.parent != self._folder:
            shutil.rmtree(path.parent)
            return
        for suffix in ("", "-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)

    @override
    def replace(self, url: str) -> None:
        folder, path = Path(tempfile.mkdtemp(dir=self._folder)), _path_of(url)
        self.keep(url, folder)
        for copy in folder.iterdir():
            copy.replace(path.with_name(copy.name.replace("store.db", path.name)))
        folder.rmdir()

    @override
    def flip(self, url: str, draw: float) -> tuple[str, str]:
        connection = dbapi2.connect(str(_path_of(url)), isolation_level=None)
        connection.execute("DROP TRIGGER segment_forbids_update")
        keys = connection.execute("SELECT key, family, part FROM segment ORDER BY key").fetchall()
        key = keys[int(draw * len(keys))]
        which = "WHERE key = ? AND family = ? AND part = ?"
        (data,) = connection.execute(f"SELECT data FROM segment {which}", key).fetchone()
        damaged = _flipped(data, draw * 7919 % 1)
        connection.execute(f"UPDATE segment SET data = ? {which}", (damaged, *key))
        (guard,) = (one for one in guards("sqlite") if one.name == "segment_forbids_update")
        connection.execute(guard.statements("sqlite")[0])
        connection.close()
        return bytes(key[0]).hex(), key[1]


def _path_of(url: str) -> Path:
    return Path(url.removeprefix("sqlite:///"))


class _Ballast:
    """What fills a file system, and gives the space back."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "ballast"

    def fill(self) -> None:
        with suppress(OSError), self._file.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(1 << 12))

    def empty(self) -> None:
        self._file.unlink(missing_ok=True)


_CLONE_NEWNS = 0x00020000


def _hide_mounts() -> None:
    """Give this process mounts of its own: the kernel undoes them when it and its children end.

    However it ends. Who was born before does not see them.

    Raises:
        OSError: only root may, and not everywhere.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "no mounts of our own")
    subprocess.run(("mount", "--make-rprivate", "/"), check=True, capture_output=True)


@contextmanager
def _mounted(folder: Path, size_bytes: int) -> Iterator[Path]:
    """Mount a small file system in ``folder``, for root only; unmount it at the end.

    Raises:
        OSError, CalledProcessError: it cannot be mounted.
    """
    _hide_mounts()
    disk = folder / "disk"
    disk.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(disk))
    subprocess.run(mount, check=True, capture_output=True)
    try:
        yield disk
    finally:
        subprocess.run(("umount", "-l", str(disk)), check=True)
        disk.rmdir()


class SmallDiskSite(SQLiteSite):
    """Files on a file system of 512 MiB, which can be filled."""

    kind = "sqlite on a small disk"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._ballast = _Ballast(folder)

    @override
    def fill(self) -> None:
        self._ballast.fill()

    @override
    def empty(self) -> None:
        self._ballast.empty()


class PostgresSite(Site):
    """Databases of a durable server of its own, which can be killed."""

    kind = "postgresql"

    tablespace = "pg_default"

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._copies = 0

    @override
    def fresh(self, name: str) -> str:
        return self._server.create_database(name, tablespace=self.tablespace)

    @override
    def copy(self, url: str) -> str:
        self._copies += 1
        name = _database_of(url)
        gone = (
            f"SELECT pg_terminate_backend(pid, 9000) FROM pg_stat_activity WHERE datname='{name}'"
        )
        self._server.execute(gone)
        copy = f"{name}_copy_{self._copies}"
        return self._server.create_database(copy, template=name, tablespace=self.tablespace)

    @override
    def keep(self, url: str, folder: Path) -> None:
        self.settle()
        self._server.dump(_database_of(url), folder / "store.sql")

    @override
    def remove(self, url: str) -> None:
        self._server.drop_database(_database_of(url))

    @override
    def flip(self, url: str, draw: float) -> tuple[str, str]:
        name = _database_of(url)
        keys = self._server.execute(
            "SELECT encode(key, 'hex'), family, part FROM segment ORDER BY 1, 2, 3", database=name
        ).splitlines()
        key, family, part = keys[int(draw * len(keys))].split("|")
        which = f"WHERE key = '\\x{key}' AND family = '{family}' AND part = {part}"
        data = self._server.execute(
            f"SELECT encode(data, 'hex') FROM segment {which}", database=name
        )
        damaged = _flipped(bytes.fromhex(data), draw * 7919 % 1).hex()
        # One command, one session: the trigger that forbids it sleeps in this one only.
        self._server.execute(
            "SET session_replication_role = replica; "
            f"UPDATE segment SET data = '\\x{damaged}' {which}",
            database=name,
        )
        return key, family

    @override
    def hit(self, kind: str, url: str, draw: float) -> bool:
        if kind in ("server killed", "server restarted"):
            if kind == "server killed":
                self._server.kill9()
            else:
                self._server.stop(patience_s=10.0)
            self._server.start()
            return True
        pids = self._backends(_database_of(url))
        if not pids:
            return False
        pid = pids[int(draw * len(pids))]
        try:
            if kind == "backend terminated":
                return self._server.execute(f"SELECT pg_terminate_backend({pid}, 9000)") == "t"
            backend = psutil.Process(pid)
            backend.kill()
            backend.wait(RECOVERY_S)
        except (psutil.NoSuchProcess, RuntimeError):
            return False  # it has just ended
        return True

    @override
    def settle(self) -> None:
        deadline = time.monotonic() + RECOVERY_S
        while True:
            try:
                if not self._server.is_running:
                    self._server.start()
                self._server.execute("SELECT 1")
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
            else:
                return

    def _backends(self, name: str) -> list[int]:
        try:
            said = self._server.execute(
                f"SELECT pid FROM pg_stat_activity WHERE datname = '{name}' ORDER BY pid"
            )
        except RuntimeError:
            return []  # it recovers from the last fault
        return [int(pid) for pid in said.split()]


def _database_of(url: str) -> str:
    return url.partition("?")[0].rpartition("/")[2]


class SmallTablespaceSite(PostgresSite):
    """The same, its tables on a file system that can be filled.

    The server's own log lies elsewhere: where that is full, the server stops as if it was killed,
    which is a fault of its own.
    """

    kind = "postgresql on a small disk"
    tablespace = TABLESPACE

    def __init__(self, server: PostgresServer, folder: Path) -> None:
        super().__init__(server)
        tables = folder / "tables"
        tables.mkdir()
        for above in (folder, folder.parent):
            above.chmod(0o755)  # the server is another user
        server.create_tablespace(self.tablespace, tables)
        self._ballast = _Ballast(folder)

    @override
    def fill(self) -> None:
        self._ballast.fill()

    @override
    def empty(self) -> None:
        """Give the space back; a server that could not recover without it is started again."""
        self._ballast.empty()
        self.settle()


@contextmanager
def opened(store: str, folder: Path) -> Iterator[Site]:
    """Have a place for stores of ``"sqlite"`` or ``"postgresql"``; remove it at the end.

    It is on a disk that can be filled, in ``folder``, if we may mount one.
    """
    with ExitStack() as stack:
        disk: Path | None = None
        with suppress(OSError, subprocess.CalledProcessError):
            disk = stack.enter_context(_mounted(folder, DISK_BYTES))
        if store == "sqlite":
            yield SQLiteSite(folder) if disk is None else SmallDiskSite(disk)
            return
        server = stack.enter_context(PostgresServer(durable=True))
        yield PostgresSite(server) if disk is None else SmallTablespaceSite(server, disk)
