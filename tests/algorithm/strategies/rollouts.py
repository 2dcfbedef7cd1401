"""Small experiences for the tests of strategies and advantages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trinity_buffer.experience import EID, Experience
from trinity_buffer.writer import StagedWriter


class PlainWriter:
    """A writer as users have them: it takes, and knows nothing else."""

    def __init__(self) -> None:
        self.writes: list[list[Experience]] = []

    async def write_async(self, experiences: Sequence[Experience]) -> None:
        self.writes.append(list(experiences))


def rollout(
    task: int | str = 0,
    run: int = 0,
    reward: float | None = 1.0,
    *,
    step: int = 0,
    mask: Sequence[int] = (1, 1),
    **fields: Any,
) -> Experience:
    """Return an experience with one prompt token and a response as long as ``mask``."""
    return Experience(
        eid=EID(batch="b", task=task, run=run, step=step),
        tokens=torch.arange(len(mask) + 1, dtype=torch.int32),
        prompt_length=1,
        action_mask=torch.tensor(mask, dtype=torch.bool),
        reward=reward,
        **fields,
    )


def group(rewards: Sequence[float | None], task: int | str = 0, **fields: Any) -> list[Experience]:
    """Return one run per reward."""
    return [rollout(task, run, reward, **fields) for run, reward in enumerate(rewards)]


def scores(experiences: Sequence[Experience]) -> list[float]:
    """Return the advantage of the first action token of each experience."""
    found = []
    for e in experiences:
        assert e.advantages is not None and e.action_mask is not None
        found.append(float(e.advantages[e.action_mask != 0][0]))
    return found


def written(writer: PlainWriter | StagedWriter) -> list[Experience]:
    """Return all that was written."""
    groups = writer.writes if isinstance(writer, PlainWriter) else writer.groups
    return [experience for some in groups for experience in some]


def rejected(writer: StagedWriter) -> list[tuple[str, str]]:
    """Return uid and reason of all that was rejected."""
    return [(e.eid.uid, reason) for e, reason in writer.rejections]
