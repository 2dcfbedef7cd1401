"""Bringing archived segments back into the database."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio.to_thread

from trinity_buffer.errors import DamagedSegmentError, InvalidArgumentError, StoreError
from trinity_buffer.events import SegmentsRestored
from trinity_buffer.identity import FAMILIES
from trinity_buffer.pipeline.archive_file import read_archive
from trinity_buffer.pipeline.events import new_event, now_us
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.pipeline.history.refold import Progress, no_progress
from trinity_buffer.pipeline.loading.segments import joined
from trinity_buffer.store import log, retention, segments
from trinity_buffer.store.log import NewEvent
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
        rows = await anyio.to_thread.run_sync(_rows_in, path, keys)
        event = new_event(SegmentsRestored(segments=keys))
        await database.write(_put_back, key, keys, rows, event, actor)
        segments_back += len(keys)
        bytes_back += sum(len(row["data"]) for row in rows)
    progress("restore", len(files), len(files))
    return RestoreReport(segments_back, bytes_back, tuple(files))


def _rows_in(path: str, keys: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return the rows of `segment` that a file brings back."""
    try:
        found = joined(read_archive(path, keys, tuple(FAMILIES)))
    except (StoreError, DamagedSegmentError) as error:
        raise InvalidArgumentError(f"restore from {path}: {error}") from error
    return [row for key, families in found.items() for row in segments.rows_of(key, families)]


def _put_back(
    tx: Transaction,
    experiment: int,
    keys: Sequence[bytes],
    rows: list[dict[str, Any]],
    event: NewEvent,
    actor: str,
) -> None:
    lock_experiment(tx, experiment)
    if len(segments.archived_at(tx, keys)) < len(keys):
        raise StoreError("another process has restored some of these segments: run it again")
    log.append(tx, experiment, [event], actor=actor, now_us=now_us())
    segments.write(tx, rows)
