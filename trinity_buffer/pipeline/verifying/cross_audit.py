"""What events say of each other: refusals and seals, manifests and annotations, archives."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trinity_buffer.events import (
    BatchLeased,
    BatchSealed,
    ConsumerRegistered,
    ExperiencesAnnotated,
    ExperiencesRecorded,
    ExperiencesRejected,
    Fact,
    SegmentsArchived,
    StepMeasured,
)
from trinity_buffer.pipeline.verifying.addresses import Addresses, Integers, packed, unpacked
from trinity_buffer.pipeline.verifying.findings import Problem
from trinity_buffer.store.rows import MAX_ROWS_PER_EVENT, first_address, written_as


class CrossAudit:
    """Collects what later events must agree with. Feed it with `take`.

    Attributes:
        named: keys of all segments that events name.
    """

    def __init__(self) -> None:
        self.named: set[bytes] = set()
        self._sealed: set[str] = set()
        self._trained: dict[str, str] = {}  # trainer -> its annotation set
        self._annotated: dict[str, dict[int, bytes]] = {}  # set -> position -> packed experiences
        self._rejected: dict[str, Addresses] = {}  # by a set
        self._members: dict[bytes, bytes] = {}  # segment -> packed experiences

    def take(self, position: int, fact: Fact) -> Iterator[Problem]:  # noqa: C901 - one case per kind
        """Take in an event; yield what contradicts those before it."""
        match fact:
            case BatchSealed():
                self._sealed.add(str(fact.batch))
            case ConsumerRegistered(kind="trainer"):
                self._trained[fact.consumer] = str(fact.config.get("strategy"))
            case ExperiencesRecorded():
                yield from self._recorded(position, fact)
            case ExperiencesAnnotated():
                self._take_annotated(position, fact)
            case ExperiencesRejected(by="strategy"):
                rows = np.array(fact.experiences, np.int64)
                self._rejected.setdefault(fact.consumer, Addresses()).add(rows)
            case StepMeasured():
                self.named.add(fact.segment)
            case BatchLeased():
                yield from self._leased(position, fact)
            case SegmentsArchived():
                yield from self._archived(position, fact)
            case _:
                pass  # the other audits look at it

    def _recorded(self, position: int, fact: ExperiencesRecorded) -> Iterator[Problem]:
        self.named.add(fact.segment)
        count, base = len(fact.columns), first_address(position)
        addresses = np.arange(base, base + count, dtype=np.int64)
        self._members[fact.segment] = packed(np.delete(addresses, sorted(fact.refused)))
        if not fact.refused and self._sealed.isdisjoint(map(str, set(fact.columns.batch))):
            return
        for slot, batch in enumerate(map(str, fact.columns.batch)):
            sealed, late = batch in self._sealed, fact.refused.get(slot) == "late"
            if sealed == late:
                continue
            what = "was refused as late, and its batch was not sealed"
            if sealed:
                what = "was recorded after its batch was sealed, and not refused"
            yield Problem("log", f"experience {written_as(base + slot)}", what)

    def _take_annotated(self, position: int, fact: ExperiencesAnnotated) -> None:
        self.named.add(fact.segment)
        rows = np.array(fact.experiences, np.int64)
        self._annotated.setdefault(fact.consumer, {})[position] = packed(rows)

    def _decided(self, name: str) -> Integers:
        """Return what a set has decided so far."""
        rejected = self._rejected.get(name, Addresses()).all()
        return np.concatenate([*map(unpacked, self._annotated.get(name, {}).values()), rejected])

    def _leased(self, position: int, fact: BatchLeased) -> Iterator[Problem]:
        """Compare each own row of a manifest with the annotation that it names."""
        rows = np.array(fact.annotations, np.int64)
        experiences = np.array(fact.experiences, np.int64)
        own = np.flatnonzero(np.array(fact.source or [0] * len(rows)) == 0)
        known = self._annotated.get(fact.annotation_set, {})
        where = f"position {position} (trainer {fact.consumer!r})"
        places, all_slots = np.divmod(rows, MAX_ROWS_PER_EVENT)
        for place in np.unique(places[own]).tolist():
            mine = own[places[own] == place]
            there, slots = unpacked(known[place]) if place in known else None, all_slots[mine]
            if there is None or (slots >= len(there)).any():
                told = written_as(int(rows[mine[0]]))
                what = f"set {fact.annotation_set!r} has no annotation {told}"
                yield Problem("manifests", where, what)
            elif len(wrong := mine[there[slots] != experiences[mine]]):
                row = int(wrong[0])
                told = written_as(int(rows[row]))
                what = f"row {row} trains {written_as(int(experiences[row]))} with {told}"
                other = written_as(int(there[all_slots[row]]))
                yield Problem("manifests", where, f"{what}, which is of {other}")

    def _archived(self, position: int, fact: SegmentsArchived) -> Iterator[Problem]:
        """Nothing goes that the set of a trainer has not decided."""
        gone = [unpacked(self._members[key]) for key in fact.segments if key in self._members]
        if not gone:
            return
        for name in sorted(set(self._trained.values())):
            if count := int((~np.isin(np.concatenate(gone), self._decided(name))).sum()):
                what = f"it archives {count} experiences that set {name!r} had not decided"
                yield Problem("conservation", f"position {position}", what)
