"""Loads stored rows as experiences, and those of a manifest as columns that are views of segments.

A column is made of blocks of values that are contiguous in a segment. The rows of a step were
mostly written together, so a batch takes a few large copies instead of thousands of small ones, in
whatever order its rows are.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trinity_buffer import errors, identity
from trinity_buffer.codec.segments import Column, decode_segment
from trinity_buffer.events import BatchLeased, ExperiencesRecorded, WithSegment
from trinity_buffer.experience import Experience
from trinity_buffer.limits import sizes
from trinity_buffer.pipeline.coordination.waiting import one_line
from trinity_buffer.pipeline.encoding import decode_experiences, flat_tensor, tensors_of
from trinity_buffer.pipeline.handle import ExperimentHandle
from trinity_buffer.pipeline.load import reading
from trinity_buffer.store import log, writer_queries
from trinity_buffer.store import rows as store_rows
from trinity_buffer.store.connection import Database
from trinity_buffer.store.transaction import ReadSession

_logger = logging.getLogger(__name__)


async def load_experiences(
    database: Database,
    cache: reading.EventCache,
    rows: Sequence[store_rows.ExperienceRow],
    families: Sequence[str],
) -> list[Experience]:
    """Return the experiences of ``rows``, in their order, with the columns of ``families``.

    Each carries its log address as ``address``. Changes to its tensors never reach the store. If
    its tensors are gone, ``archived`` says why; if it cannot be decoded, ``damaged`` does.

    Raises:
        CodecVersionError: bytes of a newer version.
    """

    def load(s: ReadSession, asked: Sequence[store_rows.ExperienceRow]) -> list[Experience]:
        try:
            stored = reading.read_segments(s, (row.segment for row in asked), families)
            events = cache.events(s, {store_rows.position_of(row.address) for row in asked})
            return _decoded(asked, events, stored, families)
        except errors.CodecVersionError:
            raise
        except (errors.CodecError, errors.DamagedSegmentError) as error:
            if len(asked) == 1:
                return [_damaged_experience(asked[0], error)]
        middle = len(asked) // 2  # bisect: damaged rows are few
        return load(s, asked[:middle]) + load(s, asked[middle:])

    return await database.read_session(lambda s: load(s, rows))


def _damaged_experience(row: store_rows.ExperienceRow, error: Exception) -> Experience:
    """Return an experience with what the projection knows of an undecodable row."""
    _logger.warning(
        "experience %s cannot be read: %s", one_line(f"{row.eid}"), one_line(f"{error}")
    )
    return Experience.from_state(
        {
            "eid": row.eid,
            "prompt_length": row.prompt_length,
            "reward": row.reward,
            "experience_type": "single_turn",
            "address": row.address,
            "archived": None,
            "damaged": str(error),
            "_length": row.length,
            "_response_length": row.length - row.prompt_length,
            "_policy_version": row.policy_version,
            "_finish_reason": row.finish_reason,
        }
    )


def _decoded(
    rows: Sequence[store_rows.ExperienceRow],
    events: Mapping[int, WithSegment],
    stored: reading.StoredSegments,
    families: Sequence[str],
) -> list[Experience]:
    """Decode ``rows`` from their events and segments."""
    blobs = reading.blobs_of(stored.parts)
    by_event: dict[int, list[store_rows.ExperienceRow]] = {}
    for row in rows:
        by_event.setdefault(store_rows.position_of(row.address), []).append(row)
    made: dict[int, Experience] = {}
    for position, rows_of_event in by_event.items():
        buffers = blobs.get(rows_of_event[0].segment, {})
        slots = [store_rows.slot_of(row.address) for row in rows_of_event]
        event = events[position]
        assert isinstance(event, ExperiencesRecorded)  # rows are recorded by no other kind
        absence = stored.absent.get(rows_of_event[0].segment)
        if absence is None and any(f in event.families and f not in buffers for f in families):
            raise errors.DamagedSegmentError(
                f"segment {rows_of_event[0].segment.hex()} is missing: run `verify`"
            )
        held = [f for f in families if absence is None or f not in event.families]
        decoded_rows = decode_experiences(buffers, event.columns, slots, loaded=held)
        for row, experience in zip(rows_of_event, decoded_rows, strict=True):
            experience.address = row.address
            experience.archived = None if absence is None else absence.why
            made[row.address] = experience
    return [made[row.address] for row in rows]


Array: TypeAlias = npt.NDArray[Any]
Value: TypeAlias = "Array | float | None"
"""A vector as a view, one number that stands for ``number * action_mask``, or None."""

_ONLY_TORCH = ("bfloat", "float8", "float4")
"""Prefixes of the names of float dtypes that NumPy lacks."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """The values of one field in some rows of a step; views that must not be written to.

    Attributes:
        rows: ``[n]``, the rows of the step.
        data: their elements, row after row; if scaled, one number per row.
        ends: ``[n + 1]``, offsets of the rows in ``data``.
        scaled: whether each number stands for ``number * action_mask``.
    """

    rows: Array
    data: Array
    ends: Array
    scaled: bool = False

    def values(self) -> list[Value]:
        """Return the value of each row."""
        if self.scaled:
            return [float(number) for number in self.data]
        return [self.data[a:z] for a, z in pairwise(self.ends.tolist())]


@dataclass(slots=True)
class Field:
    """One field of the ``number`` rows of a step; rows outside all blocks have no value."""

    number: int
    blocks: list[Block] = field(default_factory=list)

    def values(self) -> list[Value]:
        """Return the value of each row, None for missing ones."""
        values: list[Value] = [None] * self.number
        for block in self.blocks:
            for row, value in zip(block.rows.tolist(), block.values(), strict=True):
                values[row] = value
        return values

    def present(self) -> Array:
        """Return ``[rows]`` bool: which rows have a value."""
        there = np.zeros(self.number, np.bool_)
        for block in self.blocks:
            there[block.rows] = True
        return there

    def sizes(self) -> Array:
        """Return ``[rows]``: the number of elements of each row, -1 if missing or scaled."""
        sizes = np.full(self.number, -1, np.int64)
        for block in self.blocks:
            if not block.scaled:
                sizes[block.rows] = block.ends[1:] - block.ends[:-1]
        return sizes

    def without(self, dropped: Array) -> Field:
        """Return the field without the ``dropped`` rows (``[rows]`` bool)."""
        parts = []
        for block in self.blocks:
            left = np.flatnonzero(~dropped[block.rows])
            for a, z in reading.contiguous_ranges(left):
                first, last = int(left[a]), int(left[z - 1]) + 1
                ends = block.ends[first : last + 1]
                data, rows = block.data[ends[0] : ends[-1]], block.rows[first:last]
                parts.append(Block(rows, data, ends - ends[0], block.scaled))
        return Field(self.number, parts)


def no_fields(number: int) -> defaultdict[str, Field]:
    """Return no fields of ``number`` rows, by name: a field that is looked up is an empty one."""
    return defaultdict(partial(Field, number))


def field_of_values(values: Sequence[Array]) -> Field:
    """Return a field made of one vector per row."""
    ends = np.cumsum([0, *map(len, values)])
    return Field(len(values), [Block(np.arange(len(values)), np.concatenate(values), ends)])


SlotRange: TypeAlias = tuple[Array, WithSegment, range]
"""Rows of a step that are consecutive slots of an event: the rows, the event, and its slots."""


def block_of(column: Column, rows: Array, slots: range) -> Block | None:
    """Return the ``slots`` of a column as a block of the step's ``rows``; None if it has none."""
    first, last = slots.start, slots.stop
    if column.rows is not None:
        first, last = np.searchsorted(column.rows, [first, last]).tolist()
        if first == last:
            return None
        rows = rows[column.rows[first:last] - slots.start]
    scaled = column.encoding == "scaled_mask"
    ends = np.arange(first, last + 1) if scaled else column.offsets[first : last + 1]
    begin, end = int(ends[0]), int(ends[-1])
    data: Array = column.elements[begin:end]
    if column.dtype.startswith(_ONLY_TORCH):
        own = np.array(column.data[begin * data.itemsize : end * data.itemsize])
        data = flat_tensor(replace(column, data=own)).float().numpy()
    return Block(rows, data, ends - begin if begin else ends, scaled)


UNREADABLE = (errors.ArchivedSegmentError, errors.CodecError, errors.DamagedSegmentError)
"""Errors of rows that cannot be read."""

NAMED_ROWS = 3
"""At most so many unreadable rows are named in a message."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What events hold of the rows of a step, one entry per row, by the names of their columns.

    Attributes:
        reward: float64, NaN for none.
        policy_version, sampling: of objects, None where nothing was recorded.
    """

    reward: Array
    prompt_length: Array
    length: Array
    trained_tokens: Array
    run: Array
    step: Array
    policy_version: Array
    sampling: Array

    @classmethod
    def of(cls, number: int, ranges: Iterable[SlotRange]) -> Facts:
        """Return the facts of ``number`` rows, which lie in these ranges of events."""
        order, sampling = [np.zeros(0, np.int64)], dict[int, Sequence[Sequence[Any]]]()
        values: dict[str, list[Any]] = {column.name: [] for column in fields(cls)[:-1]}
        for rows, event, slots in ranges:
            assert isinstance(event, ExperiencesRecorded)  # no other kind has experiences
            order.append(rows)
            for name, column in values.items():
                column += getattr(event.columns, name)[slots.start : slots.stop]
            spans = event.sampling or {}
            sampling |= {int(rows[at - slots.start]): spans[at] for at in spans if at in slots}
        kinds = (np.float64, *5 * (np.int64,), np.object_, np.object_)
        columns: list[Any] = [np.empty(number, kind) for kind in kinds]
        # All ranges at once: many are of a few rows.
        places = np.concatenate(order)
        for column, own in zip(columns, values.values(), strict=False):
            column[places] = own
        for row, spans_of_row in sampling.items():
            columns[-1][row] = spans_of_row
        return cls(*columns)

    def reordered(self, order: Sequence[int] | Array) -> Facts:
        """Return the facts with row ``order[i]`` as row ``i``."""
        return Facts(*(getattr(self, column.name)[order] for column in fields(self)))


FAMILIES = ("light", "tokens", "heavy")
ANNOTATION = ("annotation",)
ALL_FAMILIES = tuple(identity.FAMILIES)
_MODAL = "multi_modal_inputs."


def _rewarded(lease: BatchLeased, facts: Facts, fields: Mapping[str, Field]) -> Array:
    """Return which rows have a reward, or a run that has one."""
    groups = np.array(lease.groups)
    rewards = reading.rewards_by_run(facts.reward, groups, facts.run, facts.step).rows
    return ~np.isnan(rewards) | fields["token_level_reward"].present()


@dataclass(frozen=True, slots=True)
class LoadedRows:
    """Columns of the rows of one manifest, in its order.

    Attributes:
        facts: columns from the log.
        expert: ``[rows]`` bool, which rows come from an expert's experiment.
        fields: columns of vectors, views that must not be written to; of other names empty ones.
        multi_modal: name -> tensor with its own memory, for each row.
        unrecorded: if only some rows have log-probabilities, ``usual`` or ``expert`` -> uid of a
            row of that kind without them.
        unscorable: uid of a row that no trainer can score -> the sampling option that prevents it.
        unrewarded: uid of a row without a reward, of which its run has none either; empty if no row
            has any, None if all have one.
    """

    facts: Facts
    expert: Array
    fields: defaultdict[str, Field]
    multi_modal: Sequence[Mapping[str, Tensor]]
    unrecorded: Mapping[str, str] = field(default_factory=dict)
    unscorable: Mapping[str, str] = field(default_factory=dict)
    unrewarded: str | None = None

    def reordered(self, order: Sequence[int]) -> LoadedRows:
        """Return the rows with row ``order[i]`` as row ``i``."""
        places = np.empty(len(order), np.int64)
        places[list(order)] = np.arange(len(order))
        moved: dict[int, Array] = {}  # fields of one segment go on sharing their array of rows
        fields = no_fields(len(order))
        for name, of in self.fields.items():
            fields[name].blocks += [
                replace(block, rows=moved.setdefault(id(block.rows), places[block.rows]))
                for block in of.blocks
            ]
        facts, modal = self.facts.reordered([*order]), [self.multi_modal[row] for row in order]
        expert = self.expert[[*order]]
        return replace(self, facts=facts, expert=expert, fields=fields, multi_modal=modal)

    def halves(self) -> LoadedRows:
        """Return pairs as alternating rows: prompt + chosen, prompt + rejected."""
        values = (self.fields[name].values() for name in ("tokens", "chosen", "rejected"))
        pairs: Any = zip(*values, strict=True)
        answers = [(prompt, half) for prompt, *both in pairs for half in both]
        tokens = [np.concatenate(parts) for parts in answers]
        trained = np.array([len(half) for _, half in answers])
        masks = [np.ones(number, np.bool_) for number in trained]
        pair_of = np.arange(len(answers)) // 2
        fields = no_fields(len(answers))
        fields |= {"tokens": field_of_values(tokens), "action_mask": field_of_values(masks)}
        facts = replace(
            self.facts.reordered(pair_of),
            reward=np.full(len(answers), np.nan),
            length=np.array([len(ids) for ids in tokens]),
            prompt_length=np.array([len(prompt) for prompt, _ in answers]),
            trained_tokens=trained,
            sampling=np.full(len(answers), None),
        )
        expert, modal = self.expert[pair_of], [of for of in self.multi_modal for _ in range(2)]
        return replace(self, facts=facts, expert=expert, fields=fields, multi_modal=modal)

    def planned_lengths(self, layout: str) -> Array:
        """Return the tokens of each row that `plan_microbatches` counts.

        Of a stored pair, those of its longer half, or packed of both.
        """
        if not self.fields["chosen"].blocks:
            return self.facts.length
        # Events know only the prompts of pairs.
        prompts, *halves = (self.fields[n].sizes() for n in ("tokens", "chosen", "rejected"))
        longest, both = np.maximum(*halves) + prompts, sum(halves) + 2 * prompts
        return longest if layout == "padded" else both


@dataclass(slots=True)
class _Segment:
    """A decoded segment and its number of unserved rows."""

    columns: dict[str, list[Column]]
    num_bytes: int
    left: int


class RowLoader:
    """Loads the rows of manifests; reads each segment once while it is in use.

    Attributes:
        events: event cache of the experiment of the manifests.
        others: those of other experiments, whose rows are mixed in, by name.
    """

    def __init__(self, events: reading.EventCache) -> None:
        self.events = events
        self.others: dict[str, reading.EventCache] = {}
        # From the least to the most recently used.
        self._segments: OrderedDict[bytes, _Segment] = OrderedDict()

    def load(self, s: ReadSession, lease: BatchLeased) -> LoadedRows:
        """Return the columns of the manifest's rows.

        Raises:
            CodecError: the body of an event cannot be read.
            DamagedSegmentError: a checksum does not hold.
            ArchivedSegmentError: tensors have left the database and cannot be fetched.
            UnknownExperimentError: rows of an experiment that is not in the store.
        """
        if not (number := len(lease.groups)):
            return LoadedRows(Facts.of(0, ()), np.zeros(0, np.bool_), no_fields(0), [])
        own, computed = self.ranges(s, lease)
        self._decode(s, (*own, *computed))
        expert = np.array(lease.source or [0] * number) > 0
        fields, modal = self._gathered(own, computed, number)
        facts = Facts.of(number, own)
        unrecorded, unscorable = dict[str, str](), dict[str, str]()
        recorded = fields["logprobs"].present()
        # Without any usual row's log-probabilities, the step has no such column at all.
        if (recorded & ~expert).any() and (expert.any() or not recorded.all()):
            for kind, places in (("usual", ~recorded & ~expert), ("expert", expert)):
                if places.any():
                    unrecorded[kind] = self.uids(s, lease, [int(places.argmax())])[0]
        for place in np.flatnonzero(facts.sampling).tolist():
            options = [option for *_, option in facts.sampling[place] if option is not None]
            # An expert's rows were not sampled from the policy, so their options do not matter.
            if options and not unscorable and not expert[place]:
                unscorable[self.uids(s, lease, [place])[0]] = options[0]
        rewarded, unrewarded = expert | _rewarded(lease, facts, fields), None
        if not rewarded.all():
            first = int(rewarded.argmin())
            unrewarded = self.uids(s, lease, [first])[0] if rewarded.any() else ""
        return LoadedRows(facts, expert, fields, modal, unrecorded, unscorable, unrewarded)

    def annotations(self, s: ReadSession, lease: BatchLeased) -> Mapping[str, Field]:
        """Return the columns that a strategy computed for the manifest's rows.

        Raises:
            ArchivedSegmentError, CodecError, DamagedSegmentError: as `load`.
        """
        _, computed = self.ranges(s, lease)
        self._decode(s, computed)
        return self._fields(computed, [{}] * len(lease.groups))

    def _decode(self, s: ReadSession, ranges: Iterable[SlotRange]) -> None:
        """Read the segments of ``ranges`` that are not in use already."""
        wanted = _families_of(ranges, (*FAMILIES, *ANNOTATION))
        # Consecutive steps share segments, since a write or an annotation spans several groups.
        missing = {key: of for key, of in wanted.items() if key not in self._segments}
        blobs = reading.read_blobs(s, missing, (*FAMILIES, *ANNOTATION))
        for key in missing:
            decoded = [decode_segment(blob) for blob in blobs[key].values()]
            columns = {name: of for segment in decoded for name, of in segment.columns.items()}
            num_bytes = sum(map(len, blobs[key].values()))
            self._segments[key] = _Segment(columns, num_bytes, decoded[-1].rows)

    def load_leased(self, s: ReadSession, lease: BatchLeased, remedy: str) -> LoadedRows:
        """Return the columns of a leased step, or raise its `refusal`."""
        try:
            return self.load(s, lease)
        except UNREADABLE as error:
            raise self.refusal(s, lease, error, remedy) from error

    def refusal(
        self, s: ReadSession, lease: BatchLeased, error: errors.TrinityBufferError, remedy: str
    ) -> errors.TrinityBufferError:
        """Return the error for a step with unreadable rows, which names some of them.

        Args:
            error: the error of loading them, which names the segment.
            remedy: what to do if no backup has them.
        """
        step, lost = f"step {lease.step} of trainer {lease.consumer!r}", self.unreadable(s, lease)
        if not lost:
            return type(error)(f"{step} cannot be read now: {error}")
        why = ", ".join(sorted(set(lost.values())))
        return type(error)(
            f"{step} was leased and {len(lost)} of its {len(lease.groups)} rows can never be read "
            f"({why}): {self.named(s, lease, lost)}. {error}. If no backup has it, {remedy}"
        )

    def named(self, s: ReadSession, lease: BatchLeased, places: Iterable[int]) -> str:
        """Return uid and address of the first rows among ``places`` of a manifest, as text."""
        first = sorted(places)[: NAMED_ROWS + 1]
        shown = first[:NAMED_ROWS]
        uids = zip(self.uids(s, lease, shown), shown, strict=True)
        address = store_rows.format_address
        named = [f"{uid} at {address(lease.experiences[place])}" for uid, place in uids]
        return ", ".join(named) + (" ..." if len(first) > NAMED_ROWS else "")

    def unreadable(self, s: ReadSession, lease: BatchLeased) -> dict[int, str]:
        """Return place -> ``deleted`` or ``damaged``, of rows that can never be read."""
        reasons: dict[int, str] = {}
        for ranges, families in zip(self.ranges(s, lease), (FAMILIES, ANNOTATION), strict=True):
            # The segment must have every family that its event names; a missing one is damage.
            bad = reading.unreadable_among(s, _families_of(ranges, families), families)
            for rows, event, _ in ranges:
                if event.segment in bad:
                    reasons |= dict.fromkeys(rows.tolist(), bad[event.segment])
        return reasons

    def uids(self, s: ReadSession, lease: BatchLeased, places: Sequence[int]) -> list[str]:
        """Return the uids of the rows at ``places`` of a manifest."""
        uids = []
        for place in places:
            cache = self.cache_of(s, lease, lease.source[place] if lease.source else 0)
            address = lease.experiences[place]
            (row,) = s.read(writer_queries.experience_rows, cache.experiment, [address])
            uids.append(row.eid.uid)
        return uids

    def cache_of(self, s: ReadSession, lease: BatchLeased, source: int) -> reading.EventCache:
        """Return the event cache of the experiment that rows of a manifest come from, by number."""
        if not source:
            return self.events
        name = lease.sources[source - 1]
        if name not in self.others:
            if (key := s.read(log.find_experiment, name)) is None:
                raise errors.UnknownExperimentError(
                    f"a step trains on rows of experiment {name!r}, which is not in this store"
                )
            self.others[name] = reading.EventCache(key, name)
        return self.others[name]

    def ranges(self, s: ReadSession, lease: BatchLeased) -> tuple[list[SlotRange], list[SlotRange]]:
        """Return where the rows of a manifest are recorded, and where their annotations are."""
        ranges: tuple[list[SlotRange], list[SlotRange]] = ([], [])
        columns = [np.array(column) for column in (lease.experiences, lease.annotations)]
        sources = np.array(lease.source or np.zeros(len(lease.groups)))
        per_event = store_rows.MAX_ROWS_PER_EVENT
        for number in sorted({*lease.source}) or [0]:
            in_step = np.flatnonzero(sources == number)
            orders = [in_step[np.argsort(column[in_step], kind="stable")] for column in columns]
            # Consecutive addresses are consecutive rows of one segment: an address holds the
            # position in its high bits, so the next event's addresses are far away.
            parts = [
                (row_ranges, order[a:z], divmod(int(column[order[a]]), per_event))
                for row_ranges, order, column in zip(ranges, orders, columns, strict=True)
                for a, z in reading.contiguous_ranges(column[order])
            ]
            positions = {position for _, _, (position, _) in parts}
            events = self.cache_of(s, lease, number).events(s, positions)
            for row_ranges, rows, (position, slot) in parts:
                row_ranges.append((rows, events[position], range(slot, slot + len(rows))))
        return ranges

    def _gathered(
        self, own: Sequence[SlotRange], computed: Sequence[SlotRange], number: int
    ) -> tuple[defaultdict[str, Field], list[Mapping[str, Tensor]]]:
        """Return the fields of ``number`` rows, and other tensors of each.

        Args:
            own, computed: where the recorded tensors are, and the computed ones.
            number: number of rows.
        """
        modal: list[Mapping[str, Tensor]] = [{}] * number
        fields = self._fields(own, modal)
        for name, values in self._fields(computed, modal).items():
            # A strategy's value replaces the recorded one, row by row.
            recorded = fields[name].without(values.present()).blocks if name in fields else []
            fields[name] = Field(number, recorded + values.blocks)
        # Only after all columns are taken: this step may use more segments than the budget allows.
        # The next segments are read into the memory this frees: fresh pages cost more than reading.
        num_bytes = 0
        for key in reversed(list(self._segments)):
            segment = self._segments[key]
            num_bytes += segment.num_bytes
            if segment.left <= 0 or num_bytes > sizes.bytes_kept:
                num_bytes -= segment.num_bytes
                del self._segments[key]
        # Validation lets no row without tokens in, so this is damage rather than a user's mistake.
        if not fields["tokens"].present().all():
            raise errors.DamagedSegmentError(
                "an experience of the step has no tokens: run `verify`"
            )
        return fields, modal

    def _fields(
        self, ranges: Sequence[SlotRange], modal: list[Mapping[str, Tensor]]
    ) -> defaultdict[str, Field]:
        """Return the vector columns of rows; other tensors are put into ``modal``."""
        by_name = no_fields(len(modal))
        for rows, event, slots in ranges:
            if not event.segment:
                continue
            self._segments.move_to_end(event.segment)
            segment = self._segments[event.segment]
            segment.left -= len(rows)
            for name, column in ((n, c) for n, of in segment.columns.items() for c in of):
                block = None
                if name.startswith(_MODAL):
                    _add_modal(modal, name.removeprefix(_MODAL), column, rows, slots)
                elif column.shapes.shape[1] == 1 or column.encoding == "scaled_mask":
                    block = block_of(column, rows, slots)
                if block is not None:
                    by_name[name].blocks.append(block)
        return by_name


def _families_of(ranges: Iterable[SlotRange], families: Collection[str]) -> dict[bytes, set[str]]:
    """Return segment key -> those of ``families`` that the segment has."""
    events = (event for _, event, _ in ranges if event.segment)
    return {event.segment: event.families.keys() & families for event in events}


def _add_modal(
    modal: list[Mapping[str, Tensor]], name: str, column: Column, rows: Array, slots: range
) -> None:
    ends = (column.offsets * column.elements.itemsize).tolist()
    for index, slot in enumerate(column.places):
        if slot in slots:
            begin, end = ends[index : index + 2]
            # A copy, as a view would keep the whole segment in memory.
            data, shape = np.array(column.data[begin:end]), column.shapes[index : index + 1]
            (tensor,) = tensors_of(replace(column, shapes=shape, data=data, rows=None))
            row = rows[slot - slots.start]
            modal[row] = {**modal[row], name: tensor}


async def experiences_of(experiment: ExperimentHandle, manifest: BatchLeased) -> list[Experience]:
    """Return the rows of a step in their order, each with the advantages that it trains on.

    Args:
        manifest: manifest of a step of a trainer of ``experiment``.

    Raises:
        InvalidArgumentError: rows of another experiment are mixed in.
        DamagedSegmentError: an annotation cannot be read.
    """
    if any(manifest.source):
        raise errors.InvalidArgumentError(
            f"step {manifest.step} mixes in rows of {', '.join(manifest.sources)}: read its "
            "micro-batches"
        )
    database = experiment.database
    loader = RowLoader(reading.EventCache(experiment.key, experiment.name))
    rows = await database.read(
        writer_queries.experience_rows, experiment.key, sorted(set(manifest.experiences))
    )
    experiences = await load_experiences(database, loader.events, rows, ALL_FAMILIES)
    by_address = {row.address: loaded for row, loaded in zip(rows, experiences, strict=True)}
    # Each its own: copies of an experience may have other advantages.
    ordered = [copy(by_address[address]) for address in manifest.experiences]

    computed = await database.read_session(partial(loader.annotations, lease=manifest))
    for name, block in ((name, block) for name, of in computed.items() for block in of.blocks):
        values = torch.tensor(block.data)  # of its own: another field may be the same column
        pieces = values if block.scaled else values.split(np.diff(block.ends).tolist())
        for row, piece in zip(block.rows.tolist(), pieces, strict=True):
            mask: Any = ordered[row].action_mask
            vars(ordered[row])[name] = piece * mask.to(piece.dtype) if block.scaled else piece
    return ordered
