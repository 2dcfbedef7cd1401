"""What a trainer goes through once before its first step: one from a store in memory."""

from __future__ import annotations

from functools import cache

from trinity_buffer.events import StepsCommitted
from trinity_buffer.pipeline.annotating.rehearsal import decided
from trinity_buffer.pipeline.background import settle_imports
from trinity_buffer.pipeline.environment import environment_of_run
from trinity_buffer.pipeline.events import new_event
from trinity_buffer.pipeline.experiment_handle import ExperimentHandle
from trinity_buffer.pipeline.lease_holders import TTL_S
from trinity_buffer.pipeline.loading.event_cache import EventCache
from trinity_buffer.pipeline.loading.row_loader import RowLoader
from trinity_buffer.pipeline.proof.manifest import LayoutName
from trinity_buffer.pipeline.streaming.step_sampler import StepSampler
from trinity_buffer.pipeline.streaming.stream_options import StreamOptions
from trinity_buffer.pipeline.streaming.train_step import StepMaker
from trinity_buffer.pipeline.streaming.trainer_lease import TrainerLease
from trinity_buffer.pipeline.writing.rehearsal import NAME
from trinity_buffer.store.scratch import Scratch, scratch
from trinity_buffer.store.transaction import compile_for


@cache
def rehearse_training(dialect: str, layout: LayoutName) -> None:
    """Lease and commit a step of a store in memory, once in a process.

    The first step of a process would take ten times as long as the next.

    Args:
        dialect: of the store that is read.
        layout: of the micro-batches.
    """
    with scratch() as s:
        _train(s, decided(s), layout)
    compile_for(dialect)
    settle_imports()


def _train(s: Scratch, experiment: ExperimentHandle, layout: LayoutName) -> None:
    options = StreamOptions(strategy=NAME, groups_per_step=1, layout=layout)
    lease = TrainerLease(experiment.database, experiment.key, options.consumer, TTL_S)
    loader = RowLoader(EventCache(experiment.key, experiment.name))
    sampler = StepSampler(experiment, options, lease, loader)
    maker = StepMaker(experiment, options, loader)
    s.read(sampler.start)
    taken = sampler.take(s, 1, partial_ok=False)
    assert taken is not None  # a group was decided
    manifest, rows = taken
    microbatches = maker.collate(manifest, rows)
    leased = new_event(manifest.leased_by(options.consumer, lease.token))
    (place,) = s.write(lease.append, [leased])
    step = maker.step(manifest, rows, microbatches, place.head)
    commit = StepsCommitted(
        consumer=options.consumer,
        token=lease.token,
        steps=[step.step],
        manifests=[manifest.digest],
        chain=step.chain,
        checkpoint=None,
        checkpoint_digest=None,
        metrics={},
        environment=environment_of_run(options.device),
        rows_by_rank=[[step.rows]],
    )
    s.write(lease.append, [new_event(commit)], committed=0)
