"""SQLite as this store uses it: library, pragmas, what files are refused, and the write-ahead log.

A reader that holds an old state keeps all that was written since: SQLite cannot copy it over pages
that the reader still sees, and the log grows until the reader ends.

A writer that crosses the limit of its own (``wal_autocheckpoint``) copies the whole log into the
database before its commit returns. That stays as the fallback; a thread of its own, on a connection
of its own, comes first. Its ``PASSIVE`` checkpoints neither wait for a process nor block one.

The log begins anew when a writer finds all of it copied. Beside a writer that never pauses that is
at its own limit, where there is then little left to copy.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fcntl import F_GETLK, F_RDLCK, F_UNLCK, F_WRLCK, LOCK_EX, LOCK_NB, LOCK_UN, lockf
from pathlib import Path
from threading import Condition, Event, Thread
from types import ModuleType
from typing import Any
from urllib.parse import quote

from trinity_buffer import errors
from trinity_buffer.limits import sizes
from trinity_buffer.store.url import nothing_at

# The wheel carries a release without the WAL-reset bug. Linux on aarch64 has no wheel: there
# Python's own library is used, if it is a fixed release; `require_safe_library` refuses others.
try:
    from pysqlite3 import dbapi2 as dbapi2
except ModuleNotFoundError:
    from sqlite3 import dbapi2 as dbapi2


APPLICATION_ID = 0x54425546  # "TBUF": tells our files from other SQLite databases
PAGE_SIZE_BYTES = 16384  # rows are blobs of 0.1 to 1 MB: 1.4 times the write rate of 4 KiB pages
BUSY_TIMEOUT_MS = 30_000
JOURNAL_SIZE_LIMIT_BYTES = 1 << 28
CACHE_KIB = 1 << 16
READ_CACHE_KIB = 1 << 13  # a reader has up to four connections, and few queries twice

# Releases in which a checkpoint that races a commit cannot lose it (sqlite.org/wal.html, "the
# WAL-reset bug").
_FIXED_IN = ((3, 44, 6), (3, 50, 7), (3, 51, 3))
_FIRST_AFFECTED = (3, 7, 0)

_NETWORK_FILE_SYSTEMS = frozenset(
    {
        "9p", "afs", "alluxio-fuse", "beegfs", "blobfuse", "blobfuse2", "ceph", "ceph-fuse", "cifs",
        "cosfs", "cunofs", "curlftpfs", "davfs", "gcsfuse", "geesefs", "glusterfs", "goofys",
        "gpfs", "hdfs", "juicefs", "lustre", "mfs", "moosefs", "mountpoint-s3", "ncpfs", "nfs",
        "nfs4", "objectivefs", "obsfs", "orangefs", "ossfs", "ossfs2", "panfs", "rclone",
        "s3fs", "s3ql", "seaweedfs", "smb3", "smbfs", "smbnetfs", "sshfs", "tigrisfs", "wekafs",
    }
)  # fmt: skip
"""Types, those of FUSE without their ``fuse.``."""


def require_safe_library(library: ModuleType = dbapi2) -> str:
    """Return the version of the SQLite library in use.

    Raises:
        UnsafeStoreError: the library has the WAL-reset bug.
    """
    version: tuple[int, ...] = tuple(int(part) for part in library.sqlite_version.split("."))
    fixed = version >= _FIXED_IN[-1] or any(
        version[:2] == low[:2] and version >= low for low in _FIXED_IN
    )
    if version >= _FIRST_AFFECTED and not fixed:
        raise errors.UnsafeStoreError(
            f"SQLite {library.sqlite_version} can lose committed transactions when a checkpoint "
            "races a commit (the WAL-reset bug, sqlite.org/wal.html): install pysqlite3 >= 0.6.1, "
            "which carries a fixed one; where it has no wheel, run a Python whose own SQLite is "
            "3.51.3 or newer, or use PostgreSQL (postgresql://...)"
        )
    return str(library.sqlite_version)


def mount_table(path: Path) -> list[tuple[str, str, str]]:
    """Return source, mount point and type of the mounts in order, where the system lists them."""
    try:
        lines = path.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    mounts = []
    for line in lines:  # split first: an escaped space is part of its word
        words = [_ESCAPED.sub(lambda octal: chr(int(octal[1], 8)), w) for w in line.split(" ")]
        mounts.append((words[0], words[1], words[2]))
    return mounts


_ESCAPED = re.compile(r"\\([0-7]{3})")  # the kernel writes spaces, tabs and backslashes in octal


def file_system_of(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Return the type of the file system of ``path``, or "" where the system does not tell."""
    target = str(path.resolve())
    best, kind = -1, ""
    for source, point, file_system in mount_table(mounts):
        inside = target == point or target.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:
            # One of FUSE that names no type may name itself as its source, as mountpoint-s3 does.
            kind = f"fuse.{source}" if file_system == "fuse" else file_system
            best = len(point)
    return kind


def check_path(path: Path, *, read_only: bool, mounts: Path = Path("/proc/self/mounts")) -> bool:
    """Return whether there is a file at ``path``; refuse what could not work or would lose data.

    Raises:
        UnknownStoreError: no such folder, a folder in place of a file, or nothing to read.
        ReadOnlyStoreError: the file or its folder cannot be written.
        UnsafeStoreError: the folder is on a network file system, where SQLite's locks and shared
            memory do not hold; or the file has other names (hard links, or it is mounted by
            itself), or lies not beside its log.
        StoreUseError: this process was forked from one that had the file open.
    """
    folder = path.parent
    with suppress(FileNotFoundError, NotADirectoryError):  # which the next lines tell apart
        try:
            path.stat()
        except PermissionError as error:
            raise errors.UnknownStoreError(f"{path} cannot be reached: {error.strerror}") from error
    if not folder.is_dir():
        if read_only:  # a folder that is made would not help a reader
            raise nothing_at(path)
        raise errors.UnknownStoreError(
            f"{folder}: no such directory; create it first (mkdir -p {folder})"
        )
    if path.is_dir():
        raise errors.UnknownStoreError(
            f"{path} is a directory; name a file in it, such as {path / 'run.db'}"
        )
    exists = path.exists()
    if read_only and not exists:
        raise nothing_at(path)
    for danger in _dangers(path, mounts):
        raise errors.UnsafeStoreError(danger)
    _require_not_inherited(path)
    if not read_only and not os.access(path if exists else folder, os.W_OK):
        raise errors.ReadOnlyStoreError(
            f"{path if exists else folder} cannot be written; open it with read_only=True or fix "
            "its permissions"
        )
    return exists


def _dangers(path: Path, mounts: Path) -> Iterator[str]:
    """Yield why what is written to a file could be lost."""
    kind = file_system_of(path.parent, mounts)
    if kind.removeprefix("fuse.") in _NETWORK_FILE_SYSTEMS:
        yield (
            f"{path} is on a network file system ({kind}), where SQLite's locks and shared memory "
            "do not hold: put the store on a local disk, or use PostgreSQL (postgresql://...)"
        )
    whole = path.resolve()
    log = whole.with_name(f"{whole.name}-wal")
    left = _look_at(log)  # first: a store that is being made has a log later than a size
    there = _look_at(path)
    if there is not None and there.st_nlink > 1:
        yield (
            f"{path} is one file of {there.st_nlink} names (hard links): SQLite keeps a log beside "
            "each, and loses under one what is written under another. Keep one name "
            f"(find / -samefile {path} lists them), or make a copy of the file"
        )
    if left is not None and left.st_size and (there is None or there.st_size == 0):
        yield (
            f"{path} is missing or empty, but its log {log.name} may hold the last commits, which "
            "a new store would throw away: put the store back beside its log, or move the log away"
        )
    # The log lies beside the mount point then, and that of another process beside the file.
    for mounted in {point for _, point, _ in mount_table(mounts)} & {
        str(whole),
        f"{whole}-wal",
        f"{whole}-shm",
    }:
        yield (
            f"{mounted} is mounted as a single file (docker -v FILE:FILE): SQLite keeps the log "
            "beside each path of the file, and loses under one path what is written under "
            f"another. Mount the folder instead (docker -v {whole.parent}:/store)"
        )


class StoreFiles:
    """The database and its log, by device and inode, as they were when they were opened.

    A connection keeps the file that it opened. If that is removed or replaced, or its folder is
    moved, commits go on into a file that no path leads to any more.

    Args:
        path: of the database.
        with_log: check the write-ahead log and its index too, which stay as long as a writer has
            the database open.
    """

    def __init__(self, path: Path, *, with_log: bool) -> None:
        # The log lies beside what a link to the database leads to; the link itself may be changed.
        beside = str(path.resolve())
        self._paths = [str(path.absolute())]
        if with_log:
            self._paths += [f"{beside}-wal", f"{beside}-shm"]
        self._known: list[tuple[int, int] | None] = []

    def check(self, *, note: bool = False) -> None:
        """Raise unless the paths still name the same files; before they are noted any will do.

        Args:
            note: take the files that are there for the ones that were opened.

        Raises:
            StoreReplacedError: one was removed or replaced.
        """
        there: list[tuple[int, int] | None] = []
        for path in self._paths:
            try:
                status = os.stat(path)  # noqa: PTH116 - after every commit: a third of the time
            except OSError:
                there.append(None)
            else:
                there.append((status.st_dev, status.st_ino))
        if note:
            self._known = there
        if there == self._known or not self._known:
            return
        for path, known, identity in zip(self._paths, self._known, there, strict=True):
            if known is None and identity is not None:
                raise errors.StoreReplacedError(
                    f"another process writes to the store ({path} appeared), which was opened as a "
                    "file that does not change: open it again"
                )
            if identity != known:
                what = "removed" if identity is None else "replaced by another file"
                raise errors.StoreReplacedError(
                    f"{path} was {what} while this process had it open: what it writes now is lost "
                    "when it ends. Nothing of this call is acknowledged; end every process that "
                    "uses the store, put the file back, and write again"
                )


_SHARED = (0x40000002, 510)
"""The first byte, and how many, that SQLite locks as long as it reads a database."""

_open: set[OpenFile] = set()
"""What is open here."""

_inherited: dict[tuple[int, int], int] = {}
"""Device and inode of each file that was open when this process was forked -> by which one."""


class OpenFile:
    """A file that this process has open, so that others do not take themselves for the last.

    SQLite's own lock says so too, but the kernel drops it as soon as the process closes the file
    elsewhere: to copy it, or through another SQLite library, as that of Python's `sqlite3`. Then
    the last process that closes the database removes the log, and later commits to it are lost. So
    there is a second lock, of the kind that belongs to an open file.

    Raises:
        UnknownStoreError: it cannot be read, or was removed.
    """

    def __init__(self, path: Path) -> None:
        try:
            self.file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise errors.UnknownStoreError(f"{path} cannot be opened: {error.strerror}") from error
        status = os.fstat(self.file)
        self.inode = (status.st_dev, status.st_ino)

    def lock_log(self, kind: int = F_RDLCK) -> None:
        """Keep other processes from removing the log; with ``F_UNLCK`` no longer.

        That comes before SQLite closes the file.
        """
        if self in _open and hasattr(fcntl, "F_OFD_SETLK"):
            with suppress(OSError):  # a file system that has none
                fcntl.fcntl(self.file, fcntl.F_OFD_SETLK, flock(kind, *_SHARED))


# ``struct flock``: Python leaves its layout to callers of ``F_GETLK``.
if sys.platform == "darwin":
    FLOCK, FLOCK_FIELDS = struct.Struct("qqihh"), ("start", "len", "pid", "type", "whence")
else:
    FLOCK, FLOCK_FIELDS = struct.Struct("hhqqi0q"), ("type", "whence", "start", "len", "pid")


def flock(kind: int, start: int, size: int) -> bytes:
    """Return the ``struct flock`` of ``size`` bytes from ``start`` on."""
    asked = {"type": kind, "whence": os.SEEK_SET, "start": start, "len": size, "pid": 0}
    return FLOCK.pack(*map(asked.__getitem__, FLOCK_FIELDS))


@contextmanager
def open_here(path: Path) -> Iterator[OpenFile]:
    """Keep processes that are forked meanwhile from opening the file at ``path``."""
    file = OpenFile(path)
    _open.add(file)
    try:
        yield file
    finally:
        if file in _open:  # not in a forked child
            _open.remove(file)
            os.close(file.file)


def _note_inherited() -> None:
    _inherited.update(dict.fromkeys((file.inode for file in _open), os.getppid()))
    for file in _open:  # or its lock would last as long as this process
        os.close(file.file)
    _open.clear()


os.register_at_fork(after_in_child=_note_inherited)


def _require_not_inherited(path: Path) -> None:
    """Refuse a file that was open at a fork: SQLite believes to hold locks that it does not.

    A fork copies its list of locks, but not the locks. The parent then takes itself for the last
    process that has the database open, and removes the log while the child commits to it.
    """
    there = _look_at(path)
    parent = None if there is None else _inherited.get((there.st_dev, there.st_ino))
    if parent is not None:
        raise errors.StoreUseError(
            f"{path} was open in process {parent} when that was forked into {os.getpid()}, whose "
            "commits could be lost: start the child with spawn or forkserver, or fork it before "
            "the store is opened"
        )


def _look_at(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def uri_of(path: Path, *, writes: bool = False, still: bool = False) -> str:
    """Return the URI of a file that is there; ``still``: see `is_still`."""
    mode = "rw" if writes else "ro"
    return f"file:{quote(str(path.resolve()))}?mode={mode}{'&immutable=1' if still else ''}"


def is_still(path: Path) -> bool:
    """Return whether a file can be read without locks: nothing writes it, nor could this process.

    SQLite reads a database with a write-ahead log through shared memory beside it, which a folder
    that cannot be written has no place for.

    Raises:
        ReadOnlyStoreError: its log holds commits that cannot be read without shared memory.
    """
    whole = path.resolve()
    if os.access(whole.parent, os.W_OK):
        return False
    log = whole.with_name(f"{whole.name}-wal")
    if not log.exists() or log.stat().st_size == 0:
        return True
    if log.with_name(f"{whole.name}-shm").exists():
        return False
    raise errors.ReadOnlyStoreError(
        f"{path}: its log {log.name} holds commits that cannot be read in {whole.parent}, which "
        f"cannot be written: copy {whole.name} and {log.name} to a folder of your own"
    )


def in_use(path: Path) -> bool:
    """Return whether another connection has the database open."""
    connection = dbapi2.connect(uri_of(path, writes=True), uri=True, timeout=0)
    try:
        connection.isolation_level = None
        # Every connection that has read from a database with a log keeps a shared lock on it.
        connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        connection.execute("BEGIN EXCLUSIVE")
        connection.execute("ROLLBACK")
    except dbapi2.OperationalError as error:
        if "locked" not in str(error):
            raise
        return True
    finally:
        connection.close()
    return False


def open_blob(
    connection: Any, table: str, column: str, row: int, *, read_only: bool = False
) -> Any:
    """Return one value as a file, to be read or written in place.

    Python's library calls it otherwise.
    """
    if hasattr(connection, "blobopen"):
        return connection.blobopen(table, column, row, readonly=read_only)
    return connection.open_blob(table, column, row, read_only)


def pragmas(*, durability: str, read_only: bool) -> list[str]:
    """Return the statements that every new connection runs first."""
    every = [
        f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}",
        "PRAGMA mmap_size=0",
        f"PRAGMA cache_size=-{READ_CACHE_KIB if read_only else CACHE_KIB}",
        "PRAGMA temp_store=MEMORY",
        "PRAGMA foreign_keys=OFF",
    ]
    if read_only:
        return [*every, "PRAGMA query_only=ON", "PRAGMA wal_autocheckpoint=0"]
    return [
        *every,
        f"PRAGMA synchronous={'FULL' if durability == 'full' else 'NORMAL'}",
        f"PRAGMA wal_autocheckpoint={sizes.wal_pages_limit}",
        f"PRAGMA journal_size_limit={JOURNAL_SIZE_LIMIT_BYTES}",
    ]


# page_size and auto_vacuum are silently ignored once the database is in WAL mode, hence the order.
CREATION_PRAGMAS = (
    f"PRAGMA page_size={PAGE_SIZE_BYTES}",
    "PRAGMA auto_vacuum=INCREMENTAL",
    "PRAGMA journal_mode=WAL",
    f"PRAGMA application_id={APPLICATION_ID}",
)


def prepare_file(path: Path) -> None:
    """Give a file without tables its page size and journal mode, which must precede the first one.

    A store that was given another journal mode (``VACUUM INTO`` does so to a copy) gets ours again.
    """
    connection = dbapi2.connect(str(path), isolation_level=None, timeout=BUSY_TIMEOUT_MS / 1000)
    try:
        # Not by its size: a process that was killed here leaves a page, and an older journal mode.
        if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
            for statement in CREATION_PRAGMAS:
                connection.execute(statement)
        elif connection.execute("PRAGMA application_id").fetchone()[0] == APPLICATION_ID:
            connection.execute("PRAGMA journal_mode=WAL")
    finally:
        connection.close()


_READ_LOCKS = range(123, 128)
"""Bytes of the shared memory that readers lock (sqlite.org/walformat.html, section 2.2)."""


@dataclass(frozen=True, slots=True)
class LogState:
    """The write-ahead log of one store.

    Attributes:
        size_bytes: on disk.
        limit_bytes: at which writers copy it into the database; it stays near that.
        readers: where it has grown, numbers of the other processes of this machine that hold one
            state open all the while.
    """

    size_bytes: int
    limit_bytes: int
    readers: tuple[int, ...]

    @property
    def has_grown(self) -> bool:
        """Whether it has grown because it could not restart."""
        return self.size_bytes > 2 * self.limit_bytes

    def message(self) -> str:
        """Return a sentence on what keeps the log long."""
        size, limit = self.size_bytes >> 20, self.limit_bytes >> 20
        text = f"the write-ahead log has {size} MiB where {limit} are usual: "
        if self.readers:
            pids = ", ".join(map(str, self.readers))
            return f"{text}a reader holds an old state open (pid {pids}); end its read transaction"
        return (
            f"{text}no process that is visible here holds an old state open; a reader in "
            "another container may, or writers leave no pause in which it could restart"
        )

    @property
    def remedy(self) -> str:
        """How to let it restart."""
        if self.readers:
            return "end the process that reads"
        return "look again when the writers pause: if it stays, end the reader in another container"


def log_state(path: Path) -> LogState:
    """Return the state of the log of the database at ``path``, or at what a link there leads to."""
    path = path.resolve()
    log = path.with_name(f"{path.name}-wal")
    size = log.stat().st_size if log.exists() else 0
    limit = sizes.wal_pages_limit * PAGE_SIZE_BYTES
    state, shared = LogState(size, limit, ()), path.with_name(f"{path.name}-shm")
    held = _read_locks(shared) if state.has_grown else set()
    # Who reads at each of several looks: writers read only for a moment.
    for _ in range(LOOKS - 1):
        if held:
            time.sleep(LOOK_AGAIN_S)
            held &= _read_locks(shared)
    return replace(state, readers=tuple(sorted({pid for pid, _ in held})))


def _read_locks(shared: Path, locks: Path = Path("/proc/locks")) -> set[tuple[int, int]]:
    """Return the number of each other process that reads now, and which byte it has locked."""
    try:
        inode, lines = shared.stat().st_ino, locks.read_text().splitlines()
    except OSError:
        return set()
    locked = set()
    for line in lines:
        fields = line.split()  # 1: POSIX ADVISORY READ pid major:minor:inode start end
        if len(fields) == 8 and fields[5].rpartition(":")[2] == str(inode):
            pid, start = int(fields[4]), int(fields[6])
            if start in _READ_LOCKS and pid > 0 and pid != os.getpid():
                locked.add((pid, start))
    return locked


LOOKS, LOOK_AGAIN_S = 4, 0.02
"""How often, and after how many seconds, the readers are listed again."""
PAUSE_S = 0.25
"""How long commits are collected before the log is looked at."""

_logger = logging.getLogger(__name__)


class Checkpointer:
    """Copies what is committed from the log into the database, while there are commits.

    Its thread starts with the first commit. Several processes may each have one: while one works,
    the others skip their turn.

    Args:
        path: of the database.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._committed = Event()
        self._closing = Event()
        self._thread: Thread | None = None
        self.checkpoints = 0
        self._told_at = 0  # pages

    def notify(self) -> None:
        """Note a commit. This is cheap."""
        if self._thread is None:
            self._thread = Thread(target=self._run, name="trinity-buffer-checkpoint", daemon=True)
            self._thread.start()
        self._committed.set()

    def close(self) -> None:
        """End the thread; a checkpoint that is under way is finished first."""
        self._closing.set()
        self._committed.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        # Opened only if it is there: an empty file in its place would be another database.
        name = uri_of(self._path, writes=True)
        try:
            connection = dbapi2.connect(name, uri=True, isolation_level=None)
        except dbapi2.OperationalError as error:  # it was removed: the next commit finds out
            _logger.warning("checkpoint of %s: %s", self._path, error)
            return
        try:
            # Asked before each wait too: `close` may come just before its news is cleared.
            while not self._closing.is_set():
                self._committed.wait()
                if not self._closing.wait(PAUSE_S):
                    self._committed.clear()
                    self._checkpoint(connection)
        finally:
            connection.close()

    def _tell_of_growth(self, pages: int) -> None:
        """Warn each time the log has doubled beyond its limit."""
        if pages <= sizes.wal_pages_limit:
            self._told_at = 0
        elif pages > 2 * max(self._told_at, sizes.wal_pages_limit):
            self._told_at = pages
            _logger.warning("%s: %s", self._path, log_state(self._path).message())

    def _checkpoint(self, connection: Any) -> None:
        try:
            # Says how long the log is and how much of it was copied, and does nothing.
            _, pages, copied = connection.execute("PRAGMA wal_checkpoint(NOOP)").fetchone()
            if pages - copied >= sizes.wal_pages_per_checkpoint:
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
                self.checkpoints += 1
            self._tell_of_growth(pages)
        except dbapi2.OperationalError as error:
            # Such as a full disk: writers will meet it too, and raise it to their callers.
            _logger.warning("checkpoint of %s: %s", self._path, error)


PATIENCE_S = 2.0
"""A turn takes milliseconds: when none comes for so long, its holder was stopped."""

_JOINING = 1 << 60
"""The byte of the process that joins, far behind the end of any log; the queue is behind it."""


class WriterQueue:
    """The place of one `Database` in a fair queue of the processes that write to a SQLite file.

    SQLite lets waiting writers retry after longer and longer pauses: the process that has just
    written retries first, and another may wait for seconds. So writers queue up by locks on bytes
    of the write-ahead log, in which SQLite itself locks nothing: a new one locks the byte behind
    the last, and waits for the byte before it. While it joins it holds one more byte, so that no
    two see the same end. Each release wakes one process.

    This is for fairness alone. A process that gets no turn in time goes ahead without one, and
    SQLite's own lock decides. The kernel frees the locks of a killed process; a forked child does
    not inherit them. They belong to the process: two `Database` of one process do not wait for each
    other here, and lose the turn when one of them is closed or finds the queue empty.

    Args:
        path: of the database.
    """

    def __init__(self, path: Path) -> None:
        whole = path.resolve()
        self._log = whole.with_name(f"{whole.name}-wal")
        self._file: int | None = None
        self._state = Condition()
        self._place = 0  # the byte in the line; 0: not joined yet
        self._waits = False  # a thread does, for the turn
        self._wanted = self._mine = self._closed = False

    def acquire(self) -> None:
        """Return when it is the turn of this process, or after `PATIENCE_S`.

        Where an earlier call ran out of patience and its turn has not come yet, return at once. So
        it is where an earlier call has the turn: it writes on although its caller was cancelled.
        """
        with self._state:
            if self._waits or self._mine or self._closed:
                return
            if self._file is None:
                try:
                    self._file = os.open(self._log, os.O_RDWR | os.O_CLOEXEC)
                except OSError:  # there is no log yet, or no right to it: SQLite will say so
                    return
            with suppress(OSError):  # the queue is empty, and no process joins it
                lockf(self._file, LOCK_EX | LOCK_NB, 0, _JOINING)
                self._place, self._mine = _JOINING + 1, True
                lockf(self._file, LOCK_UN, 0, _JOINING + 2)
                lockf(self._file, LOCK_UN, 1, _JOINING)
                return
            self._join(self._file, LOCK_NB)
            self._mine = self._place == _JOINING + 1
            if self._mine:
                return
            try:
                Thread(target=self._wait, args=(self._file,), daemon=True).start()
            except RuntimeError:  # there are too many threads, or the interpreter ends
                if self._place:
                    lockf(self._file, LOCK_UN, 1, self._place)
                return
            self._waits = self._wanted = True
            self._state.wait_for(lambda: not self._waits, PATIENCE_S)
            self._wanted = False

    def release(self) -> None:
        """Let the next process write."""
        with self._state:
            if self._mine and self._file is not None:
                self._mine = False
                with suppress(OSError):  # what was written is written
                    lockf(self._file, LOCK_UN, 1, self._place)

    def close(self) -> None:
        """Leave the queue."""
        with self._state:
            self._closed = True
            if self._file is not None and not self._waits:
                os.close(self._file)
                self._file = None

    def _join(self, file: int, or_not: int = 0) -> None:
        """Join the queue at its end; with ``LOCK_NB`` not if another process is joining."""
        self._place = 0
        with suppress(OSError):
            lockf(file, LOCK_EX | or_not, 1, _JOINING)
            try:
                place = _last(file) + 1
                lockf(file, LOCK_EX | LOCK_NB, 1, place)
                self._place = place
            finally:
                lockf(file, LOCK_UN, 1, _JOINING)

    def _wait(self, file: int) -> None:
        """Wait for the turn without a limit; release it if no writer wants it any more.

        In a thread of its own, as the kernel has no timeout for such a wait.
        """
        if not self._place:
            self._join(file)
        got = False
        with suppress(OSError):  # such as EDEADLK, which the kernel guesses where threads wait
            while self._place and not got:  # again, if the one before was killed
                before = _last(file, self._place)
                got = before == _JOINING
                if not got:
                    lockf(file, LOCK_EX, 1, before)
                    lockf(file, LOCK_UN, 1, before)
        with self._state:  # to the end: a concurrent `close` waits for it
            self._waits = False
            self._mine = got and self._wanted
            self._state.notify()
            if self._place and not self._mine:
                lockf(file, LOCK_UN, 1, self._place)
            if self._closed:
                os.close(file)
                self._file = None


def _last(file: int, end: int = 0) -> int:
    """Return the last byte of the queue before ``end`` that another process has locked.

    `_JOINING` if the queue is empty; without ``end``, of the whole queue.
    """
    last = _JOINING
    while last + 1 != end:
        size = end and end - last - 1  # 0: however far
        answer = fcntl.fcntl(file, F_GETLK, flock(F_WRLCK, last + 1, size))
        lock = dict(zip(FLOCK_FIELDS, FLOCK.unpack(answer), strict=True))
        if lock["type"] == F_UNLCK:
            break
        last = lock["start"] + lock["len"] - 1
    return last
