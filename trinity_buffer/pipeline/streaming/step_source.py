"""Which rows a gradient step takes: whole groups, the oldest first, of one experiment or of two."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from trinity_buffer.pipeline.events import new_event, now_us
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.pipeline.streaming.manifest import Manifest, plan_microbatches
from trinity_buffer.pipeline.streaming.ready_groups import ReadyGroups
from trinity_buffer.pipeline.streaming.row_loader import LoadedRows
from trinity_buffer.pipeline.streaming.stream_options import StreamOptions
from trinity_buffer.pipeline.streaming.trainer_lease import TrainerLease
from trinity_buffer.store import leases, log
from trinity_buffer.store.address import SLOT_BITS, position_of
from trinity_buffer.store.log import NewEvent
from trinity_buffer.store.trainer_queries import Reader, ReadyRow
from trinity_buffer.store.transaction import Transaction

RECORDED = "recorded"
"""Name of the set that ``strategy=None`` reads: whole groups, nothing computed."""


class TakenRow(NamedTuple):
    """A row on its way into a step; ``source`` 0 is the trainer's experiment, 1 the expert's."""

    row: ReadyRow
    source: int

    @property
    def group(self) -> tuple[int, int, int]:
        """What the rows of one group share."""
        return self.source, position_of(self.row.address), self.row.group_slot


class StepSource:
    """Takes the rows of one step after another; what cannot be trained is rejected with a reason.

    Args:
        experiment: the trainer's own.
        options: of the stream.
        annotation_set: the set that is trained on.
        lease: of the trainer.
        expert: the experiment of the expert's rows, if the stream mixes.
    """

    def __init__(
        self,
        experiment: Experiment,
        options: StreamOptions,
        annotation_set: str,
        lease: TrainerLease,
        expert: Experiment | None = None,
    ) -> None:
        self._experiments = [experiment, *([] if expert is None else [expert])]
        self._database = experiment.database
        self._options = options
        self._lease = lease
        self._sampling = options.sampling()
        self._readers = [Reader(experiment.key, options.consumer, "", options.consumer)]
        sets = [annotation_set]
        if expert is not None:
            known_as = f"{experiment.name}/{options.consumer}"
            self._readers.append(Reader(experiment.key, options.consumer, expert.name, known_as))
            sets.append(RECORDED)
        self._ready = [
            ReadyGroups(self._database, of.key, name, reader)
            for of, name, reader in zip(self._experiments, sets, self._readers, strict=True)
        ]

    async def start(self) -> None:
        """Find the place behind everything that was handed out before."""
        for ready in self._ready:
            await ready.start()

    async def take(self, step: int, *, partial_ok: bool) -> list[TakenRow] | None:
        """Return the rows of ``step``, None if there are too few; fewer only if ``partial_ok``.

        A last, smaller step mixes in no more of the expert's groups than a whole one would.
        """
        plan = self._sampling.plan(step, self._options.groups_per_step)
        wanted = [plan.usual, plan.expert][: len(self._ready)]
        here = [
            await self._fill(source, number, plan.min_policy_version)
            for source, number in enumerate(wanted)
        ]
        whole = all(count >= number for count, number in zip(here, wanted, strict=True))
        driving = 0 if plan.usual else len(wanted) - 1
        if not whole and not (partial_ok and min(here[driving], wanted[driving])):
            return None
        if sum(map(min, here, wanted)) < self._options.world_size:
            return None
        taken = [
            TakenRow(row, source)
            for source, number in enumerate(wanted)
            for row in self._ready[source].pop(number)
        ]
        return await self._without_oversize(taken)

    async def reject(
        self, taken: Sequence[TakenRow], reason: str, left: Sequence[TakenRow]
    ) -> None:
        """Record that the rows ``taken`` are not trained.

        Args:
            left: rows of the same groups that are trained all the same.
        """
        groups = {one.group for one in left}
        for source, reader in enumerate(self._readers):
            rows = [one for one in taken if one.source == source]
            if not rows:
                continue
            gone = {one.group for one in rows if one.row.planned and source == 0} - groups
            body = {
                "consumer": reader.rejecting,
                "by": "trainer",
                "experiences": [one.row.address for one in rows],
                "reasons": [reason] * len(rows),
                "planned_groups": len(gone),
            }
            event = new_event("ExperiencesRejected", body)
            await self._database.write(
                partial(self._append, experiment=self._experiments[source].key, event=event)
            )

    async def _append(self, tx: Transaction, *, experiment: int, event: NewEvent) -> None:
        key, name = self._experiments[0].key, self._options.consumer
        await leases.require(tx, key, name, token=self._lease.token)
        await log.append(tx, experiment, [event], actor=name, now_us=now_us())

    async def _fill(self, source: int, number: int, min_version: int) -> int:
        """Have ``number`` groups of a source ready, none too old; return how many there are."""

        def stale(group: list[ReadyRow]) -> bool:
            versions = [row.policy_version for row in group if row.policy_version is not None]
            return any(version < min_version for version in versions)

        ready = self._ready[source]
        while True:
            here = await ready.fill(number)
            gone = ready.pop_unwanted(stale) if source == 0 and min_version > 0 else []
            if not gone:
                return here
            await self.reject([TakenRow(row, source) for row in gone], "stale", [])

    async def _without_oversize(self, taken: list[TakenRow]) -> list[TakenRow]:
        limit = self._options.max_tokens
        large = [one for one in taken if limit is not None and one.row.length > limit]
        if not large:
            return taken
        kept = [one for one in taken if one not in large]
        await self.reject(large, "oversize", kept)
        return kept


def planned_manifest(
    step: int,
    annotation_set: str,
    taken: Sequence[TakenRow],
    options: StreamOptions,
    *,
    lengths: Sequence[int] | None = None,
) -> Manifest:
    """Return the manifest of a step.

    Args:
        step: its number.
        annotation_set: the set that is trained on.
        taken: its rows.
        options: of the stream.
        lengths: of stored pairs, one per row, see `plan_microbatches`; None: rows are single.
    """
    numbers: dict[tuple[int, int, int], int] = {}
    planned: set[int] = set()
    groups = []
    for row, source in taken:
        of = (source, row.address >> SLOT_BITS, row.group_slot)
        number = numbers.setdefault(of, len(numbers))
        groups.append(number)
        if row.planned and source == 0:
            planned.add(number)
    order, microbatches = plan_microbatches(
        [row.length for row, _ in taken] if lengths is None else lengths,
        groups,
        layout=options.layout,
        tokens_per_microbatch=options.tokens_per_microbatch,
        world_size=options.world_size,
        pairs=lengths is not None,
    )
    rows = [taken[place].row for place in order]
    mixes = options.expert_experiment is not None
    return Manifest(
        step=step,
        annotation_set=annotation_set,
        annotations=tuple([row.address for row in rows]),
        experiences=tuple([row.experience for row in rows]),
        groups=tuple([groups[place] for place in order]),
        num_planned_groups=len(planned),
        layout=options.layout,
        microbatches=tuple(microbatches),
        normalizer=None if options.max_tokens is None else float(options.max_tokens),
        sources=(options.expert_experiment,) if options.expert_experiment is not None else (),
        source=tuple([taken[place].source for place in order]) if mixes else (),
    )


def rows_without(rows: LoadedRows, field: str, sources: Sequence[int]) -> list[int]:
    """Return the places of the rows of the trainer's own experiment that lack a stored column."""
    missing = rows.field(field).missing(len(rows.meta))
    return [place for place in missing if not (sources and sources[place])]
