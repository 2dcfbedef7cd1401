"""Selects the rows of a gradient step: whole groups, oldest first, of one or two experiments.

What cannot be trained is rejected with a reason, before the step is leased. The next groups take
the place of groups that are too old; of other rows the step is just smaller, if any row is left.

A step belongs to its rows, not to the ranks that existed when it was leased. A trainer that resumes
with another number of ranks repartitions uncommitted steps and records that: the rows, the groups,
their order within a group and the denominators stay the same, and so does the gradient.

Rows that became unreadable since the step was leased end the trainer by default. If it may drop
them, the same event removes them from the step, and the same transaction rejects them. So it does
with rows to drop by uid, and with rows above ``max_tokens``: otherwise a row that no memory holds
would come back for ever. The rest of their groups is trained: denominators count the remaining
rows, advantages stay.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, compress, pairwise
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from trinity_buffer import events
from trinity_buffer.codec.objects import new_event
from trinity_buffer.codec.segments import ANNOTATED
from trinity_buffer.errors import InvalidArgumentError, TrainingError
from trinity_buffer.limits import sizes
from trinity_buffer.pipeline import manifest as manifests
from trinity_buffer.pipeline.annotate.consumer import RECORDED
from trinity_buffer.pipeline.coordination import diagnosis, waiting
from trinity_buffer.pipeline.coordination.lease import TrainerLease
from trinity_buffer.pipeline.handle import ExperimentHandle
from trinity_buffer.pipeline.load.columns import UNREADABLE, Facts, LoadedRows, RowLoader
from trinity_buffer.pipeline.load.reading import EventCache, contiguous_ranges
from trinity_buffer.pipeline.train.collate import lacking_of
from trinity_buffer.pipeline.train.options import Dropped, StreamOptions
from trinity_buffer.store import trainer_queries
from trinity_buffer.store.rows import MAX_ROWS_PER_EVENT, StepRow, first_address
from trinity_buffer.store.trainer_queries import Reader, guest_name
from trinity_buffer.store.transaction import ReadSession, Session, Transaction
from trinity_buffer.writer import DROPPED, OVERSIZE, invalid

DROP_DAMAGED = (
    "let the trainer go on without these rows: damaged_rows='drop', or `trinity-buffer train "
    "--drop-damaged-rows`"
)
"""The remedy for a leased step with rows that can never be read."""

_logger = logging.getLogger(__name__)


class ReadyGroup(NamedTuple):
    """Rows of one group that are in no step yet; one entry per row in each column.

    Attributes:
        key: key of the group: (source, position, number in the event); source 0 is the trainer's
            experiment, 1 the expert's.
        planned: whether the trainer's own experiment planned the group (copies and imports are
            not planned).
        annotations, experiences: log addresses.
        policy_versions: versions of the weights that generated the rows, None if unknown.
    """

    key: tuple[int, int, int]
    planned: bool
    annotations: Sequence[int]
    experiences: Sequence[int]
    policy_versions: Sequence[int | None]


class ReadyGroups:
    """Returns whole groups of one annotation set in the order of their annotation.

    It may read ahead: the trainer's lease makes it the only reader of the set under this name.

    Args:
        annotation_set: name of the set.
        reader: name of the trainer.
        rows: loader of the rows of the experiment that is read.
        source: number of that experiment in the manifests.

    Attributes:
        reader: the trainer, as `trainer_queries` know it.
        experiment: key of the experiment that is read.
        groups: the buffered groups. Nothing puts back what is taken: an error before it is leased
            ends the stream, and the next one reads it again.
    """

    def __init__(self, annotation_set: str, reader: Reader, rows: EventCache, source: int) -> None:
        self.reader = reader
        self.experiment = rows.experiment
        self._set = annotation_set
        self._rows = rows
        self._source = source
        self.groups: deque[ReadyGroup] = deque()
        self._start = 0
        self._at_end = False  # whether the last read reached the end of the store
        self._asked = 0

    def start(self, tx: Transaction) -> None:
        """Continue after everything that was leased before.

        Groups are leased in the order of their addresses, so nothing below the last one is left.
        What is rejected ahead of its turn does not move the start; `_read` finds it spent.
        """
        self._start = trainer_queries.first_undelivered(tx, self.reader)

    @property
    def is_through(self) -> bool:
        """Whether the last `fill` fell short because the store had no more groups."""
        return self._at_end and len(self.groups) < self._asked

    def fill(self, s: ReadSession, number: int) -> int:
        """Read until ``number`` groups are buffered, or all; return the number of buffered ones."""
        self._asked = number
        while len(self.groups) < number and self._read(s):
            pass
        return len(self.groups)

    def pop_stale(self, min_version: int) -> list[ReadyGroup]:
        """Remove and return the buffered groups with rows of an older policy version."""
        fresh, stale = deque[ReadyGroup](), list[ReadyGroup]()
        for group in self.groups:
            versions = (version for version in group.policy_versions if version is not None)
            (stale if any(version < min_version for version in versions) else fresh).append(group)
        self.groups = fresh
        return stale

    def _read(self, s: ReadSession) -> bool:
        """Read the events with the next page of rows; return whether there were any."""
        positions, spent = s.read(
            trainer_queries.annotated_page,
            self.experiment,
            annotation_set=self._set,
            trainer=self.reader,
            start=self._start,
            limit=sizes.rows_per_page,
        )
        self._at_end = not positions
        if not positions:
            return False
        page, kind = self._rows.events(s, positions), events.ExperiencesAnnotated
        annotated = [event for event in map(page.get, positions) if isinstance(event, kind)]
        experiences = [at for event in annotated for at in event.experiences]
        ranges = contiguous_ranges(experiences)
        places = [(divmod(experiences[a], MAX_ROWS_PER_EVENT), z - a) for a, z in ranges]
        recorded = self._rows.events(s, {position for (position, _), _ in places})
        all_versions, num_before = list[int | None](), 0
        for (position, begin), number in places:
            of = recorded[position]
            assert isinstance(of, events.ExperiencesRecorded)  # no other kind has experiences
            all_versions += of.columns.policy_version[begin : begin + number]
        for position, event in zip(positions, annotated, strict=True):
            first = first_address(position)
            versions = all_versions[num_before : num_before + event.rows]
            num_before += event.rows
            # Rows of a group are adjacent in an event, so groups begin where the number changes.
            breaks = np.flatnonzero(np.diff(np.array(event.groups))) + 1
            for begin, end in pairwise([0, *breaks.tolist(), event.rows]):
                number, rows = event.groups[begin], slice(begin, end)
                addresses = range(first + begin, first + end)
                columns: list[Any] = [addresses, event.experiences[rows], versions[rows]]
                # Only the first page after a restart can begin in the middle of an event.
                if first + begin < self._start or spent:
                    stay = [at >= self._start and at not in spent for at in addresses]
                    columns = [list(compress(column, stay)) for column in columns]
                if columns[0]:
                    key, planned = (self._source, position, number), event.planned[number]
                    own = planned and not self._source
                    self.groups.append(ReadyGroup(key, own, *columns))
        # A short page is the last one, which saves a query that would return nothing.
        self._at_end = num_before < sizes.rows_per_page
        self._start = first_address(positions[-1] + 1)
        return True


class StepSampler:
    """Selects and loads the rows of each step before it is leased.

    Args:
        experiment: the trainer's own experiment.
        options: options of the stream.
        lease: lease of the trainer, which records rejections.
        loader: loads the trainer's rows.
        expert: the experiment of the expert's rows, if the stream mixes.

    Attributes:
        annotation_set: name of the set that it reads.
    """

    def __init__(
        self,
        experiment: ExperimentHandle,
        options: StreamOptions,
        lease: TrainerLease,
        loader: RowLoader,
        expert: ExperimentHandle | None = None,
    ) -> None:
        self._experiment = experiment
        self._options = options
        self._lease = lease
        self._loader = loader
        self._pairs = experiment.config.get("schema") == "dpo"
        most = experiment.config.get("max_rejected_steps", waiting.MAX_REJECTED_STEPS)
        who = f"trainer {options.consumer!r}"
        self._watch = waiting.RejectionWatch(who, options.groups_per_step, most)
        self._sampling = options.sampling()
        # Each step takes as many groups as the first; only the bound on staleness moves.
        self._plan = self._sampling.plan(1, options.groups_per_step)
        self.annotation_set = options.annotation_set
        self._num_ready: list[int] = []
        self._dropped: Dropped = {}
        # In its own log it rejects by its own name.
        reader = Reader(experiment.key, options.consumer, "", options.consumer)
        self._ready = [ReadyGroups(self.annotation_set, reader, loader.events, 0)]
        if expert is not None:
            # A trainer of another experiment may have the same name, so the expert's log gets a
            # qualified one.
            guest = guest_name(experiment.name, options.consumer)
            reader = Reader(experiment.key, options.consumer, expert.name, guest)
            rows = loader.others[expert.name] = EventCache(expert.key, expert.name)
            self._ready.append(ReadyGroups(RECORDED, reader, rows, 1))

    def start(self, s: Session, dropped: Dropped, steps: Sequence[StepRow]) -> list[StepRow]:
        """Continue after everything that was leased before; reject the ``dropped`` rows.

        Args:
            steps: the uncommitted steps, to be repartitioned over the ranks.

        Returns:
            These steps, as they are served now.

        Raises:
            LeaseLostError: another process took over.
            ArchivedSegmentError, CodecError, DamagedSegmentError: as `_sound_rows`.
        """
        self._dropped = dropped
        for row in steps:
            self._repartition(s, row)
        for ready in self._ready:
            s.read(ready.start)
        key, name = self._experiment.key, self._options.consumer
        after = steps[0].step - 1 if steps else 0
        return s.read(trainer_queries.steps, key, name, after=after) if steps else []

    def waiting_for(self, tx: Transaction) -> str:
        """Explain what the next step lacks, and which process would bring it."""
        options = self._options
        if self.lacks_expert and self._num_ready[0] >= self._plan.usual:
            return (
                f"{diagnosis.counted(self._plan.expert, 'group')} of the expert's experiment "
                f"{options.expert_experiment!r} ({self._num_ready[1]} ready): record more "
                "solutions there"
            )
        ready = " and ".join(map(str, self._num_ready))
        expert = "" if len(self._ready) == 1 else " and of its expert's"
        return (
            f"{diagnosis.counted(options.groups_per_step, 'group')} of set "
            f"{self.annotation_set!r}{expert} ({ready} ready): "
            f"{diagnosis.of_trainer(tx, self._experiment.key, self.annotation_set)}"
        )

    @property
    def lacks_expert(self) -> bool:
        """Whether the last step had too few of the expert's groups."""
        return len(self._num_ready) > 1 and self._num_ready[1] < self._plan.expert

    def require_expert(self) -> None:
        """Raise if the expert's experiment is finished and too small for a step.

        Call it after `take` had too few groups.

        Raises:
            TrainingError: the expert's experiment has too few groups.
        """
        if self.lacks_expert:
            raise TrainingError(
                f"trainer {self._options.consumer!r}: the expert's experiment "
                f"{self._options.expert_experiment!r} is finished and has {self._num_ready[1]} "
                f"groups left, where each step takes {self._plan.expert}: record more solutions in "
                "another experiment and name it with expert_experiment="
            )

    @property
    def is_through(self) -> bool:
        """Whether no further step is possible until more rows are committed."""
        return any(ready.is_through for ready in self._ready)

    # -- a new step
    # ------------------------------------------------------------------------------------------

    def take(
        self, s: Session, step: int, *, partial_ok: bool
    ) -> tuple[events.BatchLeased, LoadedRows] | None:
        """Return the manifest of ``step`` and its columns, or None if there are too few groups.

        Args:
            partial_ok: whether fewer groups suffice.

        Raises:
            TrainingError: no row of too many consecutive steps could be trained.
        """
        while True:
            if (groups := self._groups(s, step, partial_ok=partial_ok)) is None:
                return None
            # Called a lease here and below: a manifest that the caller is about to lease.
            lease, unfit = self._unplanned(step, groups), partial(self._unfit, s)
            # Places are rows of this lease as it was before anything is lost.
            lost, every = self._unwanted(s, lease), range(len(lease.groups))
            # Rejected rows are not replaced: the step gets smaller, or is selected anew if none is
            # left. It was never trained, so they are dropped whatever `damaged_rows` says.
            places, rows, lost = self._sound_rows(s, lease, every, lost, unfit, drops=True)
            left = sorted({lease.groups[place] for place in places})
            if lost:
                gone = sum(g.planned for number, g in enumerate(groups) if number not in left)
                self._reject(s, lease, lost, planned_groups=gone)
            if places:
                break
            if reasons := set(lost.values()) - {DROPPED}:
                self._watch.rejected(len(groups), reasons, partial(self._first_uid, s, lease))
        self._watch.accepted()
        options, numbers = self._options, [lease.groups[place] for place in places]
        order, microbatches = manifests.plan_microbatches(
            rows.planned_lengths(options.layout).tolist(),
            numbers,
            layout=options.layout,
            tokens_per_microbatch=options.tokens_per_microbatch,
            world_size=options.world_size,
            pairs=self._pairs,
        )
        # The rows of each rank lie together, and padded rows with a budget are sorted by length.
        if order != list(range(len(order))):
            rows = rows.reordered(order)
        if lost:  # number the groups without those that are gone
            renumbered = {number: new for new, number in enumerate(left)}
            planned = sum(groups[number].planned for number in left)
            # -1: of a row that is left out below.
            numbers = [renumbered.get(number, -1) for number in lease.groups]
            lease = replace(lease, groups=numbers, planned_groups=planned)
        return manifests.repartitioned(lease, [places[row] for row in order], microbatches), rows

    def _groups(self, s: Session, step: int, *, partial_ok: bool) -> list[ReadyGroup] | None:
        """Return the groups of ``step``, None if there are too few; fewer only if ``partial_ok``.

        A last, smaller step mixes in no more of the expert's groups than a whole one would.
        """
        plan = self._sampling.plan(step, self._options.groups_per_step)
        wanted = [plan.usual, plan.expert][: len(self._ready)]
        here = [ready.fill(s, number) for ready, number in zip(self._ready, wanted, strict=True)]
        # By the number of the step: step n begins with version n - 1, published or not. An expert's
        # rows have no policy version and never become stale.
        oldest = plan.min_policy_version
        while oldest > 0 and (stale := self._ready[0].pop_stale(oldest)):
            lease = self._unplanned(step, stale)
            why = dict.fromkeys(range(len(lease.groups)), "stale")
            self._reject(s, lease, why, planned_groups=lease.planned_groups)
            self._watch.rejected(len(stale), {"stale"}, partial(self._first_uid, s, lease))
            here[0] = self._ready[0].fill(s, wanted[0])
        self._num_ready = here
        whole = all(count >= number for count, number in zip(here, wanted, strict=True))
        # A smaller last step is driven by the trainer's own groups, or by the expert's if it takes
        # only those.
        driving = 0 if plan.usual else len(wanted) - 1
        if not whole and not (partial_ok and min(here[driving], wanted[driving])):
            return None
        takes = zip(self._ready, wanted, strict=True)
        return [of.groups.popleft() for of, most in takes for _ in range(min(most, len(of.groups)))]

    def _first_uid(self, s: ReadSession, lease: events.BatchLeased) -> str:
        return self._loader.uids(s, lease, [0])[0]

    def _unfit(self, s: ReadSession, lease: events.BatchLeased, rows: LoadedRows) -> dict[int, str]:
        """Return place -> reason, of rows that lack a column or have a misfit, and long pairs."""
        places = {name: lacking_of(name, lease, rows) for name in self._options.needs}
        if places.get("advantages"):
            (uid,) = self._loader.uids(s, lease, places["advantages"][:1])
            raise InvalidArgumentError(
                f"the annotation set {lease.annotation_set!r} has no advantages (for one, of "
                f"{uid}), which this algorithm trains on: run a strategy that computes them, such "
                "as 'grpo', and name its set with strategy="
            )
        # Annotations of other programs may have any shape, and a misfit would corrupt a whole
        # batch.
        tokens = rows.facts.length - rows.facts.prompt_length
        for name in () if self._pairs else ANNOTATED:
            if all(block.scaled for block in rows.fields[name].blocks):
                continue
            sizes = rows.fields[name].sizes()
            misfits = np.flatnonzero((sizes >= 0) & (sizes != tokens)).tolist()
            places[name] = [*places.get(name, ()), *misfits]
        lacking: dict[int, list[str]] = {}
        for name, wrong in places.items():
            for place in (place for place in wrong if not rows.expert[place]):
                lacking.setdefault(place, []).append(name)
        unfit = {place: invalid(*lacking[place]) for place in sorted(lacking)}
        return unfit | self._long_pairs(rows) if self._pairs else unfit

    def _unplanned(self, step: int, taken: Sequence[ReadyGroup]) -> events.BatchLeased:
        """Return the manifest of a step of the groups ``taken``, still without micro-batches."""
        options = self._options
        sources = [] if options.expert_experiment is None else [options.expert_experiment]
        groups = [number for number, group in enumerate(taken) for _ in group.annotations]
        return events.BatchLeased(
            sources=sources,
            source=[taken[number].key[0] for number in groups] if sources else [],
            consumer=options.consumer,
            token=self._lease.token,
            step=step,
            annotation_set=self.annotation_set,
            annotations=list(chain.from_iterable(group.annotations for group in taken)),
            experiences=list(chain.from_iterable(group.experiences for group in taken)),
            groups=groups,
            num_groups=len(taken),
            planned_groups=sum(group.planned for group in taken),
            layout=options.layout,
            microbatches=[],
            normalizer=None if options.max_tokens is None else float(options.max_tokens),
            digest=b"",
            by_run=True,
        )

    # -- steps that were leased before
    # ------------------------------------------------------------------------------------------

    def _repartition(self, s: Session, row: StepRow) -> None:
        """Record a new partition of an uncommitted step, if it has changed."""
        options, world_size = self._options, self._options.world_size
        leased = manifests.leased_step(s, self._experiment, row)
        first, drops = leased.first, options.damaged_rows == "drop"
        unwanted = self._unwanted(s, leased.manifest)
        leaving = {leased.order[place]: why for place, why in unwanted.items()}
        changes_ranks = len(manifests.rows_by_rank(leased.manifest)) != world_size
        measures = self._pairs and options.max_tokens is not None
        if not (leaving or drops or changes_ranks or measures):
            return

        def unfit(part: events.BatchLeased, rows: LoadedRows) -> dict[int, str]:
            why = self._long_pairs(rows) if self._pairs else {}
            # A run may have lost the row that carried its reward.
            if len(part.groups) < len(leased.order) and "reward" in options.needs:
                why |= dict.fromkeys(lacking_of("reward", part, rows), invalid("reward"))
            return why

        served = sorted(leased.order)
        places, rows, lost = self._sound_rows(s, first, served, leaving, unfit, drops=drops)
        if not (lost or changes_ranks):
            return
        # Rows keep their groups and their order within a group; groups are dealt anew to the ranks.
        order, plans = plan_again(world_size, first, rows, places)
        manifest, sources = manifests.repartitioned(first, order, plans), ["", *first.sources]
        lost_from = [sources[first.source[place]] if first.source else "" for place in sorted(lost)]
        dealt = events.StepDealt(
            consumer=options.consumer,
            token=self._lease.token,
            step=first.step,
            leased_at=leased.position,
            world_size=world_size,
            order=order,
            microbatches=manifest.microbatches,
            digest=manifest.digest,
            dropped=[first.annotations[place] for place in sorted(lost)],
            dropped_from=lost_from if any(lost_from) else [],
            num_groups=manifest.num_groups if lost else None,
        )
        # Planned groups were counted when the step was leased.
        self._reject(s, first, lost, also=[new_event(dealt)])
        if lost:
            _logger.warning(
                "trainer %r drops %s of step %d (%s): %s",
                options.consumer,
                diagnosis.counted(len(lost), "row"),
                first.step,
                ", ".join(sorted(set(lost.values()))),
                waiting.one_line(self._loader.named(s, first, lost)),
            )

    # -- rows that cannot be trained
    # ------------------------------------------------------------------------------------------

    def _sound_rows(
        self,
        s: ReadSession,
        lease: events.BatchLeased,
        places: Sequence[int],
        lost: Mapping[int, str],
        unfit: Callable[[events.BatchLeased, LoadedRows], Mapping[int, str]],
        *,
        drops: bool,
    ) -> tuple[list[int], LoadedRows, dict[int, str]]:
        """Load the rows of a step that can be trained.

        Args:
            lease: the manifest of the step; rows are named by their places in it.
            places: the rows to load, in order.
            lost: row -> why, of those to leave out.
            unfit: returns row -> why, of those that cannot be trained, by their places in the
                manifest that it is passed.
            drops: whether rows that can never be read may be left out too.

        Returns:
            The rows that stay, their columns, and row -> why of all others.

        Raises:
            ArchivedSegmentError, CodecError, DamagedSegmentError: unreadable rows; the message
                names the step, some of the rows, and the remedies.
        """
        left, gone = [*places], dict(lost)
        while True:  # each round loses at least one row
            left = [place for place in left if place not in gone]
            whole = len(left) == len(lease.groups)
            part = lease if whole else manifests.repartitioned(lease, left, lease.microbatches)
            try:
                rows = self._loader.load(s, part)
                if not (why := unfit(part, rows)):
                    return left, rows, gone
            except UNREADABLE as error:
                # An archive that is only unavailable at the moment must not lead to rejections.
                why = self._loader.unreadable(s, part)
                if not (drops and why):
                    raise self._loader.refusal(s, part, error, DROP_DAMAGED) from error
            gone |= {left[place]: reason for place, reason in why.items()}

    def _unwanted(self, s: ReadSession, lease: events.BatchLeased) -> dict[int, str]:
        """Return place -> why, of the rows of a step that are too long or dropped by name."""
        limit, why = self._options.max_tokens, dict[int, str]()
        if limit is not None:
            # Of a pair, events know one half alone.
            own, _ = self._loader.ranges(s, lease)
            lengths = Facts.of(len(lease.groups), own).length.tolist()
            why = {place: OVERSIZE for place, size in enumerate(lengths) if size > limit}
        if any(self._dropped.values()):
            names, source = ("", *lease.sources), lease.source or [0] * len(lease.groups)
            for place, (of, address) in enumerate(zip(source, lease.experiences, strict=True)):
                if address in self._dropped.get(names[of], ()):
                    why[place] = DROPPED
        return why

    def _long_pairs(self, rows: LoadedRows) -> dict[int, str]:
        """Return place -> why, of pairs with a half that is too long.

        Events know only the prompt of a pair. The halves of an expert's pairs are not measured.
        """
        if (limit := self._options.max_tokens) is None:
            return {}
        long = rows.expert < (rows.planned_lengths("padded") > limit)
        return dict.fromkeys(np.flatnonzero(long).tolist(), OVERSIZE)

    def _reject(
        self,
        s: Session,
        lease: events.BatchLeased,
        why: Mapping[int, str],
        *,
        planned_groups: int = 0,
        also: Sequence[events.NewEvent] = (),
    ) -> None:
        """Record in one transaction that rows of a step are rejected, and the events ``also``.

        It commits at once, before the step is leased or dealt anew: after a crash in between, these
        rows stay rejected, and the step is selected anew from all others.

        Args:
            lease: the manifest of the step.
            why: place -> reason, of the rejected rows.
            planned_groups: number of planned groups that lose their last row.
        """
        source, own = lease.source or [0] * len(lease.groups), self._experiment
        rejected: dict[int, list[events.NewEvent]] = {}  # by experiment
        # Others' experiments first: their append locks both, in ascending order.
        for number in sorted({source[place] for place in why}, reverse=True):
            places = [place for place in sorted(why) if source[place] == number]
            key, consumer = own.key, self._options.consumer
            if number:
                key = self._loader.cache_of(s, lease, number).experiment
                consumer = guest_name(own.name, consumer)
            fact = events.ExperiencesRejected(
                consumer=consumer,
                by="trainer",
                experiences=[lease.annotations[place] for place in places],
                reasons=[why[place] for place in places],
                planned_groups=0 if number else planned_groups,
            )
            rejected[key] = [new_event(fact)]
        if also:
            rejected.setdefault(own.key, []).extend(also)

        def append(tx: Transaction) -> None:
            for key, of_experiment in rejected.items():
                self._lease.append(tx, of_experiment, experiment=key)

        s.write(append)


def plan_again(
    world_size: int, first: events.BatchLeased, rows: LoadedRows, readable: Sequence[int]
) -> tuple[list[int], list[manifests.MicroBatchPlan]]:
    """Return an order of a manifest's rows, and micro-batches over it for ``world_size`` ranks.

    No micro-batch computes more than the largest recorded one, counted without lost rows: a lost
    row may have exceeded the budget.

    Args:
        world_size: number of ranks.
        first: the manifest.
        rows: columns of the readable rows.
        readable: places of these rows in the manifest, in order.
    """
    places, plans = [*readable], manifests.plans_of(first)
    if len(manifests.rows_by_rank(first)) == world_size and len(places) == len(first.groups):
        return places, plans
    padded, pairs = first.layout == "padded", bool(rows.fields["chosen"].blocks)
    lengths = rows.planned_lengths(first.layout).tolist()
    length_at, largest = dict(zip(places, lengths, strict=True)), 1
    for plan in plans:
        own_lengths = [length_at[row] for row in range(plan.start, plan.stop) if row in length_at]
        height = len(own_lengths) * (2 if pairs else 1)
        largest = max(largest, height * max(own_lengths, default=0) if padded else sum(own_lengths))
    order, plans = manifests.plan_microbatches(
        lengths,
        [first.groups[place] for place in places],
        layout="padded" if padded else "packed",
        tokens_per_microbatch=largest,
        world_size=world_size,
        pairs=pairs,
        by_length=False,  # the order within a group is part of the gradient
    )
    return [places[row] for row in order], plans
