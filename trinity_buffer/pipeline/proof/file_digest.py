"""What is hashed of the files of a checkpoint: a small one whole, a large one in pieces.

Several threads hash the pieces of a large file side by side. Digests of checkpoints that were
recorded before are of version 1, where each file is hashed whole.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TypeVar

from trinity_buffer.errors import CheckpointError
from trinity_buffer.sizes import sizes

PIECE_BYTES = 64 * 1024 * 1024
"""The largest file that is hashed whole in version 2. Part of the format: another number would make
another digest of the same files."""

VERSION = 2
"""Of the digests that are made now."""

THREADS = 16
"""The most that read, hash or write files side by side, however many files there are."""

_IN_PIECES = "pieces:"
_VERSION = re.compile(r"v(\d+):")
_LEAST_MEMORY = 4096

Item = TypeVar("Item")
Result = TypeVar("Result")


def version_of(digest: str | None) -> int:
    """Return the version of a recorded digest; of None, that of the digests that are made now.

    Raises:
        CheckpointError: a later version of this package made it.
    """
    if digest is None:
        return VERSION
    marked = _VERSION.match(digest)
    version = 1 if marked is None else int(marked[1])
    if version not in (1, VERSION):
        raise CheckpointError(
            f"the digest {digest[:12]}… of a checkpoint is of version {version}, this package "
            f"computes versions 1 and {VERSION}: use a newer version of trinity-buffer"
        )
    return version


def marked(digest: str, contents: Sequence[str]) -> str:
    """Return the digest of a checkpoint as it is recorded: with its version, where that matters.

    Args:
        contents: of its files, as `contents_of` returned them.
    """
    return f"v{VERSION}:{digest}" if any(map(_is_in_pieces, contents)) else digest


def is_content(text: str | None, size: int) -> bool:
    """Return whether ``text`` may be what `contents_of` returns now of a file of ``size`` bytes."""
    return text is not None and _is_in_pieces(text) == (size > PIECE_BYTES)


def contents_of(files: Sequence[Path], version: int = VERSION) -> list[str]:
    """Return the hash of the content of each of ``files``.

    That is sha256 of all of it; in version 2, of a file larger than `PIECE_BYTES`, sha256 over the
    sha256 of its pieces, in order, with a prefix that says so.
    """
    pieces = [_pieces_of(file.stat().st_size, version) for file in files]
    parts = [(file, *part) for file, own in zip(files, pieces, strict=True) for part in own]
    hashed = iter(side_by_side(_sha256, parts))
    return [_joined([*islice(hashed, len(own))]) for own in pieces]


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return the result of ``work`` for each of ``items``, in their order, computed in threads.

    Without threads ``work`` may be called twice with an item, one after the other.
    """
    threads = min(THREADS, os.cpu_count() or 1, len(items))
    if threads < 2:
        return [work(item) for item in items]
    try:
        with ThreadPoolExecutor(threads, thread_name_prefix="checkpoint") as pool:
            results = pool.map(work, items)
    except RuntimeError:  # there are no more threads, or the main one has ended while we train
        return [work(item) for item in items]
    return [*results]


def _is_in_pieces(content: str) -> bool:
    return content.startswith(_IN_PIECES)


def _pieces_of(size: int, version: int) -> list[tuple[int, int]]:
    """Return the begin and the length of what is hashed at once of a file of ``size`` bytes."""
    if version == 1 or size <= PIECE_BYTES:
        return [(0, sys.maxsize)]  # all that there is: not every file knows its size
    return [(at, min(PIECE_BYTES, size - at)) for at in range(0, size, PIECE_BYTES)]


def _joined(hashes: list[bytes]) -> str:
    if len(hashes) == 1:
        return hashes[0].hex()
    return _IN_PIECES + hashlib.sha256(b"".join(hashes)).hexdigest()


def _sha256(part: tuple[Path, int, int]) -> bytes:
    file, begin, length = part
    digest = hashlib.sha256()
    for chunk in _chunks(file, begin, length):
        digest.update(chunk)  # lets other threads go on
    return digest.digest()


def _chunks(file: Path, begin: int, length: int) -> Iterator[memoryview]:
    """Yield the bytes of a part of ``file``, each time in the same memory."""
    with file.open("rb", buffering=0) as handle:
        there = max(os.fstat(handle.fileno()).st_size, _LEAST_MEMORY)
        # Few large ones: each waits for the interpreter, which a trainer beside us may be using.
        memory = memoryview(bytearray(min(length, there, sizes().bytes_per_hash)))
        handle.seek(begin)
        while length and (read := handle.readinto(memory[:length])):
            length -= read
            yield memory[:read]
