"""Which rows a gradient step takes: whole groups, the oldest first, of one experiment or of two."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from trinity_buffer.errors import TrainingError
from trinity_buffer.events import ExperiencesRejected
from trinity_buffer.pipeline import diagnosis
from trinity_buffer.pipeline.events import new_event
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.pipeline.loading import EventCache
from trinity_buffer.pipeline.rejection_watch import RejectionWatch
from trinity_buffer.pipeline.streaming.manifest import Manifest, plan_microbatches
from trinity_buffer.pipeline.streaming.ready_groups import ReadyGroup, ReadyGroups
from trinity_buffer.pipeline.streaming.row_loader import LoadedRows
from trinity_buffer.pipeline.streaming.stream_options import StreamOptions
from trinity_buffer.pipeline.streaming.trainer_lease import TrainerLease
from trinity_buffer.store import queries
from trinity_buffer.store.trainer_queries import Reader
from trinity_buffer.store.transaction import Session, Transaction

RECORDED = "recorded"
"""Name of the set that ``strategy=None`` reads: whole groups, nothing computed."""


class StepSource:
    """Takes the rows of one step after another; what cannot be trained is rejected with a reason.

    Args:
        experiment: the trainer's own.
        options: of the stream.
        annotation_set: the set that is trained on.
        lease: of the trainer.
        rows: what the log of the trainer's experiment says.
        expert: the experiment of the expert's rows, if the stream mixes.
        watch: hears of what is rejected before anybody looks at it.
    """

    def __init__(
        self,
        experiment: Experiment,
        options: StreamOptions,
        annotation_set: str,
        lease: TrainerLease,
        rows: EventCache,
        expert: Experiment | None = None,
        *,
        watch: RejectionWatch,
    ) -> None:
        self._watch = watch
        self._num_ready: list[int] = []
        self._experiments = [experiment, *([] if expert is None else [expert])]
        self._options = options
        self._set = annotation_set
        self._lease = lease
        self._sampling = options.sampling()
        self._readers = [Reader(experiment.key, options.consumer, "", options.consumer)]
        self._ready = [ReadyGroups(annotation_set, self._readers[0], rows, 0)]
        if expert is not None:
            known_as = f"{experiment.name}/{options.consumer}"
            reader = Reader(experiment.key, options.consumer, expert.name, known_as)
            others = EventCache(expert.key, expert.name)
            self._readers.append(reader)
            self._ready.append(ReadyGroups(RECORDED, reader, others, 1))

    def start(self, tx: Transaction) -> None:
        """Find the place behind everything that was handed out before."""
        for ready in self._ready:
            ready.start(tx)

    def waiting_for(self, tx: Transaction) -> str:
        """Return what the next step lacks, and who would bring it."""
        options, key = self._options, self._experiments[0].key
        plan = self._sampling.plan(1, options.groups_per_step)
        if self._lacks_expert and self._num_ready[0] >= plan.usual:
            return (
                f"{diagnosis.counted(plan.expert, 'group')} of the expert's experiment "
                f"{options.expert_experiment!r} ({self._num_ready[1]} ready): whoever records "
                "solutions there would bring them"
            )
        ready = " and ".join(map(str, self._num_ready))
        expert = "" if len(self._ready) == 1 else " and of its expert's"
        return (
            f"{diagnosis.counted(options.groups_per_step, 'group')} of set {self._set!r}{expert} "
            f"({ready} ready): "
            f"{diagnosis.of_trainer(tx, key, self._set)}"
        )

    def left(self, tx: Transaction) -> str:
        """Return what of the set nobody has decided, and why; "" if nothing."""
        return diagnosis.left_of(tx, self._experiments[0].key, self._set)

    def found(self, tx: Transaction) -> str:
        """Return what became of the rows of the set, where none is left."""
        return diagnosis.found_of(tx, self._experiments[0].key, self._options.consumer)

    def take(self, s: Session, step: int, *, partial_ok: bool) -> list[ReadyGroup] | None:
        """Return the groups of ``step``, None if there are too few; fewer only if ``partial_ok``.

        A last, smaller step mixes in no more of the expert's groups than a whole one would.
        """
        plan = self._sampling.plan(step, self._options.groups_per_step)
        wanted = [plan.usual, plan.expert][: len(self._ready)]
        here = [
            self._fill(s, source, number, plan.min_policy_version)
            for source, number in enumerate(wanted)
        ]
        self._num_ready = here
        whole = all(count >= number for count, number in zip(here, wanted, strict=True))
        driving = 0 if plan.usual else len(wanted) - 1
        if not whole and not (partial_ok and min(here[driving], wanted[driving])):
            return None
        popped = (ready.pop(number) for ready, number in zip(self._ready, wanted, strict=True))
        return self._without_oversize(s, list(chain.from_iterable(popped)))

    @property
    def _lacks_expert(self) -> bool:
        """Whether `take` had too few of the expert's groups."""
        wanted = self._sampling.plan(1, self._options.groups_per_step).expert
        return len(self._num_ready) > 1 and self._num_ready[1] < wanted

    def require_expert(self) -> None:
        """Return if the expert's experiment, to which nothing more comes, has enough for a step.

        Raises:
            TrainingError: it has not; asked after `take` had too few.
        """
        if self._lacks_expert:
            wanted = self._sampling.plan(1, self._options.groups_per_step).expert
            raise TrainingError(
                f"trainer {self._options.consumer!r}: the expert's experiment "
                f"{self._options.expert_experiment!r} is finished and has {self._num_ready[1]} "
                f"groups left, where each step takes {wanted}: record more solutions in another "
                "experiment and name it with expert_experiment="
            )

    def reject(
        self, s: Session, gone: Sequence[ReadyGroup], reason: str, left: Iterable[ReadyGroup]
    ) -> None:
        """Record that the rows of ``gone`` are not trained.

        Args:
            left: what is trained of the same groups all the same.
        """
        trained = {group.key for group in left}
        for source, reader in enumerate(self._readers):
            groups = [group for group in gone if group.source == source]
            rows = list(chain.from_iterable(group.annotations for group in groups))
            if not rows:
                continue
            whole = [one for one in groups if one.planned and one.key not in trained]
            rejected = ExperiencesRejected(
                consumer=reader.rejecting,
                by="trainer",
                experiences=rows,
                reasons=[reason] * len(rows),
                planned_groups=len(whole) if source == 0 else 0,
            )
            event = new_event(rejected)
            key = self._experiments[source].key
            s.write(self._lease.append, [event], experiment=key)

    def _fill(self, s: Session, source: int, number: int, min_version: int) -> int:
        """Have ``number`` groups of a source ready, none too old; return how many there are."""

        def stale(group: ReadyGroup) -> bool:
            versions = group.policy_versions
            return any(version is not None and version < min_version for version in versions)

        ready = self._ready[source]
        while True:
            here = ready.fill(s, number)
            gone = ready.pop_unwanted(stale) if source == 0 and min_version > 0 else []
            if not gone:
                return here
            self.reject(s, gone, "stale", [])
            self._say(s, gone, "stale")

    def _without_oversize(self, s: Session, taken: list[ReadyGroup]) -> list[ReadyGroup]:
        limit = self._options.max_tokens
        if limit is None or all(max(group.lengths) <= limit for group in taken):
            return taken
        kept, large = parted(taken, lambda group: [size <= limit for size in group.lengths])
        self.reject(s, large, "oversize", kept)
        if not kept:
            self._say(s, large, "oversize")
        return kept

    def _say(self, s: Session, gone: Sequence[ReadyGroup], reason: str) -> None:
        """Tell the watch of groups of which nothing is left."""
        key = self._experiments[gone[0].source].key

        def uid() -> str:
            (row,) = s.read(queries.experience_rows, key, [gone[0].experiences[0]])
            return row.eid.uid

        self._watch.rejected(len(gone), {reason}, uid)


def parted(
    groups: Sequence[ReadyGroup], fits: Callable[[ReadyGroup], Sequence[bool]]
) -> tuple[list[ReadyGroup], list[ReadyGroup]]:
    """Return the groups with the rows that fit, and with the others; without those of no rows."""
    kept, gone = [], []
    for group in groups:
        which = fits(group)
        kept.append(group.only(which))
        gone.append(group.only([not one for one in which]))
    return [one for one in kept if one.annotations], [one for one in gone if one.annotations]


def planned_manifest(
    step: int,
    annotation_set: str,
    taken: Sequence[ReadyGroup],
    options: StreamOptions,
    *,
    lengths: Sequence[int] | None = None,
) -> Manifest:
    """Return the manifest of a step.

    Args:
        step: its number.
        annotation_set: the set that is trained on.
        taken: its groups.
        options: of the stream.
        lengths: of stored pairs, one per row, see `plan_microbatches`; None: rows are single.
    """
    groups = [number for number, group in enumerate(taken) for _ in group.annotations]
    order, microbatches = plan_microbatches(
        _joined(group.lengths for group in taken) if lengths is None else lengths,
        groups,
        layout=options.layout,
        tokens_per_microbatch=options.tokens_per_microbatch,
        world_size=options.world_size,
        pairs=lengths is not None,
    )

    in_order = order == list(range(len(order)))

    def placed(column: Sequence[int]) -> tuple[int, ...]:
        return tuple(column if in_order else [column[place] for place in order])

    mixes = options.expert_experiment is not None
    return Manifest(
        step=step,
        annotation_set=annotation_set,
        annotations=placed(_joined(group.annotations for group in taken)),
        experiences=placed(_joined(group.experiences for group in taken)),
        groups=placed(groups),
        num_planned_groups=sum(group.planned and group.source == 0 for group in taken),
        layout=options.layout,
        microbatches=tuple(microbatches),
        normalizer=None if options.max_tokens is None else float(options.max_tokens),
        sources=(options.expert_experiment,) if options.expert_experiment is not None else (),
        source=placed([taken[number].source for number in groups]) if mixes else (),
    )


def _joined(columns: Iterable[Sequence[int]]) -> list[int]:
    return list(chain.from_iterable(columns))


def rows_without(rows: LoadedRows, field: str, sources: Sequence[int]) -> list[int]:
    """Return the places of the rows of the trainer's own experiment that lack a stored column."""
    missing = rows.field(field).missing(len(rows.facts))
    return [place for place in missing if not (sources and sources[place])]
