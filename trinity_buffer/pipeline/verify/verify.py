"""Does the store keep its promises? Checked from its log, and from outside of it.

A store cannot know what it lost, so what explorers and checkpoints remember is compared with what
the log holds. Explorers append the lines of each receipt (uid, content digest,
head) to a file of their own after ``write`` returned; a checkpoint names the manifests that its
weights really went through. Neither asks the store.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import anyio.to_thread
import numpy as np

from trinity_buffer.errors import InvalidArgumentError, StoreError
from trinity_buffer.events import (
    BatchLeased,
    ExperiencesRecorded,
    SegmentsArchived,
    StepDealt,
    kinds_of,
)
from trinity_buffer.limits import sizes
from trinity_buffer.pipeline.background import made_ahead, task_group
from trinity_buffer.pipeline.store import Experiment
from trinity_buffer.pipeline.train import checkpoint as checkpoints
from trinity_buffer.pipeline.train.checkpoint import version_of
from trinity_buffer.pipeline.verify.addresses import Names, unpacked
from trinity_buffer.pipeline.verify.log_audit import (
    Commit,
    LeasedManifest,
    LogAudit,
    Problem,
    TrainerAudit,
)
from trinity_buffer.pipeline.verify.projections import (
    Progress,
    compare,
    no_progress,
    pages,
    readable_events,
    scratch_for,
)
from trinity_buffer.pipeline.verify.segments import (
    check_archives,
    check_segments,
    check_surroundings,
)
from trinity_buffer.store import counters, counts, log, refold, writer_queries
from trinity_buffer.store.counts import PlanCounts, StrategyCounts, TrainerCounts
from trinity_buffer.store.log import EventChain, StoredEvent
from trinity_buffer.store.refold import Difference, Scratch, UnfoldableError
from trinity_buffer.store.rows import address_of, written_as
from trinity_buffer.store.transaction import Transaction

_SLASHES_OF_UID = 4


class Acknowledged:
    """What explorers were told is durable: hashes alone, of files that may be as long as the run.

    Args:
        place: a file of lines, or a folder of such files. A line is one of `WriteReceipt.lines`, or
            a uid alone.

    Attributes:
        uids: of all lines.
        compared: those that came with a content digest.
        heads: of the log, when each line was written.

    Raises:
        InvalidArgumentError: there is no such file or folder, or a file is no text.
    """

    def __init__(self, place: Path) -> None:
        if not place.exists():
            raise InvalidArgumentError(f"acknowledged={place}: there is no such file or folder")
        files = place.rglob("*") if place.is_dir() else [place]
        self._files = sorted(file for file in files if file.is_file())
        self.uids = Names()
        self.compared = Names()
        self._contents = Names()
        self.heads: set[bytes] = set()
        for parsed in _pages_of(self._files):
            self.uids.add(uid for uid, _, _ in parsed)
            self.compared.add(uid for uid, digest, _ in parsed if digest)
            self._contents.add((uid, digest) for uid, digest, _ in parsed if digest)
            self.heads.update(head for _, _, head in parsed if head)

    def lost(self, uids: Names, contents: Names | None) -> tuple[str, ...]:
        """Return the uids that no event recorded, and those recorded with another content."""
        gone = _lacking(self.uids, uids)
        other = set() if contents is None else _lacking(self._contents, contents)
        if not gone and not other:
            return ()
        lost: dict[str, None] = {}
        changed: dict[str, None] = {}
        for lines in _pages_of(self._files):
            for uid, digest, _ in lines:
                if hash(uid) in gone:
                    lost[f"experience {uid}"] = None
                elif digest and hash((uid, digest)) in other:
                    what = f"acknowledged with the content {digest.hex()}, recorded with another"
                    changed[f"experience {uid} ({what})"] = None
        return (*lost, *changed)


def _lacking(acknowledged: Names, known: Names) -> set[int]:
    """Return the hashes of what was acknowledged and is not known."""
    hashes = acknowledged.hashes
    return set(hashes[known.lacking(hashes)].tolist())


def _pages_of(files: Sequence[Path]) -> Iterator[list[tuple[str, bytes, bytes]]]:
    """Yield the lines of files, some at a time: uid, content digest, head; empty where it has none.

    A last line without its end counts if it begins with a uid: an explorer that is killed while it
    appends leaves the beginning of a line, of a receipt that it had.
    """
    for path in files:
        try:
            with path.open(encoding="utf-8-sig") as file:
                while page := [*islice(file, sizes.rows_per_page)]:
                    lines = (
                        (line.rstrip("\n") + "\t\t").split("\t")
                        for line in page
                        if line.strip("\n")
                        and (line.endswith("\n") or line.count("/") >= _SLASHES_OF_UID)
                    )
                    yield [(uid, _hex(digest), _hex(head)) for uid, digest, head, *_ in lines]
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgumentError(f"{path} cannot be read as uids: {error}") from error


def _hex(text: str) -> bytes:
    """Return the bytes of a digest, none of what a kill cut short."""
    return bytes.fromhex(text) if len(text) in (32, 64) and _HEX.issuperset(text) else b""


_HEX = frozenset("0123456789abcdef")
_HEAD_DIGITS = 64


class Chain:
    """What a checkpoint says it was trained on.

    Attributes:
        checkpoint: the file or folder.
        manifests: what its weights went through.
        head: of the log, when its last step was handed out; empty where it does not say so.

    Raises:
        CheckpointError: it carries no chain, or is missing.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint.absolute()
        self.manifests = checkpoints.read_manifest_chain(checkpoint)
        self.head = checkpoints.read_head(checkpoint)
        self._digests = {version_of(None): checkpoints.digest_of(checkpoint)}

    def digest_like(self, recorded: str | None) -> str:
        """Return the digest of the checkpoint, of the version of a recorded one; None: of today's.

        Raises:
            CheckpointError: that version is not known, or the checkpoint is gone meanwhile.
        """
        version = version_of(recorded)
        if version not in self._digests:  # it reads all files again: of a large one, slowly
            self._digests[version] = checkpoints.digest_of(self.checkpoint, like=recorded)
        return self._digests[version]


def manifest_text(digest: bytes, leased: LeasedManifest | None = None) -> str:
    """Return how a manifest is told in a report."""
    place = "" if leased is None else f" (step {leased.step}, position {leased.position})"
    return f"manifest {digest.hex()}{place}"


def examine_chain(
    chain: Chain, trainers: Mapping[str, TrainerAudit], consumer: str | None = None
) -> tuple[list[str], list[str], list[Problem]]:
    """Compare the chain of a checkpoint with what its trainer leased and committed.

    Returns:
        What is lost, what is there twice, and what else is wrong.

    Raises:
        InvalidArgumentError: several trainers could have written it; ``consumer`` says which.
    """
    trainer = _trainer_of(chain, trainers, consumer)
    leased = {manifest.digest: manifest for manifest in trainer.steps.values()}
    carried, earlier = chain.manifests, trainer.manifests_up_to(chain.manifests.before)
    through = [*(earlier or ()), *carried.last]
    times = Counter(through)
    unknown = 0 if earlier is not None else carried.length - len(carried.last)
    lost = [f"one of the manifests of the steps 1 to {unknown}"] if unknown else []
    lost += [manifest_text(digest) for digest in times if digest not in leased]
    known = [leased[digest] for digest in times if digest in leased]
    commit = _commit_of(chain, trainer)
    last = max((manifest.step for manifest in known), default=0)
    # The commit counts too: where the chain lacks its last manifests, their steps are lost, and
    # not merely later than the checkpoint.
    last = max(last, commit.step if commit is not None else 0)
    lost += [
        manifest_text(digest, leased.get(digest))
        for step, digest in sorted(trainer.live.items())
        if unknown < step <= last and digest not in times
    ]
    twice = {digest for digest, number in times.items() if number > 1}
    twice |= _sharing_rows(known)
    duplicated = [manifest_text(digest, leased.get(digest)) for digest in times if digest in twice]
    return [*dict.fromkeys(lost)], duplicated, _contradictions(chain, known, commit)


def _sharing_rows(known: Sequence[LeasedManifest]) -> set[bytes]:
    """Return the digests of manifests with an annotation row that an earlier one has too."""
    if not known:
        return set()
    rows = np.concatenate([unpacked(manifest.rows) for manifest in known])
    owners = np.repeat(np.arange(len(known)), [manifest.count for manifest in known])
    order = np.lexsort((owners, rows))
    rows, owners = rows[order], owners[order]
    again = (rows[1:] == rows[:-1]) & (owners[1:] != owners[:-1])
    return {known[index].digest for index in np.unique(owners[1:][again]).tolist()}


def _commit_of(chain: Chain, trainer: TrainerAudit) -> Commit | None:
    """Return the last commit of this checkpoint; it may have been moved since."""
    for commit in reversed(trainer.commits):
        if commit.checkpoint == str(chain.checkpoint):
            return commit
        if commit.digest is not None and commit.digest == chain.digest_like(commit.digest):
            return commit
    return None


def _contradictions(
    chain: Chain, known: Sequence[LeasedManifest], commit: Commit | None
) -> list[Problem]:
    wrong, steps = list[str](), [manifest.step for manifest in known]
    if steps != sorted(steps):
        wrong.append(f"its chain goes through the steps {steps}")
    if commit is None:
        wrong.append(f"no commit names its sha256, {chain.digest_like(None)}")
    elif commit.digest != (digest := chain.digest_like(commit.digest)):
        place = f"position {commit.position} recorded {commit.digest}"
        wrong.append(f"its sha256 is {digest}, {place}")
    elif commit.chain != chain.manifests.link:
        place = f"position {commit.position} committed"
        wrong.append(f"{place} another chain of manifests than it carries")
    return [Problem("commits", f"checkpoint {chain.checkpoint}", what) for what in wrong]


def _trainer_of(
    chain: Chain, trainers: Mapping[str, TrainerAudit], consumer: str | None
) -> TrainerAudit:
    if consumer is not None:
        return trainers[consumer]
    candidates = [t for t in trainers.values() if _commit_of(chain, t) is not None]
    candidates = candidates or [
        trainer
        for trainer in trainers.values()
        if {manifest.digest for manifest in trainer.steps.values()} & set(chain.manifests.last)
    ]
    candidates = candidates or list(trainers.values())
    if len(candidates) > 1:
        raise InvalidArgumentError(
            f"the checkpoint {chain.checkpoint} may be of several trainers "
            f"({', '.join(trainers)}): say which with consumer="
        )
    return candidates[0] if candidates else TrainerAudit("")


__all__ = ["Problem", "VerifyReport", "verify"]


async def verify(
    experiment: Experiment,
    acknowledged: Path | None = None,
    checkpoint: Path | None = None,
    *,
    quick: bool = False,
    consumer: str | None = None,
    head: str | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check everything that the log, its segments and its projections say of each other.

    Whether something was lost is no question to the store: ``lost`` and ``duplicated`` compare the
    log's events (never a projection) with what explorers and checkpoints noted for themselves;
    ``duplicated`` also counts what the log itself holds twice.
    Others may go on writing meanwhile; no transaction is long.

    Args:
        acknowledged: a file of lines of receipts, or of uids alone, or a folder of such files.
        checkpoint: folder of a checkpoint with its ``manifests.json``.
        quick: open no segment, and count the rows of projections instead of comparing them: a
            changed value in a projection and damage in a segment stay unseen.
        consumer: which trainer wrote the checkpoint, where several could have.
        head: of an earlier log, as hex: the log must still have it.
        progress: called with what is being done, how much of it is done, and how much there is.

    Raises:
        InvalidArgumentError: ``acknowledged`` cannot be read, ``consumer`` is no trainer, or
            ``head`` is not a head.
        CheckpointError: the checkpoint is missing or names no manifests.
    """
    begin = time.perf_counter()
    outside = (acknowledged, checkpoint, head)
    begun = partial(_Verification, experiment, *outside, progress or no_progress, quick=quick)
    verification = await anyio.to_thread.run_sync(begun)
    await verification.run()
    return await verification.report(consumer, begin)


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify` found.

    Attributes:
        experiment, store: what was looked at; ``version`` is of the database's library or server.
        quick: no segment was opened, and rows of projections were counted, not compared.
        events, experiences, manifests, segments: how many were looked at.
        head: of the last event, as hex; kept elsewhere, it proves all of this log.
        acknowledged: distinct uids in the acknowledgement files; None: none were given.
        contents: how many of them came with a content digest, and were compared by it.
        chain: manifests in the checkpoint's chain; None: no checkpoint was given.
        lost: how many acknowledged experiences and manifests of the chain the log does not hold,
            and committed manifests the weights did not go through; `lost_items` names each.
        duplicated: how many experiences were recorded by two events, and manifests trained or
            committed twice, or sharing rows with an earlier one of the chain; `duplicated_items`
            names each. Both count experiences and manifests, never the rows of a manifest.
        problems: everything else that is wrong.
        strategies, trainers, plans: what became of everything.
    """

    experiment: str
    store: str
    version: str
    quick: bool
    events: int
    experiences: int
    manifests: int
    segments: int
    head: str
    acknowledged: int | None
    contents: int
    chain: int | None
    lost_items: tuple[str, ...]
    duplicated_items: tuple[str, ...]
    problems: tuple[Problem, ...]
    strategies: tuple[StrategyCounts, ...]
    trainers: tuple[TrainerCounts, ...]
    plans: PlanCounts
    seconds: float

    @property
    def lost(self) -> int:
        """How many experiences and manifests were lost."""
        return len(self.lost_items)

    @property
    def duplicated(self) -> int:
        """How many experiences and manifests there are twice."""
        return len(self.duplicated_items)

    @property
    def measured(self) -> bool:
        """Whether there was evidence from outside: without it, a loss cannot be seen."""
        return self.acknowledged is not None and self.chain is not None

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.lost_items or self.duplicated_items or self.problems)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        fields = asdict(self)
        fields["plans"]["missing"] = self.plans.missing
        measured = {"ok": self.ok, "measured": self.measured}
        return {**measured, "lost": self.lost, "duplicated": self.duplicated, **fields}


class _Snapshot(NamedTuple):
    """What the projections said in one transaction, and the head of the log then.

    Attributes:
        damage: why they cannot be counted, which are no numbers then; None: they were.
    """

    head: int
    rows: dict[str, int]
    numbers: counters.Numbers
    strategies: tuple[StrategyCounts, ...] = ()
    trainers: tuple[TrainerCounts, ...] = ()
    plans: PlanCounts = PlanCounts(0, 0)
    damage: str | None = None


def _snapshot(tx: Transaction, experiment: int) -> _Snapshot:
    head, rows = log.head(tx, experiment), refold.counts(tx, experiment)
    try:
        consumers = writer_queries.consumers(tx, experiment).values()
        sets, trainers = (
            [row for row in consumers if row.kind == kind] for kind in ("strategy", "trainer")
        )
        return _Snapshot(
            head,
            rows,
            counters.numbers_of(tx, experiment),
            tuple(counts.recount_strategy(tx, experiment, row) for row in sets),
            tuple(counts.recount_trainer(tx, experiment, row) for row in trainers),
            counts.recount_plans(tx, experiment),
        )
    except (StoreError, TypeError, ValueError) as error:
        # A value of another type, as one flipped bit makes it on SQLite, must not keep the rest
        # from being looked at.
        damage = f"the projections cannot be counted: {error}"
        return _Snapshot(head, rows, {}, damage=damage)


class _Verification:
    """One run of `verify`, on the log as it is when it begins. Reads what comes from outside."""

    def __init__(
        self,
        experiment: Experiment,
        acknowledged: Path | None,
        checkpoint: Path | None,
        head: str | None,
        progress: Progress,
        *,
        quick: bool,
    ) -> None:
        if head is not None and (len(head) != _HEAD_DIGITS or not _hex(head)):
            raise InvalidArgumentError(f"head={head!r}: a head is {_HEAD_DIGITS} digits of hex")
        self._acknowledged = None if acknowledged is None else Acknowledged(Path(acknowledged))
        self._chain = None if checkpoint is None else Chain(Path(checkpoint))
        heads = {_hex(head or ""), b"" if self._chain is None else self._chain.head}
        heads |= set() if self._acknowledged is None else self._acknowledged.heads
        self._experiment = experiment
        self._database, self._key = experiment.database, experiment.key
        self._quick = quick
        self._progress = progress
        compares = bool(self._acknowledged and self._acknowledged.compared.number)
        self._audit = LogAudit(EventChain(experiment.name, heads - {b""}), contents=compares)
        self._problems: list[Problem] = []
        self._segments = 0
        self._in_segments: list[tuple[bytes, Problem]] = []
        self._live: _Snapshot

    async def run(self) -> None:
        """Read the log and compare everything with it."""
        audit = self._audit
        with nullcontext() if self._quick else scratch_for(self._database, self._key) as scratch:
            # Before the log is read, and up to the head of then: what comes later is neither
            # audited nor counted.
            self._live = await self._database.read(_snapshot, self._key)
            log_pages = pages(self._database, self._key, up_to=self._live.head)

            async def next_page() -> list[StoredEvent] | None:
                return await anext(log_pages, None)

            # A page is read while the one before is worked on.
            async with aclosing(log_pages), made_ahead(next_page) as ahead:
                async for page in ahead:
                    await self._take(page, scratch)
                    self._progress("log", page[-1].position, self._live.head)
            await anyio.to_thread.run_sync(audit.finish)
            self._problems += audit.problems
            await self._compare_projections(scratch)
        self._add_up()
        check = partial(check_archives, audit.files, dict(audit.archived), quick=self._quick)
        self._problems += await anyio.to_thread.run_sync(lambda: list(check()))
        await self._report_segments()
        around = check_surroundings(self._database, audit.segments, quick=self._quick)
        self._problems += await around

    async def _take(self, page: Sequence[StoredEvent], scratch: Scratch | None) -> None:
        """Audit a page of the log, fold it, and check its segments."""
        # The leases of the steps that this page deals anew are read once more: they are few.
        dealt = readable_events([stored for stored in page if stored.kind == StepDealt.__name__])
        places = {placed.fact.leased_at for placed in dealt if isinstance(placed.fact, StepDealt)}
        before = sorted(place for place in places if 0 < place < page[-1].position)
        stored = await self._database.read(log.read_at, self._key, before) if before else []
        placed = readable_events(stored)
        leases = {at.position: at.fact for at in placed if isinstance(at.fact, BatchLeased)}
        events = await anyio.to_thread.run_sync(self._audit.add, page, leases)
        if scratch is None:
            return

        async def fold() -> None:
            with suppress(UnfoldableError):  # the comparison raises it again
                await anyio.to_thread.run_sync(scratch.fold, events)

        async with task_group() as group:  # SQLite folds while segments are decoded beside it
            group.start_soon(fold)
            count, problems = await check_segments(self._database, events)
        self._segments += count
        self._in_segments += problems

    async def _compare_projections(self, scratch: Scratch | None) -> None:
        """Compare the projections with those of another fold, and with what the audit counted."""
        miscounted, differences = self._miscounted(), list[Difference]()
        try:
            if scratch is not None:
                compared = compare(self._database, scratch, self._progress, readable_events)
                differences = await compared
        except UnfoldableError as error:
            what = f"{error.kind} contradicts the events before it: {error.cause}"
            self._problems.append(Problem("fold", f"position {error.position}", what))
            scratch = None
        # It refuses a log that does not hold.
        remedy = "" if self._problems else "; `trinity-buffer rebuild` mends it"
        if scratch is None:
            self._problems += [replace(one, what=one.what + remedy) for one in miscounted]
        elif miscounted and not differences and not self._problems:
            # The fold agrees with itself, so only the audit, which shares no code with it, can
            # tell that it is the fold that is wrong.
            what = (
                "they are what the fold of this version makes of the log, and not what its events "
                f"add up to: {miscounted[0].where}: {miscounted[0].what}; please report it"
            )
            self._problems.append(Problem("projections", "all", what))
        else:
            self._problems += [
                Problem("projections", difference.table, f"{difference}{remedy}")
                for difference in differences
            ]

    def _miscounted(self) -> list[Problem]:
        """Return which tables have another number of rows, and which counters say another."""
        problems = [
            Problem("projections", table, f"it has {self._live.rows[table]} rows, the log says {n}")
            for table, n in self._audit.rows().items()
            if self._live.rows[table] != n
        ]
        live, audited = self._live.numbers, self._audit.numbers()
        problems += [
            Problem("projections", "counter", f"{key} is {live[key]}, the log says {audited[key]}")
            for key in sorted(live.keys() & audited.keys())
            if live[key] != audited[key]
        ]
        return problems

    def _add_up(self) -> None:
        live, stored = self._live, self._audit.batches.stored()
        counted: list[StrategyCounts | TrainerCounts] = [*live.strategies, *live.trainers]
        wrong = [
            (terms.consumer, f"the terms do not add up: {terms}")
            for terms in counted
            if not terms.holds
        ]
        if live.damage is not None:
            wrong.append(("projections", live.damage))
        elif live.plans.stored != stored:
            what = f"{live.plans.stored} planned runs are stored, by the log {stored}"
            wrong.append(("plan", what))
        self._problems += [Problem("conservation", where, what) for where, what in wrong]

    async def _report_segments(self) -> None:
        """Report damaged segments, except those that were archived, maybe just now."""
        archived = set(self._audit.archived)
        if archived.issuperset(key for key, _ in self._in_segments):
            return
        kinds, after = kinds_of(SegmentsArchived), self._live.head
        async for page in pages(self._database, self._key, after=after, kinds=kinds):
            facts = (event.fact for event in readable_events(page))
            gone = (fact.segments for fact in facts if isinstance(fact, SegmentsArchived))
            archived.update(*gone)
        self._problems += [problem for key, problem in self._in_segments if key not in archived]

    async def report(self, consumer: str | None, begin: float) -> VerifyReport:
        """Return everything that was found, with the proof from outside."""
        audit, chain, acknowledged = self._audit, self._chain, self._acknowledged
        if consumer not in (None, *audit.trainers):
            known = ", ".join(audit.trainers) or "none"
            raise InvalidArgumentError(f"consumer={consumer!r} is no trainer here (there: {known})")
        lost: tuple[str, ...] = ()
        if acknowledged is not None:
            lost = await anyio.to_thread.run_sync(acknowledged.lost, audit.uids, audit.contents)
        duplicated = await self._recorded_twice()
        trained_twice = {
            manifest_text(digest, trainer.steps.get(step))
            for trainer in audit.trainers.values()
            for step, digest in trainer.twice
        }
        if chain is not None:
            examine = partial(examine_chain, chain, audit.trainers, consumer)
            not_trained, again, problems = await anyio.to_thread.run_sync(examine)
            lost += tuple(not_trained)
            trained_twice |= set(again)
            self._problems += problems
        return VerifyReport(
            experiment=self._experiment.name,
            store=self._database.name,
            version=f"{self._database.dialect} {self._database.version}",
            quick=self._quick,
            events=audit.events,
            experiences=audit.experiences,
            manifests=sum(len(trainer.steps) for trainer in audit.trainers.values()),
            segments=self._segments,
            head=audit.chain.head.hex(),
            acknowledged=None if acknowledged is None else acknowledged.uids.number,
            contents=0 if acknowledged is None else acknowledged.compared.number,
            chain=None if chain is None else chain.manifests.length,
            lost_items=lost,
            duplicated_items=(*duplicated, *sorted(trained_twice)),
            problems=tuple(self._problems),
            strategies=self._live.strategies,
            trainers=self._live.trainers,
            plans=self._live.plans,
            seconds=time.perf_counter() - begin,
        )

    async def _recorded_twice(self) -> list[str]:
        """Return the experiences that two events recorded; their uids are looked up again."""
        suspected = self._audit.uids.repeated()
        if not suspected:
            return []
        places = defaultdict[str, list[str]](list)
        log_pages = pages(self._database, self._key, up_to=self._audit.position)
        async for page in log_pages:
            for uid, address in await anyio.to_thread.run_sync(_places, page, suspected):
                places[uid].append(written_as(address))
        twice = {uid: written for uid, written in places.items() if len(written) > 1}
        return [f"experience {uid} ({', '.join(written)})" for uid, written in twice.items()]


def _places(page: Sequence[StoredEvent], suspected: set[int]) -> list[tuple[str, int]]:
    """Return uid and address of the experiences whose uid has a hash that is suspected."""
    return [
        (uid, address_of(event.position, slot))
        for event in readable_events(page)
        if isinstance(event.fact, ExperiencesRecorded)
        for slot, uid in enumerate(event.fact.columns.uids())
        if hash(uid) in suspected
    ]
