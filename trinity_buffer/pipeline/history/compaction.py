"""Retention: the tensors of what was trained long ago leave the database, on request only.

Events, manifests and lineage stay; only segments go, to a Parquet file or for good. A segment goes
when every trainer of the experiment has committed, before its horizon, all that it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio.to_thread

from trinity_buffer.crash_points import reached
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.events import SegmentsArchived
from trinity_buffer.pipeline.archive_file import require_pyarrow, write_archive
from trinity_buffer.pipeline.events import new_event, now_us
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.sizes import sizes
from trinity_buffer.store import log, retention, segments
from trinity_buffer.store.transaction import Transaction

FAMILIES = ("light", "tokens", "text", "heavy")


@dataclass(frozen=True, slots=True)
class CompactionReport:
    """What has left the database.

    Attributes:
        segments: how many segments.
        bytes: how many bytes of tensors.
        files: the Parquet files they are in now; none if they were deleted for good.
    """

    segments: int
    bytes: int
    files: tuple[str, ...]


async def compact(
    experiment: Experiment,
    *,
    keep_steps: int,
    archive: Path | None,
    delete: bool = False,
    actor: str = "compact",
) -> CompactionReport:
    """Archive, or delete, the segments of what was committed more than ``keep_steps`` steps ago.

    May be killed at any point and run again: a segment is deleted in the transaction that records
    where it went, and a file that no event names is written anew.

    Args:
        keep_steps: of each trainer; what its last steps were trained on stays.
        archive: folder for the Parquet files.
        delete: needed to go without an archive.

    Raises:
        InvalidArgumentError: neither ``archive`` nor ``delete``, or pyarrow is not installed.
    """
    if (archive is None) == (not delete):
        raise InvalidArgumentError("compact: give a folder to archive to, or delete=True, not both")
    if keep_steps < 0:
        raise InvalidArgumentError(f"keep_steps={keep_steps}: it must not be negative")
    if archive is not None:
        require_pyarrow()
    key = experiment.key
    finished = partial(retention.finished_segments, experiment=key, keep_steps=keep_steps)
    total, size, after, files = 0, 0, -1, list[str]()
    while True:
        page = await experiment.database.read(finished, after=after, limit=sizes().rows_per_file)
        if page is None:
            return CompactionReport(total, size, tuple(files))
        after, keys = page
        if not keys:
            continue
        stored = await experiment.database.read(segments.read, keys, FAMILIES)
        uri = None
        if archive is not None:
            write = partial(write_archive, archive, experiment.name, stored)
            uri = await anyio.to_thread.run_sync(write)
            files.append(uri)
        reached("before-compact")
        event = new_event(SegmentsArchived(segments=list(keys), uri=uri))
        await experiment.database.write(_forget, experiment.key, keys, event, actor)
        reached("after-compact")
        total += len(keys)
        size += sum(len(data) for parts in stored.values() for _, _, data in parts)


def _forget(
    tx: Transaction, experiment: int, keys: Sequence[bytes], event: log.NewEvent, actor: str
) -> None:
    log.append(tx, experiment, [event], actor=actor, now_us=now_us())
    segments.delete(tx, keys)
    reached("inside-compact")
