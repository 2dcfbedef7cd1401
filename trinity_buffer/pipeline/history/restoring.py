"""Bringing archived segments back into the database."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio.to_thread

from trinity_buffer.errors import DamagedSegmentError, InvalidArgumentError, StoreError
from trinity_buffer.events import SegmentsRestored
from trinity_buffer.identity import FAMILIES
from trinity_buffer.pipeline.archive import read_archive
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.pipeline.handle import new_event, now_us
from trinity_buffer.pipeline.history.refold import Progress, no_progress
from trinity_buffer.pipeline.load.segments import blobs_of
from trinity_buffer.store import log, retention, segments
from trinity_buffer.store.log import NewEvent
from trinity_buffer.store.segments import SegmentRow, SegmentStore
from trinity_buffer.store.transaction import Transaction, lock_experiment


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What is in the database again.

    Attributes:
        segments: how many segments.
        bytes: how many bytes of tensors.
        files: where they came from; the files stay.
    """

    segments: int
    bytes: int
    files: tuple[str, ...]


async def restore(
    experiment: Experiment,
    *,
    folder: Path | None = None,
    actor: str = "restore",
    progress: Progress = no_progress,
) -> RestoreReport:
    """Bring everything that `compact` archived back into the database, byte for byte.

    One file after the other, each in one transaction with the event that says so: it may be killed
    at any point and run again. The files stay; what was deleted for good does not come back.

    Args:
        folder: where the files are now, if they were moved.
        progress: called with what is being done, how much of it is done, and how much there is.

    Raises:
        InvalidArgumentError: a file is not there, or is not the one that was written.
    """
    database, key = experiment.database, experiment.key
    files = await database.read(retention.archives, key)
    segments_back = bytes_back = 0
    for number, (uri, keys) in enumerate(files.items()):
        progress("restore", number, len(files))
        path = uri if folder is None else str(folder / Path(uri).name)
        rows = await anyio.to_thread.run_sync(_put, database.segments, path, keys)
        event = new_event(SegmentsRestored(segments=keys))
        await database.write(_take_back, database.segments, key, keys, rows, event, actor)
        segments_back += len(keys)
        bytes_back += sum(len(row.data) for row in rows)
    progress("restore", len(files), len(files))
    return RestoreReport(segments_back, bytes_back, tuple(files))


def _put(store: SegmentStore, path: str, keys: Sequence[bytes]) -> list[SegmentRow]:
    """Put what a file holds of some segments into ``store``; return what is to be taken in."""
    try:
        found = blobs_of(read_archive(path, keys, tuple(FAMILIES)))
    except (StoreError, DamagedSegmentError) as error:
        raise InvalidArgumentError(f"restore from {path}: {error}") from error
    return [row for key, families in found.items() for row in store.put(key, families)]


def _take_back(
    tx: Transaction,
    store: SegmentStore,
    experiment: int,
    keys: Sequence[bytes],
    rows: Sequence[SegmentRow],
    event: NewEvent,
    actor: str,
) -> None:
    lock_experiment(tx, experiment)
    if len(segments.archived_at(tx, keys)) < len(keys):
        raise StoreError("another process has restored some of these segments: run it again")
    log.append(tx, experiment, [event], actor=actor, now_us=now_us())
    store.take_in(tx, rows)
