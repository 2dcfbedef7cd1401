"""The rows of a manifest as views of their segments, without an `Experience` in between."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import anyio.to_thread
import numpy.typing as npt

from trinity_buffer.codec import Column, Segment, decode_segment
from trinity_buffer.errors import DamagedSegmentError, UnknownExperimentError
from trinity_buffer.pipeline.events import decoded
from trinity_buffer.pipeline.loading import damaged_among, load_segments
from trinity_buffer.pipeline.manifest import Manifest
from trinity_buffer.store import log, queries
from trinity_buffer.store.address import position_of, slot_of
from trinity_buffer.store.database import Database
from trinity_buffer.store.rows import ExperienceRow

Array: TypeAlias = npt.NDArray[Any]
Value: TypeAlias = "Array | float | None"
"""A tensor as a view, one number that stands for ``number * action_mask``, or nothing."""

CACHED_BYTES = 256 * 1024 * 1024
"""Decoded segments that are kept: a segment holds more rows than one step takes from it."""

FAMILIES = ("light", "tokens", "heavy")


@dataclass(frozen=True, slots=True)
class LoadedRows:
    """Columns of the rows of one manifest, in its order; views that must not be written."""

    meta: Sequence[ExperienceRow]
    columns: Mapping[str, Sequence[Value]]
    multi_modal: Sequence[Mapping[str, Value]]

    def column(self, field: str) -> Sequence[Value]:
        """Return the values of one field, None where a row has none."""
        return self.columns.get(field) or [None] * len(self.meta)


class _Segments:
    """Decoded segments by key, the least recently used forgotten first."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, tuple[int, dict[str, list[Value]]]] = OrderedDict()
        self._bytes = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._known

    def __getitem__(self, key: bytes) -> dict[str, list[Value]]:
        self._known.move_to_end(key)
        return self._known[key][1]

    def add(self, key: bytes, families: Mapping[str, bytes]) -> None:
        size = sum(map(len, families.values()))
        fields: dict[str, list[Value]] = {}
        for blob in families.values():
            fields |= _views(decode_segment(blob))
        self._known[key] = (size, fields)
        self._bytes += size

    def shrink(self) -> None:
        """Forget down to the budget; only between steps, whose rows must all be there."""
        while self._bytes > CACHED_BYTES and len(self._known) > 1:
            _, (size, _) = self._known.popitem(last=False)
            self._bytes -= size


def _views(segment: Segment) -> dict[str, list[Value]]:
    """Return field -> one value per row."""
    fields: dict[str, list[Value]] = {}
    for name, columns in segment.columns.items():
        values: list[Value] = [None] * segment.rows
        for column in columns:
            rows = range(segment.rows) if column.rows is None else column.rows.tolist()
            for row, value in zip(rows, _values(column), strict=True):
                values[row] = value
        fields[name] = values
    return fields


def _values(column: Column) -> Sequence[Value]:
    elements = column.elements
    if column.encoding == "scaled_mask":
        return [float(scalar) for scalar in elements]
    ends = column.offsets.tolist()
    pieces = [elements[start:stop] for start, stop in pairwise(ends)]
    if column.shapes.shape[1] == 1:
        return pieces
    return [piece.reshape(shape) for piece, shape in zip(pieces, column.shapes, strict=True)]


class RowLoader:
    """Loads what manifests name, each segment once while it is in use."""

    def __init__(self, database: Database, experiment: int) -> None:
        self._database = database
        self._experiment = experiment
        self._segments = _Segments()
        self._annotation_keys: OrderedDict[int, bytes | None] = OrderedDict()
        self._others: dict[str, RowLoader] = {}

    async def load(self, manifest: Manifest) -> LoadedRows:
        """Return the columns of the manifest's rows.

        Raises:
            DamagedSegmentError: a checksum does not hold.
            UnknownExperimentError: rows come from an experiment that the store does not hold.
        """
        if not any(manifest.source):
            return await self.load_rows(manifest.experiences, manifest.annotations)
        parts: list[tuple[list[int], LoadedRows]] = []
        for number, name in enumerate(("", *manifest.sources)):
            rows = manifest.rows_of(number)
            if rows:
                loader = self if number == 0 else await self._other(name)
                found = await loader.load_rows(
                    [manifest.experiences[row] for row in rows],
                    [manifest.annotations[row] for row in rows],
                )
                parts.append((rows, found))
        return _merged(parts, len(manifest.experiences))

    async def damaged(self, manifest: Manifest) -> list[int]:
        """Return the places of the rows whose experience or annotation cannot be read."""
        found: list[int] = []
        for number, name in enumerate(("", *manifest.sources)):
            places = manifest.rows_of(number) if manifest.source else [*range(len(manifest.groups))]
            if places:
                loader = self if number == 0 else await self._other(name)
                found += await loader.damaged_rows(manifest, places)
        return found

    async def damaged_rows(self, manifest: Manifest, places: Sequence[int]) -> list[int]:
        """Return those of ``places``, rows of this experiment, that cannot be read."""
        experiences = {manifest.experiences[place] for place in places}
        async with self._database.reading() as tx:
            stored = await queries.experience_rows(tx, self._experiment, sorted(experiences))
        recorded = {row.address: row.segment for row in stored}
        keys = await self._keys_of({position_of(manifest.annotations[p]) for p in places})
        annotated = {p: keys[position_of(manifest.annotations[p])] for p in places}
        bad = await damaged_among(self._database, recorded.values(), FAMILIES)
        bad |= await damaged_among(
            self._database, (key for key in annotated.values() if key), ("annotation",)
        )
        return [p for p in places if bad & {recorded[manifest.experiences[p]], annotated[p]}]

    async def _other(self, name: str) -> RowLoader:
        """Return the loader of another experiment of the store."""
        if name not in self._others:
            async with self._database.reading() as tx:
                key = await log.find_experiment(tx, name)
            if key is None:
                raise UnknownExperimentError(
                    f"a step trains on rows of experiment {name!r}, which is not in this store"
                )
            self._others[name] = RowLoader(self._database, key)
        return self._others[name]

    async def load_rows(self, experiences: Sequence[int], annotated: Sequence[int]) -> LoadedRows:
        """Return the columns of rows of this experiment, by their two addresses."""
        async with self._database.reading() as tx:
            stored = await queries.experience_rows(tx, self._experiment, sorted(set(experiences)))
        by_address = {row.address: row for row in stored}
        meta = [by_address[address] for address in experiences]
        annotations = await self._keys_of({position_of(a) for a in annotated})
        keys = {row.segment for row in meta} | {key for key in annotations.values() if key}
        missing = [key for key in keys if key not in self._segments]
        loaded = await load_segments(self._database, missing, (*FAMILIES, "annotation"))
        return await anyio.to_thread.run_sync(self._gather, annotated, meta, annotations, loaded)

    async def _keys_of(self, positions: set[int]) -> dict[int, bytes | None]:
        """Return position of an annotation event -> key of its segment; None: it has no tensors."""
        unknown = sorted(positions - self._annotation_keys.keys())
        if unknown:
            async with self._database.reading() as tx:
                events = await log.read_at(tx, self._experiment, unknown)
            for stored in events:
                body = decoded("", stored).body
                self._annotation_keys[stored.position] = body["segment"]
        found = {position: self._annotation_keys[position] for position in positions}
        while len(self._annotation_keys) > 4096 + len(positions):
            self._annotation_keys.popitem(last=False)
        return found

    def _gather(
        self,
        annotated: Sequence[int],
        meta: Sequence[ExperienceRow],
        annotations: Mapping[int, bytes | None],
        loaded: Mapping[bytes, Mapping[str, bytes]],
    ) -> LoadedRows:
        for key, families in loaded.items():
            self._segments.add(key, families)
        columns: dict[str, list[Value]] = {}
        total = len(meta)
        for i, (row, annotation) in enumerate(zip(meta, annotated, strict=True)):
            slot = slot_of(row.address)
            for field, values in self._segments[row.segment].items():
                columns.setdefault(field, [None] * total)[i] = values[slot]
            of_set = annotations[position_of(annotation)]
            if of_set is not None:
                slot = slot_of(annotation)
                for field, values in self._segments[of_set].items():
                    columns.setdefault(field, [None] * total)[i] = values[slot]
        self._segments.shrink()
        if any(value is None for value in columns.get("tokens", [None])):
            raise DamagedSegmentError("an experience of the step has no tokens: run `verify`")
        heavy = [name for name in columns if name.startswith("multi_modal_inputs.")]
        modal = [
            {
                name.partition(".")[2]: columns[name][i]
                for name in heavy
                if columns[name][i] is not None
            }
            for i in range(total)
        ]
        return LoadedRows(meta, columns, modal)


def _merged(parts: Sequence[tuple[Sequence[int], LoadedRows]], total: int) -> LoadedRows:
    """Return the rows of several experiments in the order of the manifest: (their places, they)."""
    places = {row: (part, i) for part, (rows, _) in enumerate(parts) for i, row in enumerate(rows)}
    columns: dict[str, list[Value]] = {}
    for rows, found in parts:
        for field, values in found.columns.items():
            column = columns.setdefault(field, [None] * total)
            for row, value in zip(rows, values, strict=True):
                column[row] = value
    order = [places[row] for row in range(total)]
    meta = [parts[part][1].meta[i] for part, i in order]
    return LoadedRows(meta, columns, [parts[part][1].multi_modal[i] for part, i in order])
