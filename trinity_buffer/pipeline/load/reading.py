"""Reads segments, events (through a cache), and the rewards of rows by their runs.

A step has hundreds of rows but only a handful of events: reading the columns of a whole event
costs less than a query per row. No torch: the inspector reads with it too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trinity_buffer import errors
from trinity_buffer.codec.blob import Buffer
from trinity_buffer.codec.segments import decode_segment
from trinity_buffer.events import WithSegment, kind_of
from trinity_buffer.identity import FAMILIES
from trinity_buffer.limits import sizes
from trinity_buffer.pipeline.archive import read_archive
from trinity_buffer.pipeline.handle import decoded, stored_at
from trinity_buffer.store import segments
from trinity_buffer.store.transaction import ReadSession, SegmentParts


class Absence(NamedTuple):
    """Why the tensors of a segment are not available.

    Attributes:
        why: the event that removed them from the database, and the remedy.
        deleted: whether they are gone for good; else their archive cannot be read here and now.
    """

    why: str
    deleted: bool


class StoredSegments(NamedTuple):
    """Parts of segments, and the segments that are absent.

    Attributes:
        parts: unchecked parts, see `blobs_of`, without families that a segment lacks.
        absent: key -> why, of segments that left the database and cannot be fetched.
    """

    parts: SegmentParts
    absent: dict[bytes, Absence]


def require_families(whose: str, families: Iterable[str]) -> None:
    """Raise unless all ``families`` are column families.

    Raises:
        InvalidArgumentError: one is not; rows without it would pass for damaged.
    """
    for family in families:
        if family not in FAMILIES:
            raise errors.InvalidArgumentError(
                f"{whose} has families={family!r}: accepted are {', '.join(FAMILIES)}"
            )


def read_segments(s: ReadSession, keys: Iterable[bytes], families: Sequence[str]) -> StoredSegments:
    """Return the parts of segments, from the database or from their archive."""
    stored = StoredSegments({}, {})
    wanted, size = list(dict.fromkeys(keys)) if families else [], sizes.segments_per_load
    for start in range(0, len(wanted), size):
        stored.parts.update(s.segments(wanted[start : start + size], families))
    there = {key for key, _ in stored.parts}
    gone = [key for key in wanted if key not in there]
    by_event: dict[tuple[int, str | None], list[bytes]] = {}
    archived = s.read(segments.archived_at, gone) if gone else {}
    # What is in neither place was brought back in between, or is missing.
    stored.parts.update(s.segments([key for key in gone if key not in archived], families))
    for key, event in archived.items():
        by_event.setdefault(event, []).append(key)
    for (position, uri), lacking in by_event.items():
        why = (
            f"the tensors were deleted for good by the event at position {position} "
            "(SegmentsArchived): only a backup that is older has them"
        )
        try:
            if uri is not None:
                stored.parts.update(read_archive(uri, lacking, families))
                continue
        except errors.StoreError as error:
            why = (
                f"the tensors were archived to {uri} by the event at position {position} "
                f"(SegmentsArchived), and {error}"
            )
        stored.absent.update(dict.fromkeys(lacking, Absence(why, deleted=uri is None)))
    return stored


def blobs_of(parts: SegmentParts) -> dict[bytes, dict[str, Buffer]]:
    """Return key -> family -> blob. Computes checksums: call it off the event loop.

    Raises:
        DamagedSegmentError: a checksum does not hold.
    """
    blobs: dict[bytes, dict[str, Buffer]] = {}
    for (key, family), pieces in parts.items():
        blobs.setdefault(key, {})[family] = segments.blob_of(key, family, pieces)
    return blobs


def read_blobs(
    s: ReadSession, wanted: Mapping[bytes, Collection[str]], families: Sequence[str]
) -> dict[bytes, dict[str, Buffer]]:
    """Return key -> family -> blob of segments.

    Args:
        wanted: key -> those of ``families`` that the segment must have.
        families: the families to read.

    Raises:
        ArchivedSegmentError: one of the segments is absent.
        DamagedSegmentError: a checksum does not hold, or a family is missing.
    """
    stored = read_segments(s, wanted, families)
    for key, absence in stored.absent.items():
        raise errors.ArchivedSegmentError(f"segment {key.hex()}: {absence.why}")
    blobs = blobs_of(stored.parts)
    for key, of_key in wanted.items():
        if key not in blobs or not blobs[key].keys() >= set(of_key):
            raise errors.DamagedSegmentError(f"segment {key.hex()} is missing: run `verify`")
    return blobs


def unreadable_among(
    s: ReadSession, wanted: Mapping[bytes, Collection[str]], families: Sequence[str]
) -> dict[bytes, str]:
    """Return key -> ``deleted`` or ``damaged``, of segments that can never be read.

    If some were deleted, only those are returned, and damaged ones with the next call. An archive
    that cannot be read at the moment is neither.

    Args:
        wanted: key -> those of ``families`` that the segment must have, if known.
        families: the families to read.
    """
    stored = read_segments(s, wanted, families)
    if deleted := {key: "deleted" for key, absence in stored.absent.items() if absence.deleted}:
        return deleted
    by_key: dict[bytes, SegmentParts] = {key: {} for key in wanted if key not in stored.absent}
    for (key, family), parts in stored.parts.items():
        by_key[key][key, family] = parts
    return {key: "damaged" for key, parts in by_key.items() if not _whole(key, parts, wanted[key])}


def _whole(key: bytes, parts: SegmentParts, families: Collection[str]) -> bool:
    try:
        blobs = blobs_of(parts).get(key, {})
        for blob in blobs.values():
            decode_segment(blob)
    except (errors.CodecError, errors.DamagedSegmentError):
        return False
    return bool(blobs) and blobs.keys() >= set(families)


def contiguous_ranges(numbers: npt.NDArray[Any] | Sequence[int]) -> list[tuple[int, int]]:
    """Return (start, stop) of the ranges in which each number is one more than the last."""
    if not len(numbers):
        return []
    column = np.asarray(numbers)
    breaks = np.flatnonzero(column[1:] - column[:-1] != 1) + 1
    return list(pairwise([0, *breaks.tolist(), len(numbers)]))


Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[Any]


class RunRewards(NamedTuple):
    """Rewards of rows and of their runs.

    Attributes:
        runs: ``[rows]``, the number of each row's run, in the order of groups and runs.
        rows: ``[rows]``, their rewards; a row without one has that of the last row of its run.
        means: ``[runs]``, the mean over the rows of each run, NaN if none has a reward.
    """

    runs: Ints
    rows: Floats
    means: Floats

    @property
    def mean(self) -> float | None:
        """The mean over the runs that have a reward, however many rows each has; None: none has."""
        known = self.means[~np.isnan(self.means)]
        return fmean(known.tolist()) if len(known) else None


def rewards_by_run(rewards: Floats, groups: Ints, runs: Ints, steps: Ints) -> RunRewards:
    """Return the rewards of rows and of their runs.

    Args:
        rewards: of each row, NaN where it has none.
        groups, runs: the two numbers that only the rows of one run have in common.
        steps: of each row within its run.
    """
    keys = (groups.astype(np.int64) << 32) + runs
    if (keys[1:] > keys[:-1]).all():  # as usual, each row is a run, and they are in order
        return RunRewards(np.arange(len(keys), dtype=np.int32), rewards, rewards)
    order = np.lexsort((steps, keys))
    ordered, begins = rewards[order], np.diff(keys[order], prepend=-1) != 0
    ordered_runs = np.cumsum(begins) - 1
    if (unknown := np.isnan(ordered)).any():
        last = ordered[np.append(np.flatnonzero(begins)[1:], len(order)) - 1]
        ordered = np.where(unknown, last[ordered_runs], ordered)
        unknown = np.isnan(ordered)
    counts = np.bincount(ordered_runs, ~unknown)
    sums = np.bincount(ordered_runs, np.where(unknown, 0, ordered))
    means = np.divide(sums, counts, np.full(len(counts), np.nan), where=counts > 0)
    runs_of_rows, rewards_of_rows = np.empty(len(order), np.int32), np.empty(len(order))
    runs_of_rows[order], rewards_of_rows[order] = ordered_runs, ordered
    return RunRewards(runs_of_rows, rewards_of_rows, means)


class EventCache:
    """Reads events by position, each once while it is in use.

    Args:
        experiment: key of the experiment.
        name: its name, for errors.
    """

    def __init__(self, experiment: int, name: str) -> None:
        self.experiment = experiment
        self.name = name
        self._known: dict[int, WithSegment] = {}
        self._num_rows = 0

    def events(self, s: ReadSession, positions: Collection[int]) -> Mapping[int, WithSegment]:
        """Return position -> event.

        Ask for everything that is used together in one call: it may evict all other events.

        Raises:
            CodecError: no event, an unreadable one, or one without rows.
        """
        events = {at: self._known[at] for at in positions if at in self._known}
        if unknown := set(positions) - events.keys():
            for at, stored in s.read(stored_at, self.experiment, self.name, unknown).items():
                if not isinstance(fact := decoded(self.name, stored).fact, WithSegment):
                    raise errors.CodecError(
                        f"experiment {self.name!r}, the event at position {at}: it is a "
                        f"{kind_of(fact)}, which has no rows: run `verify`"
                    )
                events[at] = fact
        self.keep(events)
        return events

    def keep(self, events: Mapping[int, WithSegment]) -> None:
        """Keep these events; all others go when they have too many rows together."""
        self._num_rows += sum(events[at].rows for at in events.keys() - self._known.keys())
        self._known |= events
        if self._num_rows > sizes.rows_kept:
            self._known = {**events}
            self._num_rows = sum(event.rows for event in events.values())
