"""Recorded manifests, and how one is dealt to another number of ranks.

A step belongs to its rows and not to the ranks that were there when it was leased. Whoever resumes
with another number of them deals what is not committed anew, and records it: the rows, the groups,
their order within a group and the denominators stay, so that the gradient does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trinity_buffer.events import BatchLeased, StepDealt
from trinity_buffer.pipeline.events import decoded, fact_at, new_event
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.pipeline.streaming.collate import row_lengths
from trinity_buffer.pipeline.streaming.manifest import (
    Manifest,
    MicroBatchPlan,
    plan_microbatches,
    plans_of,
)
from trinity_buffer.pipeline.streaming.row_loader import LoadedRows, RowLoader
from trinity_buffer.pipeline.streaming.trainer_lease import TrainerLease
from trinity_buffer.store import log, trainer_queries
from trinity_buffer.store.rows import StepRow
from trinity_buffer.store.transaction import ReadSession, Session


class LeasedStep(NamedTuple):
    """A step as the log holds it: where it was leased, its first manifest, and how it is served.

    ``log_head`` is of the event that says how.
    """

    leased_at: int
    first: Manifest
    manifest: Manifest
    log_head: bytes | None


def leased_step(s: ReadSession, experiment: Experiment, row: StepRow) -> LeasedStep:
    """Return the manifest of a step that was handed out.

    Raises:
        CodecError: the body of its event is damaged.
    """
    (stored,) = s.read(log.read_at, experiment.key, [row.leased_at])
    dealt, head = decoded(experiment.name, stored).fact, stored.head
    if not isinstance(dealt, StepDealt):
        first = Manifest.of(fact_at(experiment.name, stored, BatchLeased))
        return LeasedStep(row.leased_at, first, first, head)
    (stored,) = s.read(log.read_at, experiment.key, [dealt.leased_at])
    first = Manifest.of(fact_at(experiment.name, stored, BatchLeased))
    return LeasedStep(dealt.leased_at, first, first.dealt(dealt.order, plans_of(dealt)), head)


def dealt_to(
    world_size: int, first: Manifest, rows: LoadedRows
) -> tuple[list[int], list[MicroBatchPlan]]:
    """Return an order of the rows of a manifest, and micro-batches over it for so many ranks.

    No micro-batch computes more than the largest one that was recorded.
    """
    if first.world_size == world_size:
        return [*range(len(first.groups))], [*first.microbatches]
    pairs = bool(rows.field("chosen").blocks)
    padded = first.layout == "padded"
    height = 2 if pairs else 1
    sizes = [
        height * (plan.stop - plan.start) * plan.width if padded else plan.width
        for plan in first.microbatches
    ]
    return plan_microbatches(
        row_lengths(first, rows) if pairs else rows.facts.lengths,
        first.groups,
        layout=first.layout,
        tokens_per_microbatch=max(*sizes, 1),
        world_size=world_size,
        pairs=pairs,
        by_length=False,  # rows of a group stay in their order
    )


class Dealer:
    """Deals the steps that a trainer has not committed to the ranks that are there now.

    Args:
        experiment: the trainer's own.
        lease: of the trainer.
        loader: of its rows.
        world_size: how many ranks there are.
    """

    def __init__(
        self, experiment: Experiment, lease: TrainerLease, loader: RowLoader, world_size: int
    ) -> None:
        self._experiment = experiment
        self._lease = lease
        self._loader = loader
        self._world_size = world_size

    async def dealt(self, steps: Sequence[StepRow]) -> list[StepRow]:
        """Return ``steps``, each dealt to the ranks that there are; record how, where it is new.

        Raises:
            LeaseLostError: another process took over.
        """
        if not steps:
            return []
        database, name = self._experiment.database, self._lease.consumer
        await database.session(lambda s: self._deal(s, steps))
        after = steps[0].step - 1
        return await database.read(trainer_queries.steps, self._experiment.key, name, after=after)

    def _deal(self, s: Session, steps: Sequence[StepRow]) -> None:
        for row in steps:
            found = leased_step(s, self._experiment, row)
            if found.manifest.world_size != self._world_size:
                rows = self._loader.load(s, found.first)
                order, plans = s.compute(dealt_to, self._world_size, found.first, rows)
                s.write(self._lease.append, [new_event(self._dealt(found, order, plans))])

    def _dealt(
        self, found: LeasedStep, order: list[int], plans: Sequence[MicroBatchPlan]
    ) -> StepDealt:
        return StepDealt(
            consumer=self._lease.consumer,
            token=self._lease.token,
            step=found.first.step,
            leased_at=found.leased_at,
            world_size=self._world_size,
            order=order,
            microbatches=[[m.start, m.stop, m.width, m.rank] for m in plans],
            digest=found.first.dealt(order, plans).digest,
        )
