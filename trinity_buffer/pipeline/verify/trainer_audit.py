"""What one trainer leased, committed and took back, as its events tell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np

from trinity_buffer.events import (
    BatchLeased,
    ExperiencesRejected,
    RanksAssembled,
    StepDealt,
    StepMeasured,
    StepsCommitted,
    TrainerRewound,
)
from trinity_buffer.pipeline.manifest import (
    FIRST_LINK,
    chain,
    manifest_digest,
    plans_of,
    repartitioned,
    rows_by_rank,
)
from trinity_buffer.pipeline.verify.addresses import Integers, packed, repeated, together, unpacked
from trinity_buffer.pipeline.verify.report import Problem
from trinity_buffer.store.rows import written_as

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
    """Follows one trainer through the log.

    Attributes:
        name: of the consumer.
        steps: what was leased, by step.
        live: step -> digest that its commit names, on the live line.
        twice: (step, digest) of the manifests that were committed again on the live line.
        commits: all of them, those that were superseded too.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.steps: dict[int, LeasedManifest] = {}
        self.live: dict[int, bytes] = {}
        self.twice: list[tuple[int, bytes]] = []
        self.commits: list[Commit] = []
        self._sources: dict[str, int] = {"": 0}
        self._rejected: list[tuple[int, Integers]] = []
        self._dropped: list[tuple[int, Integers]] = []
        self._links: dict[int, bytes] = {0: FIRST_LINK}
        self._before: dict[bytes, tuple[bytes, bytes]] = {}  # link -> (the one before, digest)
        self._ranks: dict[int, int] = {}  # fencing token -> ranks that assembled under it

    def leased(self, position: int, fact: BatchLeased) -> Iterator[Problem]:
        """Take in a ``BatchLeased``."""
        place, digest = self._place(position), manifest_digest(fact)
        if digest != fact.digest:
            what = f"the manifest of step {fact.step} has the digest {digest.hex()}"
            yield Problem("manifests", place, f"{what}, recorded is {fact.digest.hex()}")
        if fact.step != len(self.steps) + 1:
            what = f"step {fact.step} was leased, the next one is {len(self.steps) + 1}"
            yield Problem("manifests", place, what)
        rows, by_rank = self._rows_of(fact), rows_by_rank(fact)
        self.steps[fact.step] = LeasedManifest(
            position, fact.step, fact.digest, len(rows), packed(np.sort(rows)), by_rank
        )

    def _rows_of(self, manifest: BatchLeased) -> Integers:
        """Return what `LeasedManifest.rows` says of all rows of a manifest."""
        sources = [manifest.sources[of - 1] if of else "" for of in manifest.source]
        return self._apart(manifest.annotations, sources)

    def _apart(self, addresses: Sequence[int], sources: Sequence[str]) -> Integers:
        """Return addresses of these experiments, each of which is told apart; none: of this one."""
        numbers = np.array([*map(self._number_of, sources)] or 0, np.int64)
        return np.array(addresses, np.int64) + numbers * _OTHER_EXPERIMENT

    def dealt(self, position: int, fact: StepDealt, lease: BatchLeased | None) -> Iterator[Problem]:
        """Take in a ``StepDealt``: the rows of its step, each once, whole groups on one rank.

        Args:
            position: of the event.
            fact: what it says.
            lease: the event that it refers to.
        """
        leased = self.steps.get(fact.step)
        is_leased = leased is not None and leased.position == fact.leased_at
        if leased is None or lease is None or not is_leased or fact.step in self.live:
            what = f"step {fact.step} was dealt anew, and was not leased or is committed"
            yield self._dealt_wrongly(position, what)
            return
        manifest = lease
        each_once = len(set(fact.order)) == len(fact.order) and min(fact.order, default=0) >= 0
        # Rows are taken by these places: a wrong one would fail here instead of being reported.
        if each_once:
            manifest = repartitioned(manifest, fact.order, plans_of(fact))
        rows, lost = self._rows_of(manifest), self._apart(fact.dropped, fact.dropped_from)
        # In order: another number of ranks deals the same rows in another one.
        all_rows = np.sort(np.concatenate([rows, lost]))
        if not each_once or not np.array_equal(unpacked(leased.rows), all_rows):
            yield self._dealt_wrongly(position, f"step {fact.step} was dealt with other rows")
        if len(lost) and fact.num_groups != manifest.num_groups:
            what = f"step {fact.step} was dealt with {manifest.num_groups} groups"
            yield self._dealt_wrongly(position, f"{what}, recorded are {fact.num_groups}")
        self._dropped.append((position, lost[lost < _OTHER_EXPERIMENT]))
        if manifest.digest != fact.digest:
            what = f"step {fact.step} as it was dealt has the digest {manifest.digest.hex()}"
            yield self._dealt_wrongly(position, f"{what}, recorded is {fact.digest.hex()}")
        if _splits_groups(manifest):
            yield self._dealt_wrongly(position, f"a group of step {fact.step} lies on two ranks")
        by_rank = rows_by_rank(manifest)
        if len(by_rank) != fact.world_size or sum(by_rank) != len(rows):
            what = f"step {fact.step} was dealt to {fact.world_size} ranks as {by_rank} rows"
            yield self._dealt_wrongly(position, f"{what}, it has {len(rows)}")
        self.steps[fact.step] = replace(
            leased, digest=fact.digest, count=len(rows), rows=packed(np.sort(rows)), by_rank=by_rank
        )

    def _dealt_wrongly(self, position: int, what: str) -> Problem:
        return Problem("manifests", self._place(position), what)

    def assembled(self, fact: RanksAssembled) -> None:
        """Take in a ``RanksAssembled``."""
        self._ranks[fact.token] = len(fact.joins) + 1

    def committed(self, position: int, fact: StepsCommitted) -> Iterator[Problem]:
        """Take in a ``StepsCommitted``."""
        place = self._place(position)
        yield from self._rows_taken(place, fact)
        for step, digest in zip(fact.steps, fact.manifests, strict=True):
            leased = self.steps.get(step)
            if leased is None:
                yield Problem("commits", place, f"step {step} was committed and never leased")
            elif leased.digest != digest:
                what = f"step {step} was committed with the manifest {digest.hex()}"
                yield Problem("commits", place, f"{what}, leased was {leased.digest.hex()}")
            if step in self.live:
                self.twice.append((step, digest))
                yield Problem("commits", place, f"step {step} was committed before")
            elif step != len(self.live) + 1:
                what = f"step {step} was committed, the next one is {len(self.live) + 1}"
                yield Problem("commits", place, what)
            # the same bytes as above, which are there already
            digest = digest if leased is None or leased.digest != digest else leased.digest
            self.live[step] = digest
            before = self._links.get(step - 1, FIRST_LINK)
            self._links[step] = chain(before, digest)
            self._before[self._links[step]] = (before, digest)
        last = fact.steps[-1]
        if self._links[last] != fact.chain:
            yield Problem("commits", place, f"the chain of manifests up to step {last} is another")
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

    def _rows_taken(self, place: str, fact: StepsCommitted) -> Iterator[Problem]:
        """Yield the steps of a commit of which the ranks did not take what they were dealt."""
        ranks = self._ranks.get(fact.token, 1)
        for index, step in enumerate(fact.steps):
            leased = self.steps.get(step)
            if leased is None:
                continue
            if fact.rows_by_rank:
                taken, dealt = list(fact.rows_by_rank[index]), list(leased.by_rank)
                if taken != dealt:
                    what = f"step {step}: its ranks took {taken} rows, they were dealt {dealt}"
                    yield Problem("commits", place, what)
            elif len(leased.by_rank) != ranks:  # of a version that did not count
                what = f"step {step} was dealt to {len(leased.by_rank)} ranks as {leased.by_rank}"
                yield Problem("commits", place, f"{what} rows, and trained by {ranks}")

    def measured(self, position: int, fact: StepMeasured) -> Iterator[Problem]:
        """Take in a ``StepMeasured``: of a step that is committed, with as many rows."""
        leased = self.steps.get(fact.step)
        if leased is None or fact.step not in self.live:
            what = f"step {fact.step} was measured and is not committed"
            yield Problem("commits", self._place(position), what)
        elif fact.rows != leased.count:
            what = f"{fact.rows} rows of step {fact.step} were measured, it has {leased.count}"
            yield Problem("commits", self._place(position), what)

    def rewound(self, position: int, fact: TrainerRewound) -> Iterator[Problem]:
        """Take in a ``TrainerRewound``."""
        last = fact.step
        if last and last not in self.live:
            what = f"it goes back to step {last}, which was not committed"
            yield Problem("commits", self._place(position), what)
        self.live = {step: digest for step, digest in self.live.items() if step <= last}

    def rejected(self, position: int, fact: ExperiencesRejected) -> None:
        """Take in an ``ExperiencesRejected`` of the trainer itself."""
        self._rejected.append((position, np.array(fact.experiences, np.int64)))

    def finish(self) -> Iterator[Problem]:
        """Yield what only the whole log tells: a row is handed out once, or rejected once."""
        yield from self._neither()
        all_rows = together(rows for _, rows in self._given())
        all_rows.sort()
        again, before = repeated(all_rows), dict[int, int]()
        for position, rows in sorted(self._given(), key=itemgetter(0)) if again else ():
            for row in rows[np.isin(rows, again)].tolist():
                if row in before:
                    address = written_as(row % _OTHER_EXPERIMENT)
                    what = f"annotation {address} was given out at position {before[row]} before"
                    yield Problem("conservation", self._place(position), what)
                before[row] = position

    def _given(self) -> Iterator[tuple[int, Integers]]:
        """Yield where rows were given out, and which: those of steps, and what was rejected."""
        yield from ((leased.position, unpacked(leased.rows)) for leased in self.steps.values())
        yield from self._rejected

    def _neither(self) -> Iterator[Problem]:
        """Yield the rows that a step lost and the trainer did not reject."""
        rejected = [rows for _, rows in self._rejected]
        known = np.concatenate([*rejected, np.empty(0, np.int64)])
        for position, lost in self._dropped:
            for row in lost[~np.isin(lost, known)].tolist():
                what = f"annotation {written_as(row)} was taken out of its step and not rejected"
                yield Problem("conservation", self._place(position), what)

    def _number_of(self, source: str) -> int:
        return self._sources.setdefault(source, len(self._sources))

    def _place(self, position: int) -> str:
        return f"position {position} (trainer {self.name!r})"


def _splits_groups(manifest: BatchLeased) -> bool:
    """Return whether a group lies on several ranks."""
    rank_of: dict[int, int] = {}
    return any(
        rank_of.setdefault(group, plan.rank) != plan.rank
        for plan in plans_of(manifest)
        for group in manifest.groups[plan.start : plan.stop]
    )
