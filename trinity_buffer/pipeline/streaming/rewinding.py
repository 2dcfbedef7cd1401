"""From which of its steps a trainer can go on: those whose checkpoint is still there."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import anyio.to_thread

from trinity_buffer.errors import CheckpointError
from trinity_buffer.pipeline.checkpoint import require_digest
from trinity_buffer.store import trainer_queries
from trinity_buffer.store.database import Database
from trinity_buffer.store.rows import ConsumerRow, StepRow


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
    wanted = next((row for row in live if row.step == step), None)
    if step == 0 or (wanted is not None and _is_there(wanted)):
        if wanted is not None and wanted.checkpoint and wanted.checkpoint_digest:
            check = partial(require_digest, Path(wanted.checkpoint), wanted.checkpoint_digest)
            await anyio.to_thread.run_sync(check)
        return
    lacks = "has no checkpoint committed at that step"
    if wanted is not None:
        lacks = (
            f"committed {wanted.checkpoint}, which is gone (`train --keep-checkpoints` keeps it)"
        )
    there = [str(row.step) for row in live if _is_there(row)]
    raise CheckpointError(
        f"resume_from={step}: trainer {trainer.name!r} {lacks}; the last committed step is "
        f"{trainer.committed_step}, there are checkpoints of {', '.join(there[-10:]) or 'none'}"
    )


def _is_there(row: StepRow) -> bool:
    return row.checkpoint is not None and Path(row.checkpoint).exists()
