"""What a trainer's commit records, once the files that it names are on the disk."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio.to_thread

from trinity_buffer.events import PolicyPublished, StepsCommitted
from trinity_buffer.pipeline import checkpoint as checkpoints
from trinity_buffer.pipeline.events import new_event
from trinity_buffer.store.log import NewEvent

NON_FINITE = "non_finite"
"""Why the weights did not go through a step that is committed all the same."""


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that are finite: a number of an event is a number."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def skips(skipped: Mapping[int, Sequence[str]]) -> dict[str, Any]:
    """Return the fields of `StepsCommitted` that say which steps were skipped, and their rows."""
    if not skipped:
        return {}
    return {
        "skipped": NON_FINITE,
        "skipped_steps": list(skipped),
        "largest_rows": [list(uids) for uids in skipped.values()],
    }


async def commit_events(
    commit: StepsCommitted, checkpoint: str | Path | None, policy: str | Path | None
) -> list[NewEvent]:
    """Write the files of a commit through to the disk; return the events that record it.

    Args:
        commit: without its checkpoint.
        checkpoint: file or folder that holds the weights after its last step; None: none.
        policy: file with the weights that explorers shall load as the version of that step.

    Raises:
        CheckpointError: no file at ``checkpoint`` or ``policy``.
    """
    kept: tuple[str | None, str | None] = (None, None)
    if checkpoint is not None:
        kept = await anyio.to_thread.run_sync(_make_durable, checkpoint)
    path, content = kept
    events = [new_event(replace(commit, checkpoint=path, checkpoint_digest=content))]
    if policy is not None:
        uri, digest = await anyio.to_thread.run_sync(_make_durable, policy)
        published = PolicyPublished(number=commit.steps[-1], uri=uri, digest=digest)
        events.append(new_event(published))
    return events


def _make_durable(path: str | Path) -> tuple[str, str]:
    """Return the absolute path and the digest of what is there, which is on the disk then."""
    whole = Path(path).absolute()
    return str(whole), checkpoints.make_durable(whole)
