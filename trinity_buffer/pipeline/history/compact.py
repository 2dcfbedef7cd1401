"""Retention: tensors of what was trained long ago leave the database and come back, on request.

Events, manifests and lineage stay; only segments go, to a Parquet file or for good. A segment goes
when every trainer that reads it has committed, before its horizon, all that it holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio.to_thread

from trinity_buffer import codec
from trinity_buffer.errors import CodecError, DamagedSegmentError, InvalidArgumentError, StoreError
from trinity_buffer.events import ExperiencesRecorded, SegmentsArchived, SegmentsRestored
from trinity_buffer.faultpoints import reached
from trinity_buffer.identity import FAMILIES
from trinity_buffer.limits import sizes
from trinity_buffer.pipeline.archive import (
    ArchiveFile,
    read_archive,
    require_pyarrow,
    write_archive,
)
from trinity_buffer.pipeline.background import task_group
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.pipeline.handle import new_event, now_us
from trinity_buffer.pipeline.load.segments import blobs_of
from trinity_buffer.pipeline.verify.projections import Progress, no_progress
from trinity_buffer.store import log, retention, segments
from trinity_buffer.store.log import NewEvent, StoredEvent
from trinity_buffer.store.retention import Held, Need
from trinity_buffer.store.rows import position_of
from trinity_buffer.store.segments import SegmentRow, SegmentStore
from trinity_buffer.store.transaction import SegmentParts, Transaction, lock_experiment

FILES_AT_ONCE = 2
"""While one is compressed the next is read and encoded."""


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
    return await _Compaction(experiment, archive, actor, progress).run(keep_steps)


class _Compaction:
    """One run of `compact`."""

    def __init__(
        self, experiment: Experiment, archive: Path | None, actor: str, progress: Progress
    ) -> None:
        self._experiment = experiment
        self._database = experiment.database
        self._archive = archive
        self._actor = actor
        self._progress = progress
        self._segments = self._bytes = self._damaged = 0
        self._files: list[str] = []
        self._free = anyio.Semaphore(FILES_AT_ONCE)

    async def run(self, keep_steps: int) -> CompactionReport:
        """Look at one page of segments after the other."""
        key, read = self._experiment.key, self._database.read
        needs = await read(retention.needs_of, key, keep_steps=keep_steps)
        head = await read(log.head, key)
        after = -1
        async with task_group() as files:
            while held := await read(
                retention.held_segments, key, after=after, limit=sizes().segments_per_page
            ):
                for some in _unbroken(held):
                    done = await self._done_with(some, needs)
                    if not done:
                        self._progress("compact", position_of(some[-1].last), head)
                    for facts in done:
                        places = await self._room_for(facts)
                        files.start_soon(self._let_go, facts, head, places)
                after = held[-1].last
        self._progress("compact", head, head)
        return CompactionReport(self._segments, self._bytes, tuple(self._files), self._damaged)

    async def _done_with(
        self, held: Sequence[Held], needs: Sequence[Need]
    ) -> list[list[tuple[int, ExperiencesRecorded]]]:
        """Return those of ``held`` that nobody needs any more, by the file that they go to."""
        key = self._experiment.key
        done = await self._database.read(retention.finished, key, held, needs)
        if not done:
            return []
        places = [position_of(one.first) for one in done]
        stored = await self._database.read(log.read_at, key, places)
        facts = await anyio.to_thread.run_sync(_facts, stored)
        self._damaged += len(done) - len(facts)
        return list(_by_size(facts))

    async def _room_for(self, facts: Sequence[tuple[int, ExperiencesRecorded]]) -> int:
        """Wait for places and return how many; a segment larger than a file goes alone."""
        places = FILES_AT_ONCE if _bytes_of(facts) > sizes().bytes_per_file else 1
        for _ in range(places):
            await self._free.acquire()
        return places

    async def _let_go(
        self, facts: Sequence[tuple[int, ExperiencesRecorded]], head: int, places: int
    ) -> None:
        try:
            if self._archive is None:
                await self._forget([fact for _, fact in facts], None)
            else:
                await self._archive_some(self._archive, facts)
            self._progress("compact", facts[-1][0], head)
        finally:
            for _ in range(places):
                self._free.release()

    async def _archive_some(
        self, folder: Path, facts: Sequence[tuple[int, ExperiencesRecorded]]
    ) -> None:
        keys = [fact.segment for _, fact in facts]
        parts = await self._database.read_session(lambda s: s.segments(keys, tuple(FAMILIES)))
        name = self._experiment.name

        def write() -> tuple[list[ExperiencesRecorded], ArchiveFile | None]:
            positions, sound = _sound(facts, parts)
            if not positions:
                return [], None
            wanted = {place: some for place, some in parts.items() if place[0] in positions}
            return sound, write_archive(folder, name, positions, wanted)

        # What is written is recorded, though the other file fails or somebody interrupts.
        with anyio.CancelScope(shield=True):
            sound, made = await anyio.to_thread.run_sync(write)
            self._damaged += len(facts) - len(sound)
            if made is not None:
                self._files.append(made.path)
                await self._forget(sound, made)

    async def _forget(self, facts: Sequence[ExperiencesRecorded], made: ArchiveFile | None) -> None:
        keys = [fact.segment for fact in facts]
        path, digest = made or (None, None)
        event = new_event(SegmentsArchived(segments=keys, uri=path, digest=digest))
        reached("before-compact")
        await self._database.write(self._delete, keys, event)
        reached("after-compact")
        self._segments += len(keys)
        self._bytes += sum(sum(fact.families.values()) for fact in facts)

    def _delete(self, tx: Transaction, keys: Sequence[bytes], event: log.NewEvent) -> None:
        key = self._experiment.key
        lock_experiment(tx, key)
        if segments.archived_at(tx, keys):
            raise StoreError("another process has compacted some of these segments: run it again")
        log.append(tx, key, [event], actor=self._actor, now_us=now_us())
        self._database.segments.delete(tx, keys)
        reached("inside-compact")


def _unbroken(held: Sequence[Held]) -> Iterator[list[Held]]:
    """Yield stretches of segments between which none is archived, of so many rows at most."""
    some: list[Held] = []
    rows = 0
    for one in held:
        follows = some and one.ordinal == some[-1].ordinal + 1
        rows += one.last - one.first + 1
        if some and (not follows or rows > sizes().rows_per_file):
            yield some
            some, rows = [], one.last - one.first + 1
        some.append(one)
    if some:
        yield some


def _facts(stored: Sequence[StoredEvent]) -> list[tuple[int, ExperiencesRecorded]]:
    """Return (position, fact) of events, without those that cannot be read."""
    found = []
    for event in stored:
        try:
            fact = codec.decode_fact(event.kind, event.body)
        except CodecError:
            continue
        if isinstance(fact, ExperiencesRecorded):
            found.append((event.position, fact))
    return found


def _bytes_of(facts: Sequence[tuple[int, ExperiencesRecorded]]) -> int:
    return sum(sum(fact.families.values()) for _, fact in facts)


def _by_size(
    facts: Sequence[tuple[int, ExperiencesRecorded]],
) -> Iterator[list[tuple[int, ExperiencesRecorded]]]:
    some: list[tuple[int, ExperiencesRecorded]] = []
    size = 0
    for position, fact in facts:
        size += sum(fact.families.values())
        if some and size > sizes().bytes_per_file:
            yield some
            some, size = [], sum(fact.families.values())
        some.append((position, fact))
    if some:
        yield some


def _sound(
    facts: Sequence[tuple[int, ExperiencesRecorded]], parts: SegmentParts
) -> tuple[dict[bytes, int], list[ExperiencesRecorded]]:
    """Return the segments that are not damaged, with their positions, and their events."""
    positions, sound = {}, []
    for position, fact in facts:
        if _is_sound(fact, parts):
            positions[fact.segment] = position
            sound.append(fact)
    return positions, sound


def _is_sound(fact: ExperiencesRecorded, parts: SegmentParts) -> bool:
    key = fact.segment
    try:
        blobs = {
            family: segments.blob_of(key, family, parts.get((key, family), []))
            for family in fact.families
        }
        rows = {codec.decode_segment(blob).rows for blob in blobs.values()}
    except (DamagedSegmentError, CodecError):
        return False
    sizes_of = {family: len(blob) for family, blob in blobs.items()}
    return sizes_of == fact.families and rows <= {fact.rows}


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
