"""Loads the rows of a manifest, as columns that are views of their segments or as experiences."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from trinity_buffer import identity
from trinity_buffer.codec import Column, decode_segment
from trinity_buffer.codec.blob import Buffer
from trinity_buffer.errors import DamagedSegmentError, InvalidArgumentError, UnknownExperimentError
from trinity_buffer.events import WithSegment
from trinity_buffer.experience import Experience
from trinity_buffer.identity import EID
from trinity_buffer.limits import sizes
from trinity_buffer.pipeline.annotations import decode_annotations
from trinity_buffer.pipeline.handle import ExperimentHandle
from trinity_buffer.pipeline.load.blocks import (
    Array,
    Block,
    Field,
    SlotRange,
    Value,
    blocks_of,
    slot_ranges,
)
from trinity_buffer.pipeline.load.events import EventCache, Facts, facts_of, no_facts
from trinity_buffer.pipeline.load.experiences import load_experiences
from trinity_buffer.pipeline.load.segments import blobs_of, read_segments, unreadable_among
from trinity_buffer.pipeline.manifest import Manifest
from trinity_buffer.pipeline.tensors import tensors_of
from trinity_buffer.store import log, writer_queries
from trinity_buffer.store.rows import position_of, slot_of
from trinity_buffer.store.transaction import ReadSession, SegmentParts

FAMILIES = ("light", "tokens", "heavy")
ANNOTATION = ("annotation",)
ALL_FAMILIES = tuple(identity.FAMILIES)
_MODAL = "multi_modal_inputs."


@dataclass(frozen=True, slots=True)
class LoadedRows:
    """Columns of the rows of one manifest, in its order.

    Attributes:
        facts: columns from the log.
        fields: columns of vectors, views that must not be written to.
        multi_modal: name -> tensor with its own memory, for each row.
        unrecorded: if only some rows have log-probabilities, ``usual`` or ``expert`` -> uid of a
            row of that kind without them.
        unscorable: uid of a row that no trainer can score -> the sampling option that prevents it.
    """

    facts: Facts
    fields: Mapping[str, Field]
    multi_modal: Sequence[Mapping[str, Tensor]]
    unrecorded: Mapping[str, str]
    unscorable: Mapping[str, str]

    def reordered(self, order: Sequence[int]) -> LoadedRows:
        """Return the rows with row ``order[i]`` as row ``i``."""
        places = np.empty(len(order), np.int64)
        places[list(order)] = np.arange(len(order))
        fields = {name: field.moved(places) for name, field in self.fields.items()}
        modal = [self.multi_modal[row] for row in order]
        return replace(self, facts=self.facts.reordered(order), fields=fields, multi_modal=modal)

    def field(self, name: str) -> Field:
        """Return the column ``name``, which may be empty."""
        return self.fields.get(name) or Field()

    def lacking(self, name: str) -> list[int]:
        """Return the rows without the field ``name``; token-level rewards count as a reward."""
        missing = self.field("token_level_reward" if name == "reward" else name).missing(
            len(self.facts)
        )
        if name == "reward":
            return [row for row in missing if self.facts.rewards[row] is None]
        return missing

    def values(self, name: str) -> list[Value]:
        """Return the values of one column, None for rows without one."""
        return self.field(name).values(len(self.facts))


_Columns = dict[str, list[Column]]


@dataclass(slots=True)
class _Kept:
    """A decoded segment and its number of unserved rows."""

    columns: _Columns
    num_bytes: int
    left: int


class _Segments:
    """An LRU cache of decoded segments by key."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, _Kept] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._known

    def use(self, key: bytes, rows: int) -> _Columns:
        """Return the columns of a segment and count ``rows`` of its rows as served."""
        self._known.move_to_end(key)
        entry = self._known[key]
        entry.left -= rows
        return entry.columns

    def add(self, key: bytes, families: Mapping[str, Buffer]) -> None:
        columns: _Columns = {}
        rows = 0
        for blob in families.values():
            segment = decode_segment(blob)
            columns |= segment.columns
            rows = segment.rows
        self._known[key] = _Kept(columns, sum(map(len, families.values())), rows)

    def shrink(self) -> None:
        """Drop fully served segments, and the least recently used ones beyond the budget.

        The next segments are read into the memory this frees: fresh pages cost more than reading.
        """
        num_bytes = 0
        # From the most recently used on, so that the budget is spent on those.
        for key in reversed(list(self._known)):
            num_bytes += self._known[key].num_bytes
            if self._known[key].left <= 0 or num_bytes > sizes().bytes_kept:
                num_bytes -= self._known.pop(key).num_bytes


class RowLoader:
    """Loads the rows of manifests; reads each segment once while it is in use.

    Attributes:
        events: event cache of the experiment of the manifests.
    """

    def __init__(self, events: EventCache) -> None:
        self.events = events
        self._segments = _Segments()
        self._others: dict[str, RowLoader] = {}

    def load(self, s: ReadSession, manifest: Manifest) -> LoadedRows:
        """Return the columns of the manifest's rows.

        Raises:
            CodecError: the body of an event cannot be read.
            DamagedSegmentError: a checksum does not hold.
            ArchivedSegmentError: tensors have left the database and cannot be fetched.
            UnknownExperimentError: rows of an experiment that is not in the store.
        """
        if not manifest.groups:
            return LoadedRows(no_facts(), {}, [], {}, {})
        loaded = self._load(s, manifest)
        return replace(
            loaded,
            unrecorded=self._unrecorded(s, manifest, loaded),
            unscorable=self._unscorable(s, manifest, loaded),
        )

    def _unrecorded(
        self, s: ReadSession, manifest: Manifest, rows: LoadedRows
    ) -> Mapping[str, str]:
        """Return the kinds of rows that lack log-probabilities while others have them."""
        if not (manifest.source or rows.field("logprobs").missing(len(manifest.groups))):
            return {}
        there = rows.field("logprobs").present(len(manifest.groups))
        expert = np.array(manifest.source or [0] * len(there)) > 0
        if there.all() and not expert.any():
            return {}
        kinds = {"usual": np.flatnonzero(~there & ~expert), "expert": np.flatnonzero(expert)}
        # Without any usual row's log-probabilities, the step has no such column at all.
        if not (there & ~expert).any():
            return {}
        return {
            kind: self.uids(s, manifest, [int(places[0])])[0]
            for kind, places in kinds.items()
            if len(places)
        }

    def _unscorable(
        self, s: ReadSession, manifest: Manifest, rows: LoadedRows
    ) -> Mapping[str, str]:
        """Return the first of the policy's own rows that no trainer can score, and why."""
        for place, spans in enumerate(rows.facts.sampling if any(rows.facts.sampling) else ()):
            options = [option for *_, option in spans or () if option is not None]
            # An expert's rows were not sampled from the policy, so their sampling options do not
            # matter.
            if options and not (manifest.source and manifest.source[place]):
                return {self.uids(s, manifest, [place])[0]: options[0]}
        return {}

    def _load(self, s: ReadSession, manifest: Manifest) -> LoadedRows:
        # The common case: rows of one experiment need no merging.
        if not any(manifest.source):
            return self.load_rows(s, manifest.experiences, manifest.annotations)
        parts: list[tuple[list[int], LoadedRows]] = []
        for number, name in enumerate(("", *manifest.sources)):
            rows = manifest.rows_of(number)
            if rows:
                loader = self if number == 0 else self._other(s, name)
                loaded = loader.load_rows(
                    s,
                    [manifest.experiences[row] for row in rows],
                    [manifest.annotations[row] for row in rows],
                )
                parts.append((rows, loaded))
        return _merged(parts, len(manifest.experiences))

    def unreadable(self, s: ReadSession, manifest: Manifest) -> dict[int, str]:
        """Return place -> ``deleted`` or ``damaged``, of rows that can never be read."""
        reasons: dict[int, str] = {}
        for number, name in enumerate(("", *manifest.sources)):
            places = manifest.rows_of(number) if manifest.source else [*range(len(manifest.groups))]
            if places:
                loader = self if number == 0 else self._other(s, name)
                reasons |= loader.unreadable_rows(s, manifest, places)
        return reasons

    def unreadable_rows(
        self, s: ReadSession, manifest: Manifest, places: Sequence[int]
    ) -> dict[int, str]:
        """Do the same for ``places`` of this experiment alone; see `unreadable`."""
        reasons: dict[int, str] = {}
        for addresses, families in (
            (manifest.experiences, FAMILIES),
            (manifest.annotations, ANNOTATION),
        ):
            at = {place: position_of(addresses[place]) for place in places}
            events = self.events.events(s, set(at.values()))
            # The segment must have every family that its event names; a missing one is damage.
            wanted = _families_of(events.values(), families)
            bad = unreadable_among(s, wanted, families)
            reasons |= {p: bad[k] for p in places if (k := events[at[p]].segment) in bad}
        return reasons

    def lengths(self, s: ReadSession, manifest: Manifest) -> list[int]:
        """Return the tokens of each row of a manifest from the log; of a pair, one half.

        Raises:
            CodecError: the body of an event cannot be read.
        """
        lengths = [0] * len(manifest.groups)
        for number, name in enumerate(("", *manifest.sources)):
            places = manifest.rows_of(number)
            if places:
                loader = self if number == 0 else self._other(s, name)
                addresses = [manifest.experiences[place] for place in places]
                events = loader.events.events(s, set(map(position_of, addresses)))
                for place, length in zip(places, facts_of(addresses, events).lengths, strict=True):
                    lengths[place] = length
        return lengths

    def eid_of(self, s: ReadSession, address: int) -> EID:
        """Return the EID of an experience of this experiment."""
        (row,) = s.read(writer_queries.experience_rows, self.events.experiment, [address])
        return row.eid

    def uids(self, s: ReadSession, manifest: Manifest, places: Sequence[int]) -> list[str]:
        """Return the uids of the rows at ``places`` of a manifest."""
        uids = []
        for place in places:
            source = manifest.source[place] if manifest.source else 0
            loader = self._other(s, manifest.sources[source - 1]) if source else self
            uids.append(loader.eid_of(s, manifest.experiences[place]).uid)
        return uids

    def key_of(self, s: ReadSession, source: str) -> int:
        """Return the key of another experiment that rows come from."""
        return self._other(s, source).events.experiment

    def _other(self, s: ReadSession, name: str) -> RowLoader:
        """Return the loader of another experiment of the store."""
        if name not in self._others:
            key = s.read(log.find_experiment, name)
            if key is None:
                raise UnknownExperimentError(
                    f"a step trains on rows of experiment {name!r}, which is not in this store"
                )
            self._others[name] = RowLoader(EventCache(key, name))
        return self._others[name]

    def load_rows(
        self, s: ReadSession, experiences: Sequence[int], annotated: Sequence[int]
    ) -> LoadedRows:
        """Return the columns of rows of this experiment, by their two addresses; see `load`."""
        own, computed = slot_ranges(experiences), slot_ranges(annotated)
        events = self.events.events(s, {row_range.position for row_range in (*own, *computed)})
        facts = facts_of(experiences, events)
        keys = {event.segment for event in events.values() if event.segment}
        # Consecutive steps share segments, since a write or an annotation spans several groups.
        missing = [key for key in keys if key not in self._segments]
        parts = read_segments(s, missing, (*FAMILIES, *ANNOTATION)).all_parts()
        return s.compute(self._gather, facts, own, computed, events, missing, parts)

    def _gather(
        self,
        facts: Facts,
        own: Sequence[SlotRange],
        computed: Sequence[SlotRange],
        events: Mapping[int, WithSegment],
        missing: Sequence[bytes],
        parts: SegmentParts,
    ) -> LoadedRows:
        blobs = blobs_of(parts)
        wanted = _families_of(events.values(), (*FAMILIES, *ANNOTATION))
        for key in missing:
            if key not in blobs or not wanted[key] <= blobs[key].keys():
                raise DamagedSegmentError(f"segment {key.hex()} is missing: run `verify`")
            self._segments.add(key, blobs[key])
        modal: list[dict[str, Tensor]] = [{} for _ in range(len(facts))]
        fields = self._fields(own, modal, events)
        for name, field in self._fields(computed, modal, events).items():
            # A strategy's value replaces the recorded one, row by row.
            fields[name] = Field(_left(fields, name, field, len(facts)) + field.blocks)
        # Only after all columns are taken: this step may use more segments than the budget allows.
        self._segments.shrink()
        # Validation lets no row without tokens in, so this is damage rather than a user's mistake.
        if not len(facts) or fields.get("tokens", Field()).missing(len(facts)):
            raise DamagedSegmentError("an experience of the step has no tokens: run `verify`")
        return LoadedRows(facts, fields, modal, {}, {})

    def _fields(
        self,
        ranges: Sequence[SlotRange],
        modal: Sequence[dict[str, Tensor]],
        events: Mapping[int, WithSegment],
    ) -> dict[str, Field]:
        """Return the vector columns of rows; other tensors are put into ``modal``."""
        by_name: dict[str, Field] = {}
        for rows, position, slots in ranges:
            key = events[position].segment
            segment = self._segments.use(key, len(rows)) if key else {}
            for name, column in ((n, c) for n, columns in segment.items() for c in columns):
                if name.startswith(_MODAL):
                    _add_modal(modal, name.removeprefix(_MODAL), column, rows, slots)
                elif column.shapes.shape[1] == 1 or column.encoding == "scaled_mask":
                    field = by_name.setdefault(name, Field())
                    field.blocks += blocks_of(column, rows, slots)
        return by_name


def _families_of(events: Iterable[WithSegment], families: Collection[str]) -> dict[bytes, set[str]]:
    """Return segment key -> those of ``families`` that the segment has."""
    return {event.segment: event.families.keys() & families for event in events if event.segment}


def _left(fields: Mapping[str, Field], name: str, computed: Field, rows: int) -> list[Block]:
    """Return the recorded blocks of a field, for rows without a value from the strategy."""
    recorded = fields.get(name)
    return recorded.without(computed.present(rows)).blocks if recorded else []


def _add_modal(
    modal: Sequence[dict[str, Tensor]], name: str, column: Column, rows: Array, slots: range
) -> None:
    there = range(len(column.shapes)) if column.rows is None else column.rows.tolist()
    for index, slot in enumerate(there):
        if slot in slots:
            modal[rows[slot - slots.start]][name] = _copied(column, index)


def _copied(column: Column, index: int) -> Tensor:
    """Return a copy of one tensor of a column."""
    width = column.elements.itemsize
    begin, end = (column.offsets[index : index + 2] * width).tolist()
    # A copy, as a view would keep the whole segment in memory.
    data = np.array(column.data[begin:end])
    return tensors_of(
        replace(column, shapes=column.shapes[index : index + 1], data=data, rows=None)
    )[0]


def _merged(parts: Sequence[tuple[Sequence[int], LoadedRows]], total: int) -> LoadedRows:
    """Merge (places, rows) of several experiments into the order of the manifest."""
    places = {row: (part, i) for part, (rows, _) in enumerate(parts) for i, row in enumerate(rows)}
    fields: dict[str, Field] = {}
    for rows, loaded in parts:
        for name, field in loaded.fields.items():
            fields.setdefault(name, Field()).blocks += field.moved(rows).blocks
    order = [places[row] for row in range(total)]
    facts = no_facts()
    for part, i in order:
        facts.append(parts[part][1].facts, i, i + 1)
    modal = [parts[part][1].multi_modal[i] for part, i in order]
    return LoadedRows(facts, fields, modal, {}, {})


async def experiences_of(experiment: ExperimentHandle, manifest: Manifest) -> list[Experience]:
    """Return the rows of a step in their order, each with the advantages that it trains on.

    Args:
        manifest: manifest of a step of a trainer of ``experiment``.

    Raises:
        InvalidArgumentError: rows of another experiment are mixed in.
        DamagedSegmentError: an annotation cannot be read.
    """
    if any(manifest.source):
        raise InvalidArgumentError(
            f"step {manifest.step} mixes in rows of {', '.join(manifest.sources)}: read its "
            "micro-batches"
        )
    database, cache = experiment.database, EventCache(experiment.key, experiment.name)
    rows = await database.read(
        writer_queries.experience_rows, cache.experiment, sorted(set(manifest.experiences))
    )
    experiences = await load_experiences(database, cache, rows, ALL_FAMILIES)
    by_address = {
        row.address: experience for row, experience in zip(rows, experiences, strict=True)
    }
    ordered = [by_address[address] for address in manifest.experiences]
    await database.read_session(lambda s: _annotate(s, cache, manifest.annotations, ordered))
    return ordered


def _annotate(
    s: ReadSession, cache: EventCache, annotations: tuple[int, ...], ordered: list[Experience]
) -> None:
    """Set each experience's computed tensors; one without an annotation segment keeps its own."""
    events = cache.events(s, {position_of(address) for address in annotations})
    places: dict[bytes, list[int]] = {}
    for place, address in enumerate(annotations):
        key = events[position_of(address)].segment
        if key:
            places.setdefault(key, []).append(place)
    blobs = blobs_of(read_segments(s, places, ("annotation",)).all_parts())
    for key, rows in places.items():
        if key not in blobs:
            raise DamagedSegmentError(f"segment {key.hex()} is missing: run `verify`")
        slots = [slot_of(annotations[place]) for place in rows]
        masks = [ordered[place].action_mask for place in rows]
        computed = decode_annotations(blobs[key]["annotation"], slots, masks)
        for place, tensors in zip(rows, computed, strict=True):
            vars(ordered[place]).update((n, t) for n, t in tensors.items() if t is not None)
