"""One walk through the log that believes nothing but the events themselves.

It follows the chain of heads, counts what each event adds, and compares events with one another:
refusals with seals, manifests with annotations, archives with decisions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
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
    Integers,
    Names,
    PlannedRuns,
    beside,
    lacking,
    packed,
    repeated,
    unpacked,
)
from trinity_buffer.pipeline.verify.report import Problem
from trinity_buffer.pipeline.verify.trainer_audit import TrainerAudit
from trinity_buffer.store import counters, log
from trinity_buffer.store.log import StoredEvent
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
        """Return the experiences that a set has decided so far."""
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
                annotation = written_as(int(rows[mine[0]]))
                what = f"set {fact.annotation_set!r} has no annotation {annotation}"
                yield Problem("manifests", where, what)
            elif len(wrong := mine[there[slots] != experiences[mine]]):
                row = int(wrong[0])
                annotation = written_as(int(rows[row]))
                what = f"row {row} trains {written_as(int(experiences[row]))} with {annotation}"
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
    """What one annotation set decided."""

    seen: int = 0
    rows: int = 0
    rejections: int = 0
    decided: Addresses = field(default_factory=Addresses)

    @property
    def end(self) -> int:
        """Return the first address that it has not seen."""
        return first_address(self.seen + 1)


class LogAudit:
    """Collects what the log says, event by event. Feed it with `add`, then ask.

    Args:
        chain: follows the heads.
        quick: compare no event with another.
        contents: whether to keep what `contents` holds.

    Attributes:
        chain: as given.
        cross: compares events with one another.
        contents: (uid, content digest) of all recorded experiences.
        position: the last one that was added.
        events, experiences: how many there were.
        problems: what was wrong so far.
        uids: of all recorded experiences.
        trainers: what was leased and committed, by consumer.
        archived: segments that may have left the database -> where to; None: for good.
        files: archive -> position of the event that names it, and the sha256 that it says.
    """

    def __init__(self, chain: EventChain, *, quick: bool = False, contents: bool = False) -> None:
        self.chain = chain
        self.cross = CrossAudit()
        self._quick = quick
        self.contents = Names() if contents else None
        self.position = 0
        self.events = 0
        self.experiences = 0
        self.problems: list[Problem] = []
        self.uids = Names()
        self.trainers: dict[str, TrainerAudit] = {}
        self._guests: dict[str, TrainerAudit] = {}  # trainers of other experiments
        self.archived: dict[bytes, str | None] = {}
        self.files: dict[str, tuple[int, str | None]] = {}
        self._counts: Counter[str] = Counter()
        self._strategies: dict[str, _Strategy] = {}
        self._recorded = Addresses()
        self._scores: dict[str, Addresses] = {}
        self._runs = PlannedRuns()
        self._held: Counter[str] = Counter()
        self._numbers: Counter[tuple[str, str]] = Counter()
        self._versions: set[int] = set()
        self._batches: set[str] = set()

    def add(self, page: Sequence[StoredEvent]) -> list[PlacedFact]:
        """Take in the next events of the log; return those whose body can be read."""
        events = []
        for stored in page:
            self._follow(stored)
            try:
                fact = decode_fact(stored.kind, stored.body)
            except CodecError as error:
                self._wrong("log", stored.position, f"its body cannot be read: {error}")
                continue
            try:
                if not self._quick:
                    self._report(self.cross.take(stored.position, fact))
                # Unknown kinds too: a newer version counts the events that it records.
                self._numbers["", stored.kind] += 1
                self._read(stored.position, fact, stored.actor)
            except (LookupError, TypeError, ValueError, ArithmeticError) as error:
                what = f"its body has not the form of {stored.kind}: {error!r}"
                self._wrong("log", stored.position, what)
            # Folded though the audit objects: what the fold makes of it is another opinion.
            events.append(PlacedFact(stored.position, stored.actor, fact))
        for trainer in self.trainers.values():
            trainer.forget()
        return events

    def leased_at(self, dealt: Iterable[StepDealt]) -> list[int]:
        """Return where the steps were leased that are dealt anew, to be read again."""
        known = ((self.trainers.get(fact.consumer), fact.step) for fact in dealt)
        steps = (trainer.steps.get(step) for trainer, step in known if trainer is not None)
        return [step.position for step in steps if step is not None]

    def recall(self, leased: Iterable[PlacedFact]) -> None:
        """Take in what `leased_at` asked for."""
        for placed in leased:
            if isinstance(placed.fact, BatchLeased):
                self._trainer(placed.fact.consumer).recall(placed.position, placed.fact)

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

    def _read(self, position: int, fact: Fact, actor: str) -> None:  # noqa: C901, PLR0912, PLR0915 - one case per kind
        match fact:
            case BatchPlanned():
                self._planned(fact, actor)
            case BatchSealed():
                self._sealed(position, fact)
            case ExperiencesRecorded():
                self._experiences(position, fact)
            case ConsumerRegistered():
                self._registered(fact)
            case ExperiencesAnnotated():
                self._annotated(position, fact)
            case ExperiencesRejected():
                self._rejected(position, fact)
            case BatchLeased():
                self._leased(position, fact)
            case StepDealt():
                self._report(self._trainer(fact.consumer).dealt(position, fact))
            case RanksAssembled():
                self._trainer(fact.consumer).assembled(fact)
            case StepsCommitted():
                self._report(self._trainer(fact.consumer).committed(position, fact))
            case StepMeasured():
                self._report(self._trainer(fact.consumer).measured(position, fact))
            case TrainerRewound():
                self._report(self._trainer(fact.consumer).rewound(position, fact))
            case PolicyPublished():
                self._counts["policy"] += 1
            case RewardsAssigned():
                self._scored(fact)
            case SegmentsArchived():
                self.archived |= dict.fromkeys(fact.segments, fact.uri)
                if fact.uri is not None:
                    self.files[fact.uri] = (position, fact.digest)
            case SegmentsRestored():
                for key in fact.segments:
                    del self.archived[key]
            case ExperimentCreated() | ConfigurationChanged() | ExperimentFinished():
                pass  # one row of one table, in which there is nothing to count
            case ChainStarted():
                self._chain_started(position, fact)
            case RankJoined() | StepPartDone() | StreamEnded() | UnknownEvent():
                pass  # in no projection: what ranks say to each other, and what is not known
            case _:
                assert_never(fact)

    def _chain_started(self, position: int, fact: ChainStarted) -> None:
        if fact.digest != self.chain.before:
            what = f"it names {fact.digest.hex()} as the head of all before it"
            self._wrong("chain", position, f"{what}, which has {self.chain.before.hex()}")

    def _report(self, problems: Iterable[Problem]) -> None:
        self.problems.extend(problems)

    def _trainer(self, name: str) -> TrainerAudit:
        if name not in self.trainers:
            raise LookupError(f"trainer {name!r} was never registered")
        return self.trainers[name]

    def _registered(self, fact: ConsumerRegistered) -> None:
        self._counts["consumer"] += 1
        if fact.kind == "trainer":
            self.trainers[fact.consumer] = TrainerAudit(fact.consumer)
        else:
            self._strategies[fact.consumer] = _Strategy()

    def _leased(self, position: int, fact: BatchLeased) -> None:
        self._counts["step"] += 1
        self._report(self._trainer(fact.consumer).leased(position, fact))

    def _scored(self, fact: RewardsAssigned) -> None:
        addresses = np.array(fact.experiences, np.int64)
        self._scores.setdefault(fact.scoring, Addresses()).add(addresses)

    def _experiences(self, position: int, fact: ExperiencesRecorded) -> None:
        columns, refused = fact.columns, fact.refused
        count = len(columns)
        batches = list(map(str, columns.batch))
        self.uids.add(columns.uids())
        if self.contents is not None:
            self.contents.add(zip(columns.uids(), columns.digest, strict=True))
        self._runs.recorded(batches, columns.task, columns.run)
        self._counts["experience"] += count
        self.experiences += count
        addresses = np.arange(count, dtype=np.int64) + first_address(position)
        self._recorded.add(np.delete(addresses, sorted(refused)) if refused else addresses)
        self._held.update(batches)
        self._held.subtract(batches[slot] for slot, why in refused.items() if why == "late")
        self._numbers["", counters.RECORDED] += count
        self._numbers.update(("", counters.rejected_for(reason)) for reason in refused.values())
        self._versions.update(v for v in columns.policy_version if v is not None)

    def _planned(self, fact: BatchPlanned, actor: str) -> None:
        batch = str(fact.batch)
        groups = len(fact.tasks)
        self._numbers["", counters.planned_by(actor)] += 1
        self._numbers["", counters.PLANNED_GROUPS] += groups
        self._numbers["", counters.PLANNED_ROLLOUTS] += groups * fact.rollouts_per_group
        self._batches.add(batch)
        self._counts["plan"] += groups
        self._runs.planned(batch, fact.tasks, fact.rollouts_per_group)

    def _sealed(self, position: int, fact: BatchSealed) -> None:
        batch = str(fact.batch)
        self._batches.add(batch)
        if self._held[batch] != fact.expected:
            what = f"batch {batch!r} was sealed with {fact.expected} experiences"
            self._wrong("log", position, f"{what}, recorded before were {self._held[batch]}")
        self._runs.sealed(batch)

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
        strategy = self._strategy(position, fact.consumer, fact.seen)
        # Copies are one experience; of so few numbers a set is quicker than NumPy.
        distinct = sorted(set(fact.experiences))
        if distinct:
            self._numbers[fact.consumer, counters.ANNOTATED] += len(distinct)
            self._numbers[fact.consumer, counters.ROWS] += len(fact.experiences)
        strategy.rows += len(fact.experiences)
        strategy.decided.add(np.array(distinct, np.int64))

    def _rejected(self, position: int, fact: ExperiencesRejected) -> None:
        count = len(fact.experiences)
        self._counts["rejection"] += count
        self._numbers.update((fact.consumer, counters.rejected_for(why)) for why in fact.reasons)
        if fact.by == "strategy":
            strategy = self._strategy(position, fact.consumer, fact.seen)
            strategy.rejections += count
            strategy.decided.add(np.array(fact.experiences, np.int64))
        else:
            self._rejecting(fact.consumer).rejected(position, fact)

    def _rejecting(self, name: str) -> TrainerAudit:
        """Return the audit of a trainer, which may be one of another experiment."""
        if name in self.trainers or "/" not in name:
            return self._trainer(name)
        return self._guests.setdefault(name, TrainerAudit(name))

    # -- at the end -------------------------------------------------------------------------------

    def finish(self) -> None:
        """Check what only the whole log tells: each experience is decided once, if it exists."""
        if self.events and not self.chain.started:
            self._wrong("chain", self.position, "no event up to here has a head")
        for head in sorted(self.chain.unproven):
            what = "no event has it: the log that it was kept of is another, or was cut"
            self.problems.append(Problem("chain", f"head {head.hex()}", what))
        for trainer in (*self.trainers.values(), *self._guests.values()):
            self._report(trainer.finish())
        for name, strategy in self._strategies.items():
            decided = strategy.decided.all()
            decided.sort()
            for address in repeated(decided):
                self._decided_wrongly(name, address, "was decided twice")
            for known, decided_here in beside(self._recorded.below(strategy.end), decided):
                for address in decided_here[lacking(known, decided_here)].tolist():
                    self._decided_wrongly(
                        name, address, "was decided, and was not there to be seen"
                    )

    def _decided_wrongly(self, name: str, address: int, what: str) -> None:
        where = f"experience {written_as(address)}"
        self.problems.append(Problem("conservation", where, f"{what} by strategy {name!r}"))

    def rows(self) -> dict[str, int]:
        """Return how many rows each projection must have."""
        counts, waiting, annotations = self._counts, 0, 0
        for strategy in self._strategies.values():
            waiting += sum(map(len, self._recorded.below(strategy.end))) - len(strategy.decided)
            annotations += strategy.rows
        names = ("plan", "experience", "consumer", "rejection", "step", "policy")
        steps = [step for trainer in self.trainers.values() for step in trainer.steps.values()]
        return {
            "configuration": 1,
            "batch": len(self._batches),
            "waiting": waiting,
            "annotation": annotations,
            "assigned_reward": sum(len(np.unique(s.all())) for s in self._scores.values()),
            "archived": len(self.archived),
            "counter": len(self.numbers()),
            "delivery": sum(step.count for step in steps),
            **{name: counts[name] for name in names},
        }

    def numbers(self) -> counters.Numbers:
        """Return the number that each counter must have."""
        numbers = dict(self._numbers)
        if ("", BatchSealed.__name__) in numbers:
            numbers["", counters.STORED_ROLLOUTS] = self._runs.stored_of_sealed()
        if self._versions:
            numbers["", counters.LOWEST_VERSION] = min(self._versions)
            numbers["", counters.HIGHEST_VERSION] = max(self._versions)
        return numbers

    def stored_runs(self) -> int:
        """Return how many planned (batch, task, run) the log has experiences of."""
        return self._runs.stored()
