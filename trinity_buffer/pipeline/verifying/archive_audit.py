"""Are the archives there that the log names, and as they were written?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from trinity_buffer.errors import DamagedSegmentError, StoreError
from trinity_buffer.identity import FAMILIES
from trinity_buffer.pipeline.archive import digest_of, read_archive
from trinity_buffer.pipeline.load.segments import blobs_of
from trinity_buffer.pipeline.verifying.findings import Problem


def check_archives(
    files: Mapping[str, tuple[int, str | None]],
    archived: Mapping[bytes, str | None],
    *,
    quick: bool,
) -> Iterator[Problem]:
    """Yield what is wrong with the files of segments that are not in the database.

    Args:
        files: path -> position of the event that names it, and the sha256 that it says.
        archived: key -> path.
        quick: open none, only look whether it is there.
    """
    held: dict[str, list[bytes]] = {}
    for key, path in archived.items():
        if path is not None:
            held.setdefault(path, []).append(key)
    for path, keys in held.items():
        position, digest = files[path]
        what = f"position {position} archived {len(keys)} segments to it"
        if not Path(path).is_file():
            yield Problem("archives", path, f"there is no such file, and {what}")
        elif not quick:
            yield from _check(path, keys, digest, what)


def _check(path: str, keys: list[bytes], digest: str | None, what: str) -> Iterator[Problem]:
    try:
        if digest is not None:
            found = digest_of(Path(path))
            if found != digest:
                what = f"its sha256 is {found}, {what} with {digest}"
                yield Problem("archives", path, what)
            return
        blobs_of(read_archive(path, keys, tuple(FAMILIES)))  # of a version that noted no digest
    except (OSError, StoreError, DamagedSegmentError) as error:
        yield Problem("archives", path, f"{what}, and {error}")
