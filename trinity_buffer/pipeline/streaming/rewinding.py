"""Where a trainer goes on: at its last commit, or at a step whose checkpoint is still there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import anyio.to_thread

from trinity_buffer.errors import CheckpointError
from trinity_buffer.events import StepsCommitted
from trinity_buffer.pipeline.checkpoint import found_again, require_digest
from trinity_buffer.pipeline.events import fact_at
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.pipeline.streaming.stream_options import Resume
from trinity_buffer.store import log, trainer_queries
from trinity_buffer.store.database import Database
from trinity_buffer.store.rows import ConsumerRow, StepRow


async def last_commit(experiment: Experiment, committed: Sequence[StepRow], chain: bytes) -> Resume:
    """Return where to go on after the ``committed`` steps of the live line.

    Args:
        chain: link of the manifest chain after them.

    Raises:
        CheckpointError: the checkpoint is missing or is not the one that was committed.
    """
    last = committed[-1]
    path = None if last.checkpoint is None else _path_of(last, experiment.database.folder)
    if path is not None and last.checkpoint_digest is not None:
        await anyio.to_thread.run_sync(require_digest, path, last.checkpoint_digest)
    skipped = await _skipped_in_a_row(experiment, committed)
    return Resume(last.step, path, last.checkpoint_digest, chain, skipped)


async def _skipped_in_a_row(experiment: Experiment, committed: Sequence[StepRow]) -> int:
    """Return how many of the last steps changed no weight."""
    at, skipped = None, frozenset[int]()
    for number, row in enumerate(reversed(committed)):
        assert row.committed_at is not None  # by what the caller chose
        if row.committed_at != at:
            at = row.committed_at
            (stored,) = await experiment.database.read(log.read_at, experiment.key, [at])
            fact = fact_at(experiment.name, stored, StepsCommitted)
            skipped = frozenset(fact.skipped_steps)
        if row.step not in skipped:
            return number
    return len(committed)


async def require_checkpoint_of(
    database: Database, experiment: int, trainer: ConsumerRow, step: int
) -> None:
    """Return if ``trainer`` can go on from ``step``: 0, or one whose checkpoint is as committed.

    Asked before a rewind is recorded, which nobody could take back.

    Raises:
        CheckpointError: there is no such checkpoint; the message names those that there are.
    """
    found = await database.read(trainer_queries.steps, experiment, trainer.name)
    live = [row for row in found[: trainer.committed_step] if row.checkpoint is not None]
    paths = {row.step: _path_of(row, database.folder) for row in live}
    wanted = next((row for row in live if row.step == step), None)
    if step == 0 or (wanted is not None and paths[step].exists()):
        if wanted is not None and wanted.checkpoint_digest:
            check = partial(require_digest, paths[step], wanted.checkpoint_digest)
            await anyio.to_thread.run_sync(check)
        return
    lacks = "has no checkpoint committed at that step"
    if wanted is not None:
        lacks = (
            f"committed {wanted.checkpoint}, which is gone (`train --keep-checkpoints` keeps it)"
        )
    there = [str(number) for number, path in paths.items() if path.exists()]
    raise CheckpointError(
        f"resume_from={step}: trainer {trainer.name!r} {lacks}; the last committed step is "
        f"{trainer.committed_step}, there are checkpoints of {', '.join(there[-10:]) or 'none'}"
    )


def _path_of(row: StepRow, folder: Path | None) -> Path:
    return found_again(row.checkpoint or "", row.checkpoint_digest, folder)
