"""Retention: tensors of what was trained long ago leave the database and come back, on request.

Events, manifests and lineage stay; only segments go, to a Parquet file or for good. A segment goes
when every trainer that reads it has committed, before its horizon, all that it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio.to_thread

from trinity_buffer import events
from trinity_buffer.codec.objects import new_event
from trinity_buffer.errors import CodecError, DamagedSegmentError, InvalidArgumentError, StoreError
from trinity_buffer.identity import FAMILIES
from trinity_buffer.limits import sizes
from trinity_buffer.pipeline.archive import (
    ArchiveFile,
    digest_of,
    read_archive,
    require_pyarrow,
    write_archive,
)
from trinity_buffer.pipeline.handle import by_size, fact_at
from trinity_buffer.pipeline.load.reading import blobs_of
from trinity_buffer.pipeline.store import Experiment
from trinity_buffer.pipeline.verify.projections import Progress, no_progress, readable_events
from trinity_buffer.pipeline.verify.segments import bytes_of, sound_family
from trinity_buffer.store import log, segments
from trinity_buffer.store.rows import position_of
from trinity_buffer.store.segments import SegmentRow, SegmentStore
from trinity_buffer.store.trainer_queries import Reader
from trinity_buffer.store.transaction import SegmentParts, Transaction

Recorded = tuple[int, events.ExperiencesRecorded]
"""A position, and the event there."""


@dataclass(frozen=True, slots=True)
class CompactionReport:
    """What has left the database.

    Attributes:
        segments: how many segments.
        bytes: how many bytes of tensors.
        files: the Parquet files they are in now; none if they were deleted for good.
        damaged: how many stayed because they cannot be read; `verify` names them.
    """

    segments: int
    bytes: int
    files: tuple[str, ...]
    damaged: int


async def compact(
    experiment: Experiment,
    *,
    keep_steps: int,
    archive: Path | None,
    delete: bool = False,
    actor: str = "compact",
    progress: Progress = no_progress,
) -> CompactionReport:
    """Archive, or delete, the segments of what was committed more than ``keep_steps`` steps ago.

    May be killed at any point and run again: a segment is deleted in the transaction that records
    where it went, and a file that no event names is written anew.

    Args:
        keep_steps: of each trainer; what its last steps were trained on stays.
        archive: folder for the Parquet files.
        delete: needed to go without an archive.
        progress: called with what is being done, how much of it is done, and how much there is.

    Raises:
        InvalidArgumentError: neither ``archive`` nor ``delete``, or pyarrow is not installed.
        StoreError: others compact, or a trainer begins or goes back, at the same time.
    """
    if (archive is None) == (not delete):
        raise InvalidArgumentError(
            "compact: give a folder to archive to (--archive FOLDER), or delete=True (--delete), "
            "not both"
        )
    if keep_steps < 0:
        raise InvalidArgumentError(f"keep_steps={keep_steps}: it must not be negative")
    if archive is not None:
        require_pyarrow()
    return await _Compaction(experiment, archive, actor, progress, keep_steps).run()


class _Compaction:
    """One run of `compact`."""

    def __init__(
        self,
        experiment: Experiment,
        archive: Path | None,
        actor: str,
        progress: Progress,
        keep_steps: int,
    ) -> None:
        self._experiment = experiment
        self._database = experiment.database
        self._archive = archive
        self._actor = actor
        self._progress = progress
        self._segments = self._bytes = self._damaged = 0
        self._files: list[str] = []
        self._keep_steps = keep_steps
        self._horizons: dict[tuple[Reader, str], int] = {}

    async def run(self) -> CompactionReport:
        """Look at one page of segments after the other."""
        key, read = self._experiment.key, self._database.read
        needs = await read(segments.needs_of, key, keep_steps=self._keep_steps)
        self._horizons = {need[:2]: need.horizon for need in needs}
        head = await read(log.head, key)
        after, limit = -1, sizes.segments_per_page
        while held := await read(segments.held_segments, key, after=after, limit=limit):
            # What needs a segment is asked for by ranges of addresses: one across a gap would hold
            # rows of segments that have left already.
            runs = by_size(
                held,
                lambda segment: segment.last - segment.first + 1,
                sizes.rows_per_file,
                lambda run, segment: segment.ordinal != run[-1].ordinal + 1,
            )
            for unbroken in runs:
                finished = await read(segments.finished, key, unbroken, needs)
                positions = [position_of(segment.first) for segment in finished]
                stored = await read(log.read_at, key, positions)
                unneeded = [
                    (placed.position, placed.fact)
                    for placed in await anyio.to_thread.run_sync(readable_events, stored)
                    if isinstance(placed.fact, events.ExperiencesRecorded)
                ]
                # An event that cannot be read does not say how its segment is divided.
                self._damaged += len(finished) - len(unneeded)
                for recorded in by_size(unneeded, bytes_of, sizes.bytes_per_file):
                    await self._remove(recorded)
                    self._progress("compact", recorded[-1][0], head)
                if not unneeded:
                    self._progress("compact", position_of(unbroken[-1].last), head)
            after = held[-1].last
        self._progress("compact", head, head)
        return CompactionReport(self._segments, self._bytes, tuple(self._files), self._damaged)

    async def _remove(self, recorded: Sequence[Recorded]) -> None:
        """Write segments to an archive, if there is to be one, and delete them."""
        facts, path, digest = [fact for _, fact in recorded], None, None
        # A file that is written is recorded too, even if Ctrl-C comes meanwhile.
        with anyio.CancelScope(shield=True):
            if self._archive is not None:
                keys = [fact.segment for fact in facts]
                read = partial(self._database.segments.get, keys=keys, families=tuple(FAMILIES))
                parts = await self._database.read_session(read)
                write = partial(_write, self._archive, self._experiment.name, recorded, parts)
                facts, archive = await anyio.to_thread.run_sync(write)
                self._damaged += len(recorded) - len(facts)
                if archive is None:
                    return
                path, digest = archive
                self._files.append(path)
            keys = [fact.segment for fact in facts]
            event = new_event(events.SegmentsArchived(segments=keys, uri=path, digest=digest))
            await self._database.write(self._delete, keys, event)
        self._segments += len(keys)
        self._bytes += sum(sum(fact.families.values()) for fact in facts)

    def _delete(self, tx: Transaction, keys: Sequence[bytes], event: events.NewEvent) -> None:
        key = self._experiment.key
        tx.lock(key)
        # Under the lock: of two that compact at once, the second must not name a second file.
        if segments.archived_at(tx, keys):
            raise StoreError("another process has compacted some of these segments: run it again")
        for need in segments.needs_of(tx, key, keep_steps=self._keep_steps):
            if need.horizon < self._horizons.get(need[:2], need.horizon + 1):
                raise StoreError(
                    f"trainer {need.reader.name!r} began, or went back, and may need some of these "
                    "segments: run it again"
                )
        log.append(tx, key, [(self._actor, event)])
        self._database.segments.delete(tx, keys)


def _write(
    folder: Path, experiment: str, recorded: Sequence[Recorded], parts: SegmentParts
) -> tuple[list[events.ExperiencesRecorded], ArchiveFile | None]:
    """Write the segments that are sound; return their events, and the file if there is one."""
    sound: dict[bytes, int] = {}
    for position, fact in recorded:
        with suppress(DamagedSegmentError, CodecError):
            for family in fact.families:
                sound_family(fact, family, parts)
            sound[fact.segment] = position
    wanted = {place: stored for place, stored in parts.items() if place[0] in sound}
    archive = write_archive(folder, experiment, sound, wanted) if sound else None
    return [fact for _, fact in recorded if fact.segment in sound], archive


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
    archives = await experiment.database.read(segments.archives, experiment.key)
    files, bytes_back = list[str](), 0
    # File by file: what one holds is in memory as a whole until it is stored.
    for number, (position, keys) in enumerate(archives.items()):
        progress("restore", number, len(archives))
        file, size = await _restore_file(experiment, position, keys, folder, actor)
        files.append(file)
        bytes_back += size
    progress("restore", len(archives), len(archives))
    return RestoreReport(sum(map(len, archives.values())), bytes_back, tuple(files))


async def _restore_file(
    experiment: Experiment, position: int, keys: list[bytes], folder: Path | None, actor: str
) -> tuple[str, int]:
    """Bring back what the event at a position archived; return its file, and how many bytes."""
    database, key, store = experiment.database, experiment.key, experiment.database.segments
    (stored,) = await database.read(log.read_at, key, [position])
    archive = fact_at(experiment.name, stored, events.SegmentsArchived)
    file = Path(str(archive.uri))
    path = file if folder is None else folder / file.name
    rows = await anyio.to_thread.run_sync(partial(_put, store, path, archive.digest, keys))
    event = new_event(events.SegmentsRestored(segments=keys))

    def take_back(tx: Transaction) -> None:
        tx.lock(key)
        # Under the lock, as in `_delete`: what another process has restored is there already.
        if len(segments.archived_at(tx, keys)) < len(keys):
            raise StoreError("another process has restored some of these segments: run it again")
        log.append(tx, key, [(actor, event)])
        store.attach(tx, rows)

    await database.write(take_back)
    return str(archive.uri), sum(len(piece) for row in rows for piece in row.data)


def _put(
    store: SegmentStore, path: Path, digest: str | None, keys: Sequence[bytes]
) -> list[SegmentRow]:
    """Put what a file holds of some segments into ``store``; return what is to be taken in."""
    try:
        blobs = blobs_of(read_archive(str(path), keys, tuple(FAMILIES)))
        sha256 = digest_of(path)
    except (OSError, StoreError, DamagedSegmentError) as error:
        raise InvalidArgumentError(f"restore from {path}: {error}") from error
    # Once its segments are back no event asks for the file any more: one that lacks a part of them
    # must not be taken for the one that was written.
    if digest not in (None, sha256):
        raise InvalidArgumentError(
            f"restore from {path}: its sha256 is {sha256}, that of the file that was written is "
            f"{digest}: put a sound copy in its place"
        )
    return [
        row
        for key, families in blobs.items()
        for row in store.put(key, {family: [blob] for family, blob in families.items()})
    ]
