"""One walk through the log that believes nothing but the events themselves.

It follows the chain of heads, counts what each event adds, and compares events with one another:
refusals with seals, manifests with annotations, archives with decisions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import assert_never

import numpy as np

from trinity_buffer.codec.objects import decode_fact
from trinity_buffer.errors import CodecError, StoreError
from trinity_buffer.events import (
    BatchLeased,
    BatchPlanned,
    BatchSealed,
    ChainStarted,
    ConfigurationChanged,
    ConsumerRegistered,
    ExperiencesAnnotated,
    ExperiencesRecorded,
    ExperiencesRejected,
    ExperimentCreated,
    ExperimentFinished,
    Fact,
    PlacedFact,
    PolicyPublished,
    RankJoined,
    RanksAssembled,
    RewardsAssigned,
    SegmentsArchived,
    SegmentsRestored,
    StepDealt,
    StepMeasured,
    StepPartDone,
    StepsCommitted,
    StreamEnded,
    TrainerRewound,
    UnknownEvent,
)
from trinity_buffer.pipeline.verify.addresses import (
    Addresses,
    Batches,
    Integers,
    Names,
    lacking,
    packed,
    repeated,
    together,
    unpacked,
)
from trinity_buffer.pipeline.verify.report import Problem
from trinity_buffer.pipeline.verify.trainer_audit import TrainerAudit
from trinity_buffer.store import counters, log
from trinity_buffer.store.log import StoredEvent
from trinity_buffer.store.rows import MAX_ROWS_PER_EVENT, first_address, written_as


class EventChain:
    """Follows the heads of a log, event by event.

    Args:
        experiment: name of the experiment.
        heads: kept outside of the store; those that the log proves are taken out of `unproven`.

    Attributes:
        before: the head before the event that was taken last.
        head: its own.
        unproven: those that were not met so far.
    """

    def __init__(self, experiment: str, heads: Iterable[bytes] = ()) -> None:
        self.before = self.head = log.origin(experiment)
        self.unproven = set(heads)
        self._started = False

    def take(self, event: StoredEvent) -> str | None:
        """Go on by one event; return what is wrong with its head, or None.

        What is wrong is reported once: the events after it are followed from the head that it has.
        """
        self.before = self.head
        self.head = log.head_of(
            self.before, event.position, event.kind, event.actor, event.recorded_at, event.body
        )
        if event.head is None:
            return "it has no head, and the one before it has one" if self._started else None
        first, self._started = not self._started, True
        computed, self.head = self.head, event.head
        if first and event.position > 1 and event.kind != "ChainStarted":
            return "it is the first with a head, and no ChainStarted"
        if computed != self.head:
            stated = f"its head is {self.head.hex()}"
            return f"{stated}, what the log says up to it has {computed.hex()}"
        self.unproven.discard(self.head)
        return None

    @property
    def started(self) -> bool:
        """Whether an event with a head was met."""
        return self._started

    def require(self, page: Sequence[StoredEvent]) -> None:
        """Go on by a page.

        Raises:
            StoreError: an event is not the one that was recorded, or one before it is gone.
        """
        for event in page:
            if (wrong := self.take(event)) is not None:
                raise StoreError(
                    f"the event at position {event.position} breaks the chain of the log: {wrong}; "
                    "run `trinity-buffer verify` and restore the store from a backup"
                )


@dataclass(slots=True)
class _Strategy:
    """What one annotation set decided.

    Attributes:
        seen: the last position that it has seen.
        annotated: position -> the experiences of its annotations, packed, in their order.
        rejected: the experiences that it rejected.
        rows: how many annotations there are, copies included.
        decided: how many experiences it has decided.
    """

    seen: int = 0
    annotated: dict[int, bytes] = field(default_factory=dict)
    rejected: Addresses = field(default_factory=Addresses)
    rows: int = 0
    decided: int = 0

    def all_decided(self) -> Integers:
        """Return the experiences that it has decided, in order; copies are one experience."""
        annotated = (np.unique(unpacked(rows)) for rows in self.annotated.values())
        decided = together(chain(annotated, [self.rejected.all()]))
        decided.sort()
        return decided


class LogAudit:
    """Collects what the log says, event by event: `add` it, `finish`, then ask.

    Args:
        chain: follows the heads.
        contents: whether to keep what `contents` holds.

    Attributes:
        chain: as given.
        contents: (uid, content digest) of all recorded experiences.
        position: the last one that was added.
        events: how many there were.
        problems: what was wrong so far.
        uids: of all recorded experiences.
        batches: what was planned, recorded and sealed of each.
        segments: key of each segment that an event names -> position of the event.
        trainers: what was leased and committed, by consumer.
        archived: segments that may have left the database -> where to; None: for good.
        files: archive -> position of the event that names it, and the sha256 that it says.
    """

    def __init__(self, chain: EventChain, *, contents: bool = False) -> None:
        self.chain = chain
        self.contents = Names() if contents else None
        self.position = 0
        self.events = 0
        self.problems: list[Problem] = []
        self.uids = Names()
        self.batches = Batches()
        self.segments: dict[bytes, int] = {}
        self.trainers: dict[str, TrainerAudit] = {}
        self.archived: dict[bytes, str | None] = {}
        self.files: dict[str, tuple[int, str | None]] = {}
        self._guests: dict[str, TrainerAudit] = {}  # trainers of other experiments
        self._trained: set[str] = set()  # the annotation sets of trainers
        self._strategies: dict[str, _Strategy] = {}
        self._recorded: dict[int, bytes] = {}  # position -> packed addresses, without refused ones
        self._scores: dict[str, Addresses] = {}
        self._numbers: Counter[tuple[str, str]] = Counter()
        self._rejections = 0
        self._waiting = 0
        self._versions: set[int] = set()

    @property
    def experiences(self) -> int:
        """How many experiences were recorded."""
        return self._numbers["", counters.RECORDED]

    def add(
        self, page: Sequence[StoredEvent], leases: Mapping[int, BatchLeased] | None = None
    ) -> list[PlacedFact]:
        """Take in the next events of the log; return those whose body can be read.

        Args:
            page: the events.
            leases: position -> lease of each step that one of them deals anew.
        """
        events = []
        for stored in page:
            self._follow(stored)
            try:
                fact = decode_fact(stored.kind, stored.body)
            except CodecError as error:
                self._wrong("log", stored.position, f"its body cannot be read: {error}")
                continue
            # Unknown kinds too: a newer version counts the events that it records.
            self._numbers["", stored.kind] += 1
            try:
                self._read(stored.position, fact, stored.actor, leases or {})
            except (CodecError, LookupError, TypeError, ValueError, ArithmeticError) as error:
                what = f"its body has not the form of {stored.kind}: {error!r}"
                self._wrong("log", stored.position, what)
            # Folded though the audit objects: what the fold makes of it is another opinion.
            events.append(PlacedFact(stored.position, stored.actor, fact))
        return events

    def _wrong(self, check: str, position: int, what: str) -> None:
        self.problems.append(Problem(check, f"position {position}", what))

    def _follow(self, stored: StoredEvent) -> None:
        expected = self.position + 1
        if stored.position == expected + 1:
            self._wrong("log", expected, "there is no event")
        elif stored.position != expected:
            self._wrong("log", expected, f"there is no event, nor up to {stored.position - 1}")
        if stored.position == 1 and stored.kind != "ExperimentCreated":
            self._wrong("log", 1, f"the first event is {stored.kind}, not ExperimentCreated")
        if (wrong := self.chain.take(stored)) is not None:
            self._wrong("chain", stored.position, wrong)
        # From where the log goes on, so that a gap is reported once and not at each event.
        self.position = stored.position
        self.events += 1

    def _read(  # noqa: C901, PLR0912, PLR0915 - one case per kind
        self, position: int, fact: Fact, actor: str, leases: Mapping[int, BatchLeased]
    ) -> None:
        match fact:
            case BatchPlanned():
                groups, rollouts = len(fact.tasks), len(fact.tasks) * fact.rollouts_per_group
                self._numbers["", counters.planned_by(actor)] += 1
                self._numbers["", counters.PLANNED_GROUPS] += groups
                self._numbers["", counters.PLANNED_ROLLOUTS] += rollouts
                self.batches.plan(str(fact.batch), fact.tasks, fact.rollouts_per_group)
            case BatchSealed():
                batch = str(fact.batch)
                held = self.batches.seal(batch)
                if held != fact.expected:
                    what = f"batch {batch!r} was sealed with {fact.expected} experiences"
                    self._wrong("log", position, f"{what}, recorded before were {held}")
            case ExperiencesRecorded():
                self._experiences(position, fact)
            case ConsumerRegistered(kind="trainer"):
                self.trainers[fact.consumer] = TrainerAudit(fact.consumer)
                self._trained.add(str(fact.config.get("strategy")))
            case ConsumerRegistered():
                self._strategies[fact.consumer] = _Strategy()
            case ExperiencesAnnotated():
                self._annotated(position, fact)
            case ExperiencesRejected():
                self._rejected(position, fact)
            case BatchLeased():
                self._compare_with_annotations(position, fact)
                self.problems += self._trainer(fact.consumer).leased(position, fact)
            case StepDealt():
                trainer, lease = self._trainer(fact.consumer), leases.get(fact.leased_at)
                self.problems += trainer.dealt(position, fact, lease)
            case RanksAssembled():
                self._trainer(fact.consumer).assembled(fact)
            case StepsCommitted():
                self.problems += self._trainer(fact.consumer).committed(position, fact)
            case StepMeasured():
                self.segments[fact.segment] = position
                self.problems += self._trainer(fact.consumer).measured(position, fact)
            case TrainerRewound():
                self.problems += self._trainer(fact.consumer).rewound(position, fact)
            case RewardsAssigned():
                addresses = np.array(fact.experiences, np.int64)
                self._scores.setdefault(fact.scoring, Addresses()).add(addresses)
            case SegmentsArchived():
                self._archived(position, fact)
            case SegmentsRestored():
                for key in fact.segments:
                    del self.archived[key]
            case ChainStarted():
                if fact.digest != self.chain.before:
                    what = f"it names {fact.digest.hex()} as the head of all before it"
                    what = f"{what}, which has {self.chain.before.hex()}"
                    self._wrong("chain", position, what)
            case ExperimentCreated() | ConfigurationChanged() | ExperimentFinished():
                pass  # one row of one table, in which there is nothing to count
            case PolicyPublished():
                pass  # counted by its kind
            case RankJoined() | StepPartDone() | StreamEnded() | UnknownEvent():
                pass  # in no projection: what ranks say to each other, and what is not known
            case _:
                assert_never(fact)

    def _trainer(self, name: str) -> TrainerAudit:
        if name not in self.trainers:
            raise LookupError(f"trainer {name!r} was never registered")
        return self.trainers[name]

    def _experiences(self, position: int, fact: ExperiencesRecorded) -> None:
        columns, refused = fact.columns, fact.refused
        count, base = len(columns), first_address(position)
        batches = [*map(str, columns.batch)]
        late = [slot for slot, reason in refused.items() if reason == "late"]
        self.segments[fact.segment] = position
        self.uids.add(columns.uids())
        if self.contents is not None:
            self.contents.add(zip(columns.uids(), columns.digest, strict=True))
        for slot in self.batches.record(batches, columns.task, columns.run, late):
            what = "was refused as late, and its batch was not sealed"
            if slot not in late:
                what = "was recorded after its batch was sealed, and not refused"
            self.problems.append(Problem("log", f"experience {written_as(base + slot)}", what))
        addresses = np.arange(base, base + count, dtype=np.int64)
        self._recorded[position] = packed(np.delete(addresses, sorted(refused)))
        self._numbers["", counters.RECORDED] += count
        self._numbers.update(("", counters.rejected_for(reason)) for reason in refused.values())
        self._versions.update(v for v in columns.policy_version if v is not None)

    def _strategy(self, position: int, name: str, seen: int | None) -> _Strategy:
        if name not in self._strategies:
            raise LookupError(f"strategy {name!r} was never registered")
        if seen is None:
            raise ValueError(f"strategy {name!r} does not say what it has seen")
        strategy = self._strategies[name]
        # Less than before is right: of two processes of one name, one may be behind.
        if seen >= position:
            what = f"strategy {name!r} has seen {seen}, which was not there yet"
            self._wrong("log", position, what)
        strategy.seen = max(strategy.seen, seen)
        return strategy

    def _annotated(self, position: int, fact: ExperiencesAnnotated) -> None:
        self.segments[fact.segment] = position
        strategy = self._strategy(position, fact.consumer, fact.seen)
        # Copies are one experience; of so few numbers a set is quicker than NumPy.
        rows, distinct = len(fact.experiences), len(set(fact.experiences))
        if rows:
            self._numbers[fact.consumer, counters.ANNOTATED] += distinct
            self._numbers[fact.consumer, counters.ROWS] += rows
        strategy.annotated[position] = packed(np.array(fact.experiences, np.int64))
        strategy.rows += rows
        strategy.decided += distinct

    def _rejected(self, position: int, fact: ExperiencesRejected) -> None:
        name, count = fact.consumer, len(fact.experiences)
        self._rejections += count
        self._numbers.update((name, counters.rejected_for(reason)) for reason in fact.reasons)
        if fact.by == "strategy":
            strategy = self._strategy(position, name, fact.seen)
            strategy.rejected.add(np.array(fact.experiences, np.int64))
            strategy.decided += count
        elif name in self.trainers or "/" not in name:
            self._trainer(name).rejected(position, fact)
        else:
            self._guests.setdefault(name, TrainerAudit(name)).rejected(position, fact)

    def _compare_with_annotations(self, position: int, fact: BatchLeased) -> None:
        """Compare each own row of a manifest with the annotation that it names."""
        rows = np.array(fact.annotations, np.int64)
        experiences = np.array(fact.experiences, np.int64)
        own = np.flatnonzero(np.array(fact.source or [0] * len(rows)) == 0)
        strategy = self._strategies.get(fact.annotation_set, _Strategy())
        where = f"position {position} (trainer {fact.consumer!r})"
        places, all_slots = np.divmod(rows, MAX_ROWS_PER_EVENT)
        for place in np.unique(places[own]).tolist():
            mine = own[places[own] == place]
            annotated, slots = unpacked(strategy.annotated.get(place, b"\0")), all_slots[mine]
            if (slots >= len(annotated)).any():
                annotation = written_as(int(rows[mine[0]]))
                what = f"set {fact.annotation_set!r} has no annotation {annotation}"
                self.problems.append(Problem("manifests", where, what))
            elif len(wrong := mine[annotated[slots] != experiences[mine]]):
                row = int(wrong[0])
                trained, annotation = written_as(int(experiences[row])), written_as(int(rows[row]))
                what = f"row {row} trains {trained} with annotation {annotation}"
                other = written_as(int(annotated[all_slots[row]]))
                self.problems.append(Problem("manifests", where, f"{what}, which is of {other}"))

    def _archived(self, position: int, fact: SegmentsArchived) -> None:
        """Nothing goes that the set of a trainer has not decided."""
        self.archived |= dict.fromkeys(fact.segments, fact.uri)
        if fact.uri is not None:
            self.files[fact.uri] = (position, fact.digest)
        places = [self.segments[key] for key in fact.segments if key in self.segments]
        gone = [unpacked(self._recorded[place]) for place in places if place in self._recorded]
        for name in sorted(self._trained) if gone else ():
            decided = self._strategies.get(name, _Strategy()).all_decided()
            if count := int((~np.isin(np.concatenate(gone), decided)).sum()):
                what = f"it archives {count} experiences that set {name!r} had not decided"
                self._wrong("conservation", position, what)

    # -- at the end -------------------------------------------------------------------------------

    def finish(self) -> None:
        """Check what only the whole log tells: each experience is decided once, if it exists."""
        if self.events and not self.chain.started:
            self._wrong("chain", self.position, "no event up to here has a head")
        for head in sorted(self.chain.unproven):
            what = "no event has it: the log that it was kept of is another, or was cut"
            self.problems.append(Problem("chain", f"head {head.hex()}", what))
        for trainer in (*self.trainers.values(), *self._guests.values()):
            self.problems += trainer.finish()
        recorded = together(map(unpacked, self._recorded.values()))
        for name, strategy in self._strategies.items():
            decided = strategy.all_decided()
            seen = recorded[: np.searchsorted(recorded, first_address(strategy.seen + 1))]
            self._waiting += len(seen) - strategy.decided
            for address in repeated(decided):
                self._decided_wrongly(name, address, "was decided twice")
            for address in decided[lacking(seen, decided)].tolist():
                self._decided_wrongly(name, address, "was decided, and was not there to be seen")

    def _decided_wrongly(self, name: str, address: int, what: str) -> None:
        where = f"experience {written_as(address)}"
        self.problems.append(Problem("conservation", where, f"{what} by strategy {name!r}"))

    def rows(self) -> dict[str, int]:
        """Return how many rows each projection must have, once it is finished."""
        steps = [step for trainer in self.trainers.values() for step in trainer.steps.values()]
        return {
            "configuration": 1,
            "batch": len(self.batches),
            "plan": self._numbers["", counters.PLANNED_GROUPS],
            "experience": self.experiences,
            "consumer": self._numbers["", ConsumerRegistered.__name__],
            "waiting": self._waiting,
            "annotation": sum(strategy.rows for strategy in self._strategies.values()),
            "rejection": self._rejections,
            "delivery": sum(step.count for step in steps),
            "step": self._numbers["", BatchLeased.__name__],
            "policy": self._numbers["", PolicyPublished.__name__],
            "assigned_reward": sum(len(np.unique(s.all())) for s in self._scores.values()),
            "counter": len(self.numbers()),
            "archived": len(self.archived),
        }

    def numbers(self) -> counters.Numbers:
        """Return the number that each counter must have."""
        numbers = dict(self._numbers)
        if ("", BatchSealed.__name__) in numbers:
            numbers["", counters.STORED_ROLLOUTS] = self.batches.stored(sealed_only=True)
        if self._versions:
            numbers["", counters.LOWEST_VERSION] = min(self._versions)
            numbers["", counters.HIGHEST_VERSION] = max(self._versions)
        return numbers
