"""Checkpoints on disk: flushed before a commit names them, and identified by their digest.

A small file is hashed whole, a large one in pieces that several threads hash in parallel. Digests
of version 1, in older stores, hash each file whole.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from trinity_buffer.errors import CheckpointError
from trinity_buffer.limits import sizes
from trinity_buffer.pipeline.manifest import FIRST_LINK, ManifestChain

PIECE_BYTES = 64 * 1024 * 1024
"""The largest file that is hashed whole in version 2. Part of the format: another value would
change the digest of the same files."""

VERSION = 2
"""Version of new digests."""

THREADS = 16
"""Upper bound of threads that read, hash or write files in parallel."""

_IN_PIECES = "pieces:"
_VERSION = re.compile(r"v(\d+):")
_LEAST_MEMORY = 4096

Item = TypeVar("Item")
Result = TypeVar("Result")


def version_of(digest: str | None) -> int:
    """Return the version of a recorded digest; for None, that of new digests.

    Raises:
        CheckpointError: a newer version of this package made it.
    """
    if digest is None:
        return VERSION
    mark = _VERSION.match(digest)
    version = 1 if mark is None else int(mark[1])
    if version not in (1, VERSION):
        raise CheckpointError(
            f"the digest {digest[:12]}… of a checkpoint is of version {version}, this package "
            f"computes versions 1 and {VERSION}: use a newer version of trinity-buffer"
        )
    return version


def is_content(text: str | None, size: int) -> bool:
    """Return whether ``text`` has the form of a new hash of a file of ``size`` bytes."""
    return text is not None and text.startswith(_IN_PIECES) == (size > PIECE_BYTES)


def contents_of(files: Sequence[Path], version: int = VERSION) -> list[str]:
    """Return the hash of the content of each of ``files``.

    It is the sha256 of the file; in version 2, for files larger than `PIECE_BYTES`, the sha256 over
    the sha256 of each piece in order, marked by a prefix.
    """
    pieces: list[list[tuple[Path, int, int]]] = []
    for file in files:
        size = file.stat().st_size
        if version == 1 or size <= PIECE_BYTES:
            pieces.append([(file, 0, sys.maxsize)])  # to the end: some report a size of 0
        else:
            begins = range(0, size, PIECE_BYTES)
            pieces.append([(file, at, min(PIECE_BYTES, size - at)) for at in begins])
    hashed = iter(side_by_side(_sha256, [piece for own in pieces for piece in own]))
    contents = []
    for own in pieces:
        first, *others = islice(hashed, len(own))
        joined = hashlib.sha256(b"".join((first, *others))).hexdigest()
        contents.append(_IN_PIECES + joined if others else first.hex())
    return contents


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return ``work(item)`` for each of ``items``, in order, computed in threads.

    If threads cannot be started, ``work`` may be called twice with an item.
    """
    threads = min(THREADS, os.cpu_count() or 1, len(items))
    if threads < 2:
        return [work(item) for item in items]
    try:
        with ThreadPoolExecutor(threads, thread_name_prefix="checkpoint") as pool:
            results = pool.map(work, items)
    except RuntimeError:  # the thread limit is reached, or the main thread has ended
        return [work(item) for item in items]
    return [*results]


_BUFFERS: SimpleQueue[bytearray] = SimpleQueue()
"""Memory of the threads that hash, one each, used again: a process that maps new memory halts all
its threads. The other half of the processors keeps a GPU busy meanwhile."""


def _fill_buffers() -> None:
    while _BUFFERS.qsize() < max(2, (os.cpu_count() or 1) // 2):
        _BUFFERS.put(bytearray(_LEAST_MEMORY))


_fill_buffers()
# Buffers that threads of the parent held at the fork never come back to the child.
os.register_at_fork(after_in_child=_fill_buffers)


def _sha256(part: tuple[Path, int, int]) -> bytes:
    """Return the sha256 of ``length`` bytes of a file, from ``begin`` on."""
    file, begin, length = part
    digest, buffer = hashlib.sha256(), _BUFFERS.get()
    try:
        with file.open("rb", buffering=0) as handle:
            # Few large reads: after each, this thread waits for the interpreter lock of the
            # trainer, which hashlib releases too.
            at_once = sizes.bytes_per_hash
            size = min(length, os.fstat(handle.fileno()).st_size, at_once)
            if size > len(buffer):
                buffer = bytearray(size)
            memory = memoryview(buffer)[:at_once]
            handle.seek(begin)
            while length and (read := handle.readinto(memory[:length])):
                length -= read
                digest.update(memory[:read])
    finally:
        _BUFFERS.put(buffer)
    return digest.digest()


MANIFESTS_FILE = "manifests.json"
"""File in a checkpoint's folder with the manifests its weights were trained on."""


def make_durable(checkpoint: Path, known: dict[Path, str] | None = None) -> str:
    """Flush a checkpoint (a file or a folder) to disk and return its digest.

    The digest is the sha256 over the sorted (relative path, size, content hash) of its files.
    Symbolic links are followed: a file loaded through a link is part of the checkpoint. If a file
    is hashed in pieces (`contents_of`), the digest begins with its version, "v2:".

    Args:
        checkpoint: path of the checkpoint.
        known: file -> hash from `written`; missing files, and those with a hash of an old form, are
            added.

    Raises:
        CheckpointError: nothing at this path, an empty folder, a file that disappears meanwhile, a
            broken or circular link, or an entry that is neither file nor folder.
    """
    known = {} if known is None else known
    with _staying(checkpoint):
        files, folders = _content(checkpoint)
        for file in known.keys() - files:
            if file.is_relative_to(checkpoint):
                raise CheckpointError(
                    f"checkpoint {checkpoint} lacks {file.relative_to(checkpoint)}, which another "
                    "rank wrote: all ranks need the same folder, on a file system that they share"
                )
        new = [file for file in files if not is_content(known.get(file), file.stat().st_size)]
        known.update(zip(new, written(new), strict=True))
        for folder in (*folders, checkpoint.parent):
            fsync(folder)
    return digest_of(checkpoint, known)


def written(files: Sequence[Path]) -> list[str]:
    """Flush ``files`` to disk and return the hash of the content of each, see `contents_of`."""
    if sum(file.stat().st_size for file in files) <= PIECE_BYTES:
        for file in files:
            fsync(file)
        return contents_of(files)
    # Flushing keeps the disk busy and hashing the processors, so run both at the same time.
    works: list[Callable[[], Any]] = [partial(contents_of, files)]
    works += [partial(fsync, file) for file in files]
    contents: list[str] = side_by_side(lambda work: work(), works)[0]
    return contents


def digest_of(
    checkpoint: Path, known: Mapping[Path, str] | None = None, *, like: str | None = None
) -> str:
    """Return the digest of a checkpoint, like `make_durable` but without flushing.

    Args:
        checkpoint: path of the checkpoint.
        known: file -> hash, of files that need not be read.
        like: a recorded digest to compare with: the result has the same version.

    Raises:
        CheckpointError: nothing at this path, an empty folder, a file that disappears meanwhile, or
            an unknown version of ``like``.
    """
    total, known, version = hashlib.sha256(), {} if known is None else known, version_of(like)
    with _staying(checkpoint):
        files = _content(checkpoint)[0]
        new = [file for file in files if file not in known]
        contents = {**known, **dict(zip(new, contents_of(new, version), strict=True))}
        for file in files:
            name = file.name if file == checkpoint else file.relative_to(checkpoint).as_posix()
            line = f"\0{file.stat().st_size}\0{contents[file]}\n".encode()
            total.update(os.fsencode(name) + line)  # a name may be any bytes
    in_pieces = any(contents[file].startswith(_IN_PIECES) for file in files)
    return f"v{VERSION}:{total.hexdigest()}" if in_pieces else total.hexdigest()


@contextmanager
def _staying(checkpoint: Path) -> Iterator[None]:
    """Turn errors of files that disappear or cannot be read or written into CheckpointError."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(
            f"checkpoint {checkpoint} is being removed while it is read, {error.filename} is gone: "
            "a trainer that took over tidies up so; start again to resume from the last commit"
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {checkpoint} cannot be read, or written through to its disk: {error}; "
            "nothing was committed: look after the disk, and start again"
        ) from error


@contextmanager
def being_read(path: Path) -> Iterator[None]:
    """Make `may_remove` return False for the file ``path`` while the body runs.

    By a lock of the operating system, which a process that dies releases. A path that is not a file
    here, such as the address of a server, needs no lock.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        yield  # the body reports that it cannot read it
        return
    try:
        with suppress(OSError):  # a file system without locks: the reader retries if it is gone
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def may_remove(path: Path) -> bool:
    """Return whether no process is reading the file ``path`` now; see `being_read`."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return True


def require_digest(checkpoint: Path, digest: str) -> None:
    """Raise unless the checkpoint is the one that was committed.

    Raises:
        CheckpointError: it is missing, or its content differs.
    """
    if (actual := digest_of(checkpoint, like=digest)) != digest:
        raise CheckpointError(
            f"checkpoint {checkpoint} is not the one that was committed (sha256 {actual[:12]}…, "
            f"recorded {digest[:12]}…): restore it, or resume from an older step with resume_from="
        )


def read_manifest_chain(folder: Path) -> ManifestChain:
    """Return the manifests that the weights in ``folder`` were trained on.

    Raises:
        CheckpointError: the folder does not name them.
    """
    try:
        content = json.loads((folder / MANIFESTS_FILE).read_text())
        last = tuple(bytes.fromhex(digest) for digest in content["manifests"])
        if "before" not in content:  # older versions listed all of them
            return ManifestChain(len(last), FIRST_LINK, last)
        return ManifestChain(int(content["length"]), bytes.fromhex(content["before"]), last)
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        within = max(folder.glob(f"step-*/{MANIFESTS_FILE}"), default=None)
        meant = "" if within is None else f" (did you mean {within.parent}?)"
        raise CheckpointError(
            f"{folder} holds no {MANIFESTS_FILE} of a trainer: {error}{meant}"
        ) from error


def write_manifest_chain(folder: Path, manifests: ManifestChain, log_head: str) -> None:
    """Write the file that `read_manifest_chain` and `read_head` read."""
    content = {
        "manifests": [digest.hex() for digest in manifests.last],
        "before": manifests.before.hex(),
        "length": manifests.length,
        "chain": manifests.link.hex(),
        "log_head": log_head,
    }
    (folder / MANIFESTS_FILE).write_text(json.dumps(content))


def read_head(folder: Path) -> bytes:
    """Return the head of the log that a checkpoint names; empty if it names none."""
    try:
        return bytes.fromhex(json.loads((folder / MANIFESTS_FILE).read_text())["log_head"])
    except (OSError, ValueError, KeyError, TypeError):
        return b""


def _content(checkpoint: Path) -> tuple[list[Path], list[Path]]:
    """Return the files of a checkpoint, sorted, and its folders."""
    files = [] if checkpoint.is_dir() else [checkpoint]
    folders: list[Path] = []
    failures: list[OSError] = []  # as of a folder that may not be read
    for name, _, names in os.walk(checkpoint, followlinks=True, onerror=failures.append):
        folder = Path(name)
        # A link that leads back to a folder around it would never end.
        if folder.is_symlink() and folder.parent.resolve().is_relative_to(folder.resolve()):
            raise CheckpointError(f"checkpoint: the link {folder} leads back to where it lies")
        folders.append(folder)
        files += [folder / name for name in names]
    if failures and checkpoint.is_dir():
        raise failures[0]
    for file in files:
        if not file.is_file() and (file.is_symlink() or file.exists()):
            what = "leads nowhere" if file.is_symlink() else "is no file"
            raise CheckpointError(
                f"checkpoint {checkpoint} is broken, {file} {what}: write it before commit(), or "
                "resume from an older step"
            )
    if not files or not checkpoint.exists():
        raise CheckpointError(
            f"checkpoint {checkpoint} is missing or empty: write it before commit(); if a commit "
            "names it, restore it, or resume from an older step with resume_from="
        )
    return sorted(files), folders


def resolve_moved(path: str, digest: str | None, beside: Path | None) -> Path:
    """Return the current path of a recorded file, which may have moved together with the store.

    A run's folder may be moved as a whole: files beside the store, or below it, move along.

    Args:
        path: the recorded path.
        digest: the recorded digest. Without one, a file elsewhere cannot be identified.
        beside: folder of the store; None: it is on a server.
    """
    recorded = Path(path)
    if beside is None or digest is None or recorded.exists():
        return recorded
    parts = recorded.parts[1:]
    moved = (beside.joinpath(*parts[start:]) for start in range(len(parts)))
    return next((path for path in moved if path.exists()), recorded)


def fsync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
