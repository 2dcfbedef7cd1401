"""One walk through the log that believes nothing but the events themselves.

It follows the chain of heads, counts what each event adds, and compares events with one another:
refusals with seals, manifests with annotations, archives with decisions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from operator import itemgetter
from typing import assert_never

import numpy as np
from typing_extensions import override

from trinity_buffer import events
from trinity_buffer.codec.objects import decode_fact
from trinity_buffer.errors import CodecError
from trinity_buffer.events import Fact, PlacedFact
from trinity_buffer.pipeline.manifest import (
    FIRST_LINK,
    chain,
    manifest_digest,
    plans_of,
    repartitioned,
    rows_by_rank,
)
from trinity_buffer.pipeline.verify.addresses import (
    Batches,
    Integers,
    Names,
    lacking,
    packed,
    repeated,
    together,
    unpacked,
)
from trinity_buffer.store import counters
from trinity_buffer.store.counts import PlanCounts, StrategyCounts, TrainerCounts
from trinity_buffer.store.log import EventChain, StoredEvent
from trinity_buffer.store.rows import MAX_ROWS_PER_EVENT, first_address, format_address


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong.

    Attributes:
        check: which check found it: ``chain``, ``log``, ``fold``, ``projections``,
            ``conservation``, ``manifests``, ``commits``, ``segments``, ``digests``, ``archives`` or
            ``database``.
        where: the position, row, segment or manifest.
        what: what is wrong with it.
    """

    check: str
    where: str
    what: str

    @override
    def __str__(self) -> str:
        return f"{self.check}: {self.where}: {self.what}"


LeaseAt = Callable[[int], events.BatchLeased | None]
"""Returns the lease at a position, or None if it cannot be read."""

_OTHER_EXPERIMENT = 1 << 56
"""Far above every address: tells rows of another experiment from those of the trainer's own."""


@dataclass(frozen=True, slots=True)
class LeasedManifest:
    """A manifest as the log holds it.

    Attributes:
        position: where it was leased.
        step: which step it is.
        digest: of the manifest as it is served now.
        count: how many rows it has now.
        rows: its annotation rows, packed, without those that it lost; those of other experiments
            are told apart by what `_OTHER_EXPERIMENT` adds to them.
        by_rank: how many rows it deals to each rank now.
    """

    position: int
    step: int
    digest: bytes
    count: int
    rows: bytes
    by_rank: Sequence[int]


@dataclass(frozen=True, slots=True)
class Commit:
    """A ``StepsCommitted``: the checkpoint that it names, the last step in it, and its chain."""

    position: int
    step: int
    checkpoint: str | None
    digest: str | None
    chain: bytes


class TrainerAudit:
    """Follows one trainer through the log. Its methods take in an event; yield what is wrong.

    Attributes:
        name: of the consumer.
        annotation_set: which it trains on.
        terms: what became of the rows of its set, once it is finished.
        steps: what was leased, by step.
        manifests: all that were ever served, by digest: of a step that was dealt anew, several.
        live: step -> digest that its commit names, on the live line.
        twice: (step, digest) of the manifests that were committed again on the live line.
        sharing: positions of the manifests with a row that an earlier one has too.
        commits: all of them, those that were superseded too.
        superseded: positions of those.
    """

    def __init__(self, name: str, annotation_set: str = "") -> None:
        self.name = name
        self.annotation_set = annotation_set
        self.terms = TrainerCounts(name, annotation_set, 0, 0, 0, 0, {})
        self.steps: dict[int, LeasedManifest] = {}
        self.manifests: dict[bytes, LeasedManifest] = {}
        self.live: dict[int, bytes] = {}
        self.twice: list[tuple[int, bytes]] = []
        self.sharing: set[int] = set()
        self.commits: list[Commit] = []
        self.superseded: set[int] = set()
        self._sources = defaultdict[str, int](count(1).__next__, {"": 0})
        self._rejected: list[tuple[int, bytes]] = []
        self._dropped: list[tuple[int, Integers]] = []
        self._links: dict[int, bytes] = {0: FIRST_LINK}
        self._before: dict[bytes, tuple[bytes, bytes]] = {}  # link -> (the one before, digest)
        self._ranks: dict[int, int] = {}  # fencing token -> ranks that assembled under it

    def leased(self, position: int, fact: events.BatchLeased) -> Iterator[str]:
        """Take in a ``BatchLeased``."""
        digest, recorded, following = manifest_digest(fact), fact.digest, len(self.steps) + 1
        if digest != recorded:
            what = f"the manifest of step {fact.step} has the digest {digest.hex()}"
            yield f"{what}, recorded is {recorded.hex()}"
        if fact.step != following:
            yield f"step {fact.step} was leased, the next one is {following}"
        rows, by_rank = self._rows_of(fact), rows_by_rank(fact)
        self.steps[fact.step] = self.manifests[fact.digest] = LeasedManifest(
            position, fact.step, fact.digest, len(rows), packed(np.sort(rows)), by_rank
        )

    def _rows_of(self, manifest: events.BatchLeased) -> Integers:
        """Return the numbers of all rows of a manifest, as in `LeasedManifest.rows`."""
        sources = [manifest.sources[of - 1] if of else "" for of in manifest.source]
        return self._apart(manifest.annotations, sources)

    def _apart(self, addresses: Sequence[int], sources: Sequence[str]) -> Integers:
        """Return addresses of these experiments, each of which is told apart; none: of this one."""
        numbers = np.array([self._sources[name] for name in sources] or 0, np.int64)
        return np.array(addresses, np.int64) + numbers * _OTHER_EXPERIMENT

    def dealt(self, position: int, fact: events.StepDealt, lease_at: LeaseAt) -> Iterator[str]:
        """Take in a ``StepDealt``: the rows of its step, each once, whole groups on one rank."""
        leased = self.steps.get(fact.step)
        is_leased = leased is not None and leased.position == fact.leased_at
        manifest = lease_at(fact.leased_at) if is_leased and fact.step not in self.live else None
        if leased is None or manifest is None:
            yield f"step {fact.step} was dealt anew, and was not leased or is committed"
            return
        each_once = len(set(fact.order)) == len(fact.order) and min(fact.order, default=0) >= 0
        # Rows are taken by these places: a wrong one would fail here instead of being reported.
        if each_once:
            manifest = repartitioned(manifest, fact.order, plans_of(fact))
        rows, lost = self._rows_of(manifest), self._apart(fact.dropped, fact.dropped_from)
        # In order: another number of ranks deals the same rows in another one.
        all_rows = np.sort(np.concatenate([rows, lost]))
        by_rank, digest, groups = rows_by_rank(manifest), manifest.digest, manifest.num_groups
        ranks_of_groups = {
            (group, plan.rank)
            for plan in plans_of(manifest)
            for group in manifest.groups[plan.start : plan.stop]
        }
        splits = len(ranks_of_groups) != len({group for group, _ in ranks_of_groups})
        is_other = not each_once or not np.array_equal(unpacked(leased.rows), all_rows)
        step, ranks = f"step {fact.step}", fact.world_size
        checks = {
            f"{step} was dealt with other rows": is_other,
            f"{step} was dealt with {groups} groups, recorded are {fact.num_groups}": bool(
                len(lost) and fact.num_groups != groups
            ),
            f"{step} as it was dealt has the digest {digest.hex()}, recorded is "
            f"{fact.digest.hex()}": digest != fact.digest,
            f"a group of {step} lies on two ranks": splits,
            f"{step} was dealt to {ranks} ranks as {by_rank} rows, it has {len(rows)}": (
                len(by_rank) != ranks or sum(by_rank) != len(rows)
            ),
        }
        yield from (what for what, is_wrong in checks.items() if is_wrong)
        self._dropped.append((position, lost[lost < _OTHER_EXPERIMENT]))
        self.steps[fact.step] = self.manifests[fact.digest] = replace(
            leased, digest=fact.digest, count=len(rows), rows=packed(np.sort(rows)), by_rank=by_rank
        )

    def assembled(self, fact: events.RanksAssembled) -> None:
        """Take in a ``RanksAssembled``."""
        self._ranks[fact.token] = len(fact.joins) + 1

    def committed(self, position: int, fact: events.StepsCommitted) -> Iterator[str]:
        """Take in a ``StepsCommitted``."""
        yield from self._rows_taken(fact)
        for step, digest in zip(fact.steps, fact.manifests, strict=True):
            leased = self.steps.get(step)
            if leased is None:
                yield f"step {step} was committed and never leased"
            elif leased.digest != digest:
                what = f"step {step} was committed with the manifest {digest.hex()}"
                yield f"{what}, leased was {leased.digest.hex()}"
            if step in self.live:
                self.twice.append((step, digest))
                yield f"step {step} was committed before"
            elif step != len(self.live) + 1:
                yield f"step {step} was committed, the next one is {len(self.live) + 1}"
            # the same bytes as above, which are there already
            digest = digest if leased is None or leased.digest != digest else leased.digest
            self.live[step] = digest
            before = self._links.get(step - 1, FIRST_LINK)
            self._links[step] = chain(before, digest)
            self._before[self._links[step]] = (before, digest)
        last = fact.steps[-1]
        if self._links[last] != fact.chain:
            yield f"the chain of manifests up to step {last} is another"
        checkpoint = (fact.checkpoint, fact.checkpoint_digest, fact.chain)
        self.commits.append(Commit(position, last, *checkpoint))

    def manifests_up_to(self, link: bytes) -> list[bytes] | None:
        """Return the manifests whose chain ends in ``link``; None if the log has no such chain.

        Those of a commit, superseded or not; else of the steps as they were leased.
        """
        manifests: list[bytes] = []
        at = link
        while at in self._before:
            at, digest = self._before[at]
            manifests.append(digest)
        if at == FIRST_LINK:
            return manifests[::-1]
        leased, begin = [self.steps[step].digest for step in sorted(self.steps)], FIRST_LINK
        for number, digest in enumerate(leased, 1):
            begin = chain(begin, digest)
            if begin == at:
                return leased[:number] + manifests[::-1]
        return None

    def _rows_taken(self, fact: events.StepsCommitted) -> Iterator[str]:
        """Yield of which steps of a commit the ranks did not take what they were dealt."""
        ranks = self._ranks.get(fact.token, 1)
        for index, step in enumerate(fact.steps):
            leased = self.steps.get(step)
            if leased is None:
                continue
            if fact.rows_by_rank:
                taken, dealt = list(fact.rows_by_rank[index]), list(leased.by_rank)
                if taken != dealt:
                    yield f"step {step}: its ranks took {taken} rows, they were dealt {dealt}"
            elif len(leased.by_rank) != ranks:  # of a version that did not count
                what = f"step {step} was dealt to {len(leased.by_rank)} ranks as {leased.by_rank}"
                yield f"{what} rows, and trained by {ranks}"

    def measured(self, fact: events.StepMeasured) -> Iterator[str]:
        """Take in a ``StepMeasured``: of a step that is committed, with as many rows."""
        leased = self.steps.get(fact.step)
        if leased is None or fact.step not in self.live:
            yield f"step {fact.step} was measured and is not committed"
        elif fact.rows != leased.count:
            yield f"{fact.rows} rows of step {fact.step} were measured, it has {leased.count}"

    def rewound(self, fact: events.TrainerRewound) -> Iterator[str]:
        """Take in a ``TrainerRewound``."""
        last = fact.step
        if last and last not in self.live:
            yield f"it goes back to step {last}, which was not committed"
        self.live = {step: digest for step, digest in self.live.items() if step <= last}
        self.superseded |= {commit.position for commit in self.commits if commit.step > last}

    def rejected(self, position: int, fact: events.ExperiencesRejected) -> None:
        """Take in an ``ExperiencesRejected`` of the trainer itself."""
        self._rejected.append((position, packed(fact.experiences)))

    def finish(self, annotated: Integers, reasons: dict[str, int]) -> Iterator[tuple[int, str]]:
        """Yield what only the whole log tells, and where: a row is handed out or rejected once.

        Args:
            annotated: all rows of its set.
            reasons: for which it rejected how many.
        """
        rejected = together(unpacked(rows) for _, rows in self._rejected)
        for position, lost in self._dropped:
            for row in map(format_address, lost[~np.isin(lost, rejected)].tolist()):
                yield position, f"annotation {row} was taken out of its step and not rejected"
        leases = {leased.position: leased.rows for leased in self.steps.values()}
        handed_out = [*leases.items(), *self._rejected]
        all_rows = together(unpacked(rows) for _, rows in handed_out)
        all_rows.sort()
        again, before = repeated(all_rows), dict[int, int]()
        for position, packed_rows in sorted(handed_out, key=itemgetter(0)) if again else ():
            rows = unpacked(packed_rows)
            for row in rows[np.isin(rows, again)].tolist():
                earlier, before[row] = before.get(row), position
                if earlier is not None:
                    annotation = f"annotation {format_address(row % _OTHER_EXPERIMENT)}"
                    yield position, f"{annotation} was given out at position {earlier} before"
                if earlier in leases and earlier != position:
                    self.sharing.add(position)
        own = Counter[bool]()
        for number, step in self.steps.items():
            own[number in self.live] += int((unpacked(step.rows) < _OTHER_EXPERIMENT).sum())
        ready = int(lacking(all_rows, annotated).sum())
        terms = (len(annotated), ready, own[False], own[True], reasons)
        self.terms = TrainerCounts(self.name, self.annotation_set, *terms)


@dataclass(slots=True)
class _Strategy:
    """What one annotation set decided.

    Attributes:
        seen: the last position that it has seen.
        annotated: position -> the experiences of its annotations, packed, in their order.
        rejected: those that it rejected, packed event by event.
    """

    seen: int = 0
    annotated: dict[int, bytes] = field(default_factory=dict)
    rejected: list[bytes] = field(default_factory=list)

    def all_decided(self) -> Integers:
        """Return the experiences that it has decided, in order; copies are one experience."""
        annotated = (np.unique(unpacked(rows)) for rows in self.annotated.values())
        decided = together((*annotated, *map(unpacked, self.rejected)))
        decided.sort()
        return decided

    def rows(self) -> Integers:
        """Return the addresses of its annotations, copies included."""
        parts = ((first_address(at), unpacked(rows)) for at, rows in self.annotated.items())
        return together(np.arange(first, first + len(rows)) for first, rows in parts)


_NOTHING = packed(())


class LogAudit:
    """Collects what the log says, event by event: `add` it, `finish`, then ask.

    Args:
        chain: follows the heads.
        lease_at: reads the manifest of a step that was dealt anew: they are few.
        contents: whether to keep what `contents` holds.

    Attributes:
        chain, lease_at: as given.
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
        terms: of each strategy and each trainer, what became of everything, once it is finished.
    """

    def __init__(self, chain: EventChain, lease_at: LeaseAt, *, contents: bool = False) -> None:
        self.chain = chain
        self.lease_at = lease_at
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
        self.terms: list[StrategyCounts | TrainerCounts] = []
        self._guests: dict[str, TrainerAudit] = {}  # trainers of other experiments
        self._strategies: dict[str, _Strategy] = {}
        self._recorded: dict[int, bytes] = {}  # position -> packed addresses, without refused ones
        self._scores = defaultdict[str, list[bytes]](list)
        self._numbers: Counter[tuple[str, str]] = Counter()
        self._versions: set[int] = set()

    @property
    def experiences(self) -> int:
        """How many experiences were recorded."""
        return self._numbers["", counters.RECORDED]

    def add(self, page: Sequence[StoredEvent]) -> list[PlacedFact]:
        """Take in the next events of the log; return those whose body can be read."""
        facts = []
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
                self._read(stored.position, fact, stored.actor)
            except (CodecError, LookupError, TypeError, ValueError, ArithmeticError) as error:
                what = f"its body has not the form of {stored.kind}: {error!r}"
                self._wrong("log", stored.position, what)
            # Folded though the audit objects: what the fold makes of it is another opinion.
            facts.append(PlacedFact(stored.position, stored.actor, fact))
        return facts

    def _wrong(self, check: str, position: int, what: str) -> None:
        self.problems.append(Problem(check, f"position {position}", what))

    def _note(self, check: str, position: int, trainer: str, wrong: Iterable[str]) -> None:
        """Note what is wrong at a position of a trainer."""
        where = f"position {position} (trainer {trainer!r})"
        self.problems += (Problem(check, where, what) for what in wrong)

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
            case events.BatchPlanned():
                groups, rollouts = len(fact.tasks), len(fact.tasks) * fact.rollouts_per_group
                self._numbers["", counters.planned_by(actor)] += 1
                self._numbers["", counters.PLANNED_GROUPS] += groups
                self._numbers["", counters.PLANNED_ROLLOUTS] += rollouts
                self.batches.plan(str(fact.batch), fact.tasks, fact.rollouts_per_group)
            case events.BatchSealed():
                held = self.batches.seal(str(fact.batch))
                if held != fact.expected:
                    what = f"batch {str(fact.batch)!r} was sealed with {fact.expected} experiences"
                    self._wrong("log", position, f"{what}, recorded before were {held}")
            case events.ExperiencesRecorded():
                self._experiences(position, fact)
            case events.ConsumerRegistered(kind="trainer"):
                of = str(fact.config.get("strategy", ""))
                self.trainers[fact.consumer] = TrainerAudit(fact.consumer, of)
            case events.ConsumerRegistered():
                self._strategies[fact.consumer] = _Strategy()
            case events.ExperiencesAnnotated():
                self.segments[fact.segment] = position
                strategy = self._strategy(position, fact.consumer, fact.seen)
                if fact.experiences:
                    # Copies are one experience; of so few numbers a set is quicker than NumPy.
                    self._numbers[fact.consumer, counters.ANNOTATED] += len(set(fact.experiences))
                    self._numbers[fact.consumer, counters.ROWS] += len(fact.experiences)
                strategy.annotated[position] = packed(fact.experiences)
            case events.ExperiencesRejected():
                self._rejected(position, fact)
            case events.BatchLeased():
                # First: it needs no trainer, which may never have been registered.
                self._note("manifests", position, fact.consumer, self._unlike_annotations(fact))
                leased = self._trainer(fact.consumer).leased(position, fact)
                self._note("manifests", position, fact.consumer, leased)
            case events.StepDealt():
                trainer = self._trainer(fact.consumer)
                dealt = trainer.dealt(position, fact, self.lease_at)
                self._note("manifests", position, trainer.name, dealt)
            case events.RanksAssembled():
                self._trainer(fact.consumer).assembled(fact)
            case events.StepsCommitted():
                trainer = self._trainer(fact.consumer)
                self._note("commits", position, trainer.name, trainer.committed(position, fact))
            case events.StepMeasured():
                self.segments[fact.segment] = position
                trainer = self._trainer(fact.consumer)
                self._note("commits", position, trainer.name, trainer.measured(fact))
            case events.TrainerRewound():
                trainer = self._trainer(fact.consumer)
                self._note("commits", position, trainer.name, trainer.rewound(fact))
            case events.RewardsAssigned():
                self._scores[fact.scoring].append(packed(fact.experiences))
            case events.SegmentsArchived():
                self._archived(position, fact)
            case events.SegmentsRestored():
                for key in fact.segments:
                    del self.archived[key]
            case events.ChainStarted():
                if fact.digest != (before := self.chain.before):
                    what = f"it names {fact.digest.hex()} as the head of all before it"
                    self._wrong("chain", position, f"{what}, which has {before.hex()}")
            case events.ExperimentCreated() | events.ConfigurationChanged():
                pass  # one row of one table, in which there is nothing to count
            case events.ExperimentFinished() | events.PolicyPublished() | events.UnknownEvent():
                pass  # counted by its kind
            case events.RankJoined() | events.StepPartDone() | events.StreamEnded():
                pass  # what ranks say to each other is in no projection
            case _:
                assert_never(fact)

    def _trainer(self, name: str) -> TrainerAudit:
        if name not in self.trainers:
            raise LookupError(f"trainer {name!r} was never registered")
        return self.trainers[name]

    def _experiences(self, position: int, fact: events.ExperiencesRecorded) -> None:
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
            self.problems.append(Problem("log", f"experience {format_address(base + slot)}", what))
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

    def _rejected(self, position: int, fact: events.ExperiencesRejected) -> None:
        name = fact.consumer
        self._numbers.update((name, counters.rejected_for(reason)) for reason in fact.reasons)
        if fact.by == "strategy":
            strategy = self._strategy(position, name, fact.seen)
            strategy.rejected.append(packed(fact.experiences))
        elif name in self.trainers or "/" not in name:
            self._trainer(name).rejected(position, fact)
        else:
            self._guests.setdefault(name, TrainerAudit(name)).rejected(position, fact)

    def _unlike_annotations(self, fact: events.BatchLeased) -> Iterator[str]:
        """Yield which own rows of a manifest are not what the annotations that they name say."""
        rows = np.array(fact.annotations, np.int64)
        experiences = np.array(fact.experiences, np.int64)
        own = np.flatnonzero(np.array(fact.source or [0] * len(rows)) == 0)
        strategy = self._strategies.get(fact.annotation_set, _Strategy())
        places, all_slots = np.divmod(rows, MAX_ROWS_PER_EVENT)
        for place in np.unique(places[own]).tolist():
            mine = own[places[own] == place]
            annotated, slots = unpacked(strategy.annotated.get(place, _NOTHING)), all_slots[mine]
            if (slots >= len(annotated)).any():
                annotation = format_address(int(rows[mine[0]]))
                yield f"set {fact.annotation_set!r} has no annotation {annotation}"
            elif len(wrong := mine[annotated[slots] != experiences[mine]]):
                row = int(wrong[0])
                named = (experiences[row], rows[row], annotated[all_slots[row]])
                trained, annotation, other = (format_address(int(address)) for address in named)
                what = f"row {row} trains {trained} with annotation {annotation}"
                yield f"{what}, which is of {other}"

    def _archived(self, position: int, fact: events.SegmentsArchived) -> None:
        """Nothing goes that the set of a trainer has not decided."""
        self.archived |= dict.fromkeys(fact.segments, fact.uri)
        if fact.uri is not None:
            self.files[fact.uri] = (position, fact.digest)
        places = [self.segments[key] for key in fact.segments if key in self.segments]
        gone = [unpacked(self._recorded[place]) for place in places if place in self._recorded]
        trained = {trainer.annotation_set for trainer in self.trainers.values()}
        for name in sorted(trained) if gone else ():
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
            rows = self._strategies.get(trainer.annotation_set, _Strategy()).rows()
            for position, what in trainer.finish(rows, self._rejected_by(trainer.name)):
                self._note("conservation", position, trainer.name, [what])
        recorded = together(map(unpacked, self._recorded.values()))
        for name, strategy in sorted(self._strategies.items()):
            decided = strategy.all_decided()
            seen = recorded[: np.searchsorted(recorded, first_address(strategy.seen + 1))]
            rejected = Counter(self._rejected_by("")) + Counter(self._rejected_by(name))
            self.terms.append(
                StrategyCounts(
                    name,
                    recorded=self.experiences,
                    unseen=len(recorded) - len(seen),
                    waiting=int(lacking(decided, seen).sum()),
                    annotated=self._numbers[name, counters.ANNOTATED],
                    rejected=dict(sorted(rejected.items())),
                    rows=self._numbers[name, counters.ROWS],
                )
            )
            wrong = [(address, "was decided twice") for address in repeated(decided)]
            unseen = decided[lacking(seen, decided)].tolist()
            wrong += [(address, "was decided, and was not there to be seen") for address in unseen]
            for address, what in wrong:
                where = f"experience {format_address(address)}"
                self.problems.append(Problem("conservation", where, f"{what} by strategy {name!r}"))
        self.terms += (trainer.terms for _, trainer in sorted(self.trainers.items()))
        for terms in self.terms:
            if not terms.holds:
                what = f"the terms do not add up: {terms}"
                self.problems.append(Problem("conservation", terms.consumer, what))

    def _rejected_by(self, name: str) -> dict[str, int]:
        return counters.reasons(self._numbers, name)

    def rows(self) -> dict[str, int]:
        """Return how many rows each projection must have, once it is finished."""
        steps = [step for trainer in self.trainers.values() for step in trainer.steps.values()]
        consumers = {name for name, _ in self._numbers if name}
        return {
            "configuration": 1,
            "batch": len(self.batches),
            "plan": self._numbers["", counters.PLANNED_GROUPS],
            "experience": self.experiences,
            "consumer": self._numbers["", events.ConsumerRegistered.__name__],
            "waiting": sum(of.waiting for of in self.terms if isinstance(of, StrategyCounts)),
            "annotation": sum(self._numbers[name, counters.ROWS] for name in self._strategies),
            "rejection": sum(sum(self._rejected_by(name).values()) for name in consumers),
            "delivery": sum(step.count for step in steps),
            "step": self._numbers["", events.BatchLeased.__name__],
            "policy": self._numbers["", events.PolicyPublished.__name__],
            "assigned_reward": sum(
                len(np.unique(together(map(unpacked, parts)))) for parts in self._scores.values()
            ),
            "counter": len(self.numbers()),
            "archived": len(self.archived),
        }

    def plans(self) -> PlanCounts:
        """Return the planned rollouts."""
        return PlanCounts(self._numbers["", counters.PLANNED_ROLLOUTS], self.batches.stored())

    def numbers(self) -> counters.Numbers:
        """Return the number that each counter must have."""
        numbers = dict(self._numbers)
        if ("", events.BatchSealed.__name__) in numbers:
            numbers["", counters.STORED_ROLLOUTS] = self.batches.stored(sealed_only=True)
        if self._versions:
            numbers["", counters.LOWEST_VERSION] = min(self._versions)
            numbers["", counters.HIGHEST_VERSION] = max(self._versions)
        return numbers
