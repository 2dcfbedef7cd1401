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
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import anyio.from_thread
import anyio.to_thread

from trinity_buffer import events
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.limits import sizes
from trinity_buffer.pipeline.coordination.waiting import task_group
from trinity_buffer.pipeline.store import Experiment
from trinity_buffer.pipeline.train import checkpoint as checkpoints
from trinity_buffer.pipeline.train.checkpoint import version_of
from trinity_buffer.pipeline.verify import log_audit, projections, segments
from trinity_buffer.pipeline.verify.addresses import Names
from trinity_buffer.pipeline.verify.log_audit import LogAudit, Problem, TrainerAudit
from trinity_buffer.store import counters, log, refold
from trinity_buffer.store.counts import PlanCounts, StrategyCounts, TrainerCounts
from trinity_buffer.store.log import EventChain
from trinity_buffer.store.refold import Scratch, UnfoldableError
from trinity_buffer.store.rows import address_of, format_address
from trinity_buffer.store.transaction import Transaction

_SLASHES_OF_UID = 4


class Acknowledged:
    """What explorers were told is durable: hashes alone, of files that may be as long as the run.

    Args:
        place: a file of lines, or a folder of such files. A line is one of `WriteReceipt.lines`, or
            a uid alone.

    Attributes:
        uids: of all lines.
        contents: those that came with a content digest, with it.
        heads: of the log, when each line was written.

    Raises:
        InvalidArgumentError: there is no such file or folder, or a file is no text.
    """

    def __init__(self, place: Path) -> None:
        if not place.exists():
            raise InvalidArgumentError(f"acknowledged={place}: there is no such file or folder")
        files = place.rglob("*") if place.is_dir() else [place]
        self._files = sorted(file for file in files if file.is_file())
        self.uids, self.contents = Names(), Names()
        self.heads: set[bytes] = set()
        for lines in _pages_of(self._files):
            self.uids.add(uid for uid, _, _ in lines)
            self.contents.add((uid, digest) for uid, digest, _ in lines if digest)
            self.heads.update(head for _, _, head in lines if head)

    def lost(self, uids: Names, contents: Names | None) -> tuple[str, ...]:
        """Return the uids that no event recorded, and those recorded with another content."""
        gone = self.uids.unknown_to(uids)
        other = set() if contents is None else self.contents.unknown_to(contents)
        lost: dict[str, None] = {}
        changed: dict[str, None] = {}
        for lines in _pages_of(self._files) if gone or other else ():
            for uid, digest, _ in lines:
                if hash(uid) in gone:
                    lost[f"experience {uid}"] = None
                elif digest and hash((uid, digest)) in other:
                    what = f"acknowledged with the content {digest.hex()}, recorded with another"
                    changed[f"experience {uid} ({what})"] = None
        return (*lost, *changed)


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

    def commit(self, trainer: TrainerAudit) -> log_audit.Commit | None:
        """Return the last commit of this checkpoint; it may have been moved since."""
        for commit in reversed(trainer.commits):
            if commit.checkpoint == str(self.checkpoint):
                return commit
            if commit.digest is not None and commit.digest == self.digest_like(commit.digest):
                return commit
        return None


def manifest_text(digest: bytes, leased: log_audit.LeasedManifest | None = None) -> str:
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
    leased, carried = trainer.manifests, chain.manifests
    earlier = trainer.manifests_up_to(carried.before)
    times = Counter([*(earlier or ()), *carried.last])
    unknown = 0 if earlier is not None else carried.length - len(carried.last)
    lost = [f"one of the manifests of the steps 1 to {unknown}"] if unknown else []
    lost += [manifest_text(digest) for digest in times if digest not in leased]
    known, commit = [leased[digest] for digest in times if digest in leased], chain.commit(trainer)
    steps = [manifest.step for manifest in known]
    line = dict(trainer.live)
    # What a rewind superseded went through the manifests of then.
    if commit is not None and commit.position in trainer.superseded:
        line |= enumerate(trainer.manifests_up_to(commit.chain) or (), 1)
    # The commit counts too: where the chain lacks its last manifests, their steps are lost, and
    # not merely later than the checkpoint.
    last = max([*steps, 0 if commit is None else commit.step])
    lost += [
        manifest_text(digest, leased.get(digest))
        for step, digest in sorted(line.items())
        if unknown < step <= last and digest not in times
    ]
    twice = {digest for digest, number in times.items() if number > 1}
    twice |= {manifest.digest for manifest in known if manifest.position in trainer.sharing}
    first = {manifest.step: manifest.digest for manifest in reversed(known)}
    twice |= {manifest.digest for manifest in known if first[manifest.step] != manifest.digest}
    duplicated = [manifest_text(digest, leased.get(digest)) for digest in times if digest in twice]
    wrong = [f"its chain goes through the steps {steps}"] if steps != sorted(steps) else []
    if commit is None:
        wrong.append(f"no commit names its sha256, {chain.digest_like(None)}")
    elif commit.digest != (digest := chain.digest_like(commit.digest)):
        place = f"position {commit.position} recorded {commit.digest}"
        wrong.append(f"its sha256 is {digest}, {place}")
    elif commit.chain != carried.link:
        place = f"position {commit.position} committed"
        wrong.append(f"{place} another chain of manifests than it carries")
    problems = [Problem("commits", f"checkpoint {chain.checkpoint}", what) for what in wrong]
    return [*dict.fromkeys(lost)], duplicated, problems


def _trainer_of(
    chain: Chain, trainers: Mapping[str, TrainerAudit], consumer: str | None
) -> TrainerAudit:
    if consumer is not None:
        return trainers[consumer]
    through, everyone = set(chain.manifests.last), list(trainers.values())
    candidates = (
        [trainer for trainer in everyone if chain.commit(trainer) is not None]
        or [trainer for trainer in everyone if through & trainer.manifests.keys()]
        or everyone
        or [TrainerAudit("")]
    )
    if len(candidates) > 1:
        raise InvalidArgumentError(
            f"the checkpoint {chain.checkpoint} may be of several trainers "
            f"({', '.join(trainers)}): say which with consumer="
        )
    return candidates[0]


__all__ = ["Problem", "VerifyReport", "verify"]


async def verify(
    experiment: Experiment,
    acknowledged: Path | None = None,
    checkpoint: Path | None = None,
    *,
    quick: bool = False,
    consumer: str | None = None,
    head: str | None = None,
    progress: projections.Progress | None = None,
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
    # What comes from outside is read before the log is: a slip in it costs no run.
    outside = (acknowledged, checkpoint, head)
    noted, chain, heads = await anyio.to_thread.run_sync(_outside, *outside)
    database, key = experiment.database, experiment.key
    compares = noted is not None and noted.contents.number > 0
    lease_at = partial(_lease_at, experiment)
    audit = LogAudit(EventChain(experiment.name, heads), lease_at, contents=compares)
    with nullcontext() if quick else refold.open_scratch(key) as scratch:
        # Before the log is read, and up to the head of then: what comes later is neither audited
        # nor counted.
        live = await database.read(_snapshot, key)
        progress = progress or projections.no_progress
        number, in_segments = await _read_log(experiment, audit, live.head, scratch, progress)
        problems = audit.problems
        problems += await _compare_projections(experiment, audit, live, scratch, progress)
    problems += await anyio.to_thread.run_sync(
        lambda: list(segments.check_archives(audit.files, audit.archived, quick=quick))
    )
    problems += await _damaged_segments(experiment, audit, live.head, in_segments)
    problems += await segments.check_surroundings(database, audit.segments, quick=quick)
    examine = partial(_compare_outside, audit, noted, chain, consumer)
    lost, trained_twice, wrong = await anyio.to_thread.run_sync(examine)
    problems = wrong + problems
    return VerifyReport(
        experiment=experiment.name,
        store=database.name,
        version=f"{database.dialect} {database.version}",
        quick=quick,
        events=audit.events,
        experiences=audit.experiences,
        manifests=sum(len(trainer.steps) for trainer in audit.trainers.values()),
        segments=number,
        head=audit.chain.head.hex(),
        acknowledged=None if noted is None else noted.uids.number,
        contents=0 if noted is None else noted.contents.number,
        chain=None if chain is None else chain.manifests.length,
        lost_items=lost,
        duplicated_items=(*await _recorded_twice(experiment, audit), *trained_twice),
        problems=tuple(problems),
        strategies=tuple(of for of in audit.terms if isinstance(of, StrategyCounts)),
        trainers=tuple(of for of in audit.terms if isinstance(of, TrainerCounts)),
        plans=audit.plans(),
        seconds=time.perf_counter() - begin,
    )


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
    """What the projections said in one transaction, and the head of the log then."""

    head: int
    rows: dict[str, int]
    numbers: counters.Numbers


def _snapshot(tx: Transaction, experiment: int) -> _Snapshot:
    head, rows = log.head(tx, experiment), refold.counts(tx, experiment)
    return _Snapshot(head, rows, counters.numbers_of(tx, experiment))


def _outside(
    acknowledged: Path | None, checkpoint: Path | None, head: str | None
) -> tuple[Acknowledged | None, Chain | None, set[bytes]]:
    """Read what comes from outside; return it, and the heads that the log must have."""
    if head is not None and (len(head) != _HEAD_DIGITS or not _hex(head)):
        raise InvalidArgumentError(f"head={head!r}: a head is {_HEAD_DIGITS} digits of hex")
    noted = None if acknowledged is None else Acknowledged(Path(acknowledged))
    chain = None if checkpoint is None else Chain(Path(checkpoint))
    heads = {_hex(head or ""), chain.head if chain else b"", *(noted.heads if noted else ())}
    return noted, chain, heads - {b""}


def _compare_outside(
    audit: LogAudit, noted: Acknowledged | None, chain: Chain | None, consumer: str | None
) -> tuple[tuple[str, ...], list[str], list[Problem]]:
    """Return the lost rows, the rows trained twice, and other problems of what is outside."""
    if consumer not in (None, *audit.trainers):
        known = ", ".join(audit.trainers) or "none"
        raise InvalidArgumentError(f"consumer={consumer!r} is no trainer here (there: {known})")
    lost = () if noted is None else noted.lost(audit.uids, audit.contents)
    foreign = list[Problem]()
    if noted is not None and noted.heads and noted.heads <= audit.chain.unproven:
        what = (
            "none of their heads is in this log: they are of another experiment or another store, "
            "unless this log was cut or replaced"
        )
        foreign.append(Problem("chain", "acknowledgements", what))
    twice = {
        manifest_text(digest, trainer.steps.get(step))
        for trainer in audit.trainers.values()
        for step, digest in trainer.twice
    }
    if chain is None:
        return lost, sorted(twice), foreign
    not_trained, again, problems = examine_chain(chain, audit.trainers, consumer)
    return (*lost, *not_trained), sorted({*twice, *again}), foreign + problems


def _lease_at(experiment: Experiment, position: int) -> events.BatchLeased | None:
    """Return the manifest that was leased at a position; called in a thread of `_read_log`."""
    read = partial(experiment.database.read, log.read_at, experiment.key, [position])
    placed = projections.readable_events(anyio.from_thread.run(read))
    return next((at.fact for at in placed if isinstance(at.fact, events.BatchLeased)), None)


async def _read_log(
    experiment: Experiment,
    audit: LogAudit,
    head: int,
    scratch: Scratch | None,
    progress: projections.Progress,
) -> tuple[int, list[tuple[bytes, Problem]]]:
    """Audit the log up to ``head``; with a scratch also fold it, and check its segments.

    Returns:
        How many segments were opened, and what is wrong with which of them.
    """
    database, key = experiment.database, experiment.key
    number, problems = 0, list[tuple[bytes, Problem]]()

    async def fold(scratch: Scratch, facts: Sequence[events.PlacedFact]) -> None:
        with suppress(UnfoldableError):  # the comparison raises it again
            await anyio.to_thread.run_sync(scratch.fold, facts)

    async with aclosing(projections.pages(database, key, up_to=head)) as pages:
        async for page in pages:
            facts = await anyio.to_thread.run_sync(audit.add, page)
            if scratch is not None:
                async with task_group() as group:  # SQLite folds while segments are decoded
                    group.start_soon(fold, scratch, facts)
                    more, wrong = await segments.check_segments(database, facts)
                number += more
                problems += wrong
            progress("log", page[-1].position, head)
    await anyio.to_thread.run_sync(audit.finish)
    return number, problems


async def _compare_projections(
    experiment: Experiment,
    audit: LogAudit,
    live: _Snapshot,
    scratch: Scratch | None,
    progress: projections.Progress,
) -> list[Problem]:
    """Compare the projections with those of another fold, and with what the audit counted."""
    miscounted = [
        (table, f"it has {live.rows[table]} rows, the log says {number}")
        for table, number in audit.rows().items()
        if live.rows[table] != number
    ]
    audited = audit.numbers()
    miscounted += [
        ("counter", f"{key} is {live.numbers[key]}, the log says {audited[key]}")
        for key in sorted(live.numbers.keys() & audited.keys())
        if live.numbers[key] != audited[key]
    ]
    wrong, problems = miscounted, list[Problem]()
    # It refuses a log that does not hold.
    remedy = "" if audit.problems else "; `trinity-buffer rebuild` mends it"
    try:
        if scratch is not None:
            differences = await projections.compare(
                experiment.database, scratch, progress, projections.readable_events
            )
            wrong = [(difference.table, str(difference)) for difference in differences]
    except UnfoldableError as error:
        what = f"{error.kind} contradicts the events before it: {error.cause}"
        problems, remedy = [Problem("fold", f"position {error.position}", what)], ""
    if miscounted and not wrong and not audit.problems:
        # The fold agrees with itself, so only the audit, which shares no code with it, can tell
        # that it is the fold that is wrong.
        what = (
            "they are what the fold of this version makes of the log, and not what its events "
            f"add up to: {': '.join(miscounted[0])}; please report it"
        )
        return [Problem("projections", "all", what)]
    return problems + [Problem("projections", table, what + remedy) for table, what in wrong]


async def _damaged_segments(
    experiment: Experiment, audit: LogAudit, head: int, problems: Sequence[tuple[bytes, Problem]]
) -> list[Problem]:
    """Return the damaged segments, except those that were archived, maybe just now."""
    archived = set(audit.archived)
    if not archived.issuperset(key for key, _ in problems):
        of, kind = (experiment.database, experiment.key), events.SegmentsArchived
        async for _, fact in projections.facts_of(*of, kind, after=head):
            archived.update(fact.segments)
    return [problem for key, problem in problems if key not in archived]


async def _recorded_twice(experiment: Experiment, audit: LogAudit) -> list[str]:
    """Return the experiences that two events recorded; their uids are looked up again."""
    suspected = audit.uids.repeated()
    if not suspected:
        return []
    places = defaultdict[str, list[str]](list)
    recorded = projections.facts_of(
        experiment.database, experiment.key, events.ExperiencesRecorded, up_to=audit.position
    )
    async for position, fact in recorded:
        for slot, uid in enumerate(fact.columns.uids()):
            if hash(uid) in suspected:
                places[uid].append(format_address(address_of(position, slot)))
    twice = {uid: written for uid, written in places.items() if len(written) > 1}
    return [f"experience {uid} ({', '.join(written)})" for uid, written in twice.items()]
