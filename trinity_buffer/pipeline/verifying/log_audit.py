"""One walk through the log that believes nothing but the events themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import assert_never

import numpy as np

from trinity_buffer import codec
from trinity_buffer.errors import CodecError
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
from trinity_buffer.pipeline.event_chain import EventChain
from trinity_buffer.pipeline.verifying.addresses import Addresses, beside, lacking, repeated
from trinity_buffer.pipeline.verifying.cross_audit import CrossAudit
from trinity_buffer.pipeline.verifying.findings import Problem
from trinity_buffer.pipeline.verifying.names import Names
from trinity_buffer.pipeline.verifying.planned_runs import PlannedRuns
from trinity_buffer.pipeline.verifying.trainer_audit import TrainerAudit
from trinity_buffer.store import counters
from trinity_buffer.store.log import StoredEvent
from trinity_buffer.store.rows import first_address, written_as


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
        found = []
        for stored in page:
            self._follow(stored)
            try:
                fact = codec.decode_fact(stored.kind, stored.body)
            except CodecError as error:
                self._wrong("log", stored.position, f"its body cannot be read: {error}")
                continue
            try:
                if not self._quick:
                    self._tell(self.cross.take(stored.position, fact))
                self._numbers["", stored.kind] += 1
                self._read(stored.position, fact, stored.actor)
            except (LookupError, TypeError, ValueError, ArithmeticError) as error:
                what = f"its body has not the form of {stored.kind}: {error!r}"
                self._wrong("log", stored.position, what)
            found.append(PlacedFact(stored.position, stored.actor, fact))
        for trainer in self.trainers.values():
            trainer.forget()
        return found

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
        self.position = stored.position
        self.events += 1

    def _read(self, position: int, fact: Fact, actor: str) -> None:  # noqa: C901, PLR0912, PLR0915 - one case per kind
        match fact:
            case BatchPlanned():
                self._planned(fact, actor)
            case BatchSealed():
                self._sealed(position, fact)
            case ExperiencesRecorded():
                self._recorded_ones(position, fact)
            case ConsumerRegistered():
                self._registered(fact)
            case ExperiencesAnnotated():
                self._annotated(position, fact)
            case ExperiencesRejected():
                self._rejected(position, fact)
            case BatchLeased():
                self._leased(position, fact)
            case StepDealt():
                self._tell(self._trainer(fact.consumer).dealt(position, fact))
            case RanksAssembled():
                self._trainer(fact.consumer).assembled(fact)
            case StepsCommitted():
                self._tell(self._trainer(fact.consumer).committed(position, fact))
            case StepMeasured():
                self._tell(self._trainer(fact.consumer).measured(position, fact))
            case TrainerRewound():
                self._tell(self._trainer(fact.consumer).rewound(position, fact))
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

    def _tell(self, problems: Iterable[Problem]) -> None:
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
        self._tell(self._trainer(fact.consumer).leased(position, fact))

    def _scored(self, fact: RewardsAssigned) -> None:
        addresses = np.array(fact.experiences, np.int64)
        self._scores.setdefault(fact.scoring, Addresses()).add(addresses)

    def _recorded_ones(self, position: int, fact: ExperiencesRecorded) -> None:
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
        found = self._strategies[name]
        # Less than before is right: of two processes of one name, one may be behind.
        if seen >= position:
            what = f"strategy {name!r} has seen {seen}, which was not there yet"
            self._wrong("log", position, what)
        found.seen = max(found.seen, seen)
        return found

    def _annotated(self, position: int, fact: ExperiencesAnnotated) -> None:
        found = self._strategy(position, fact.consumer, fact.seen)
        # Copies are one experience; of so few numbers a set is quicker than NumPy.
        distinct = sorted(set(fact.experiences))
        if distinct:
            self._numbers[fact.consumer, counters.ANNOTATED] += len(distinct)
            self._numbers[fact.consumer, counters.ROWS] += len(fact.experiences)
        found.rows += len(fact.experiences)
        found.decided.add(np.array(distinct, np.int64))

    def _rejected(self, position: int, fact: ExperiencesRejected) -> None:
        count = len(fact.experiences)
        self._counts["rejection"] += count
        self._numbers.update((fact.consumer, counters.rejected_for(why)) for why in fact.reasons)
        if fact.by == "strategy":
            found = self._strategy(position, fact.consumer, fact.seen)
            found.rejections += count
            found.decided.add(np.array(fact.experiences, np.int64))
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
            self._tell(trainer.finish())
        for name, strategy in self._strategies.items():
            decided = strategy.decided.all()
            decided.sort()
            for address in repeated(decided):
                self._decided_wrongly(name, address, "was decided twice")
            for known, some in beside(self._recorded.below(strategy.end), decided):
                for address in some[lacking(known, some)].tolist():
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
        """Return what each counter must say."""
        found = dict(self._numbers)
        if ("", BatchSealed.__name__) in found:
            found["", counters.STORED_ROLLOUTS] = self._runs.stored_of_sealed()
        if self._versions:
            found["", counters.LOWEST_VERSION] = min(self._versions)
            found["", counters.HIGHEST_VERSION] = max(self._versions)
        return found

    def stored_runs(self) -> int:
        """Return how many planned (batch, task, run) the log has experiences of."""
        return self._runs.stored()
