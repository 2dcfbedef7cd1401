"""Small experiences for the tests of strategies and advantages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import override

from trinity_buffer.experience import EID, Experience
from trinity_buffer.writer import BufferWriter, StagedWriter, WriteReceipt


class PlainWriter(BufferWriter):
    """A writer as users have them: it takes, and cannot record a rejection."""

    def __init__(self) -> None:
        self.writes: list[list[Experience]] = []

    @override
    async def write(self, experiences: Sequence[Experience]) -> WriteReceipt:
        self.writes.append(list(experiences))
        return WriteReceipt(0, len(experiences), 0)


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


def tensor(found: torch.Tensor | None) -> torch.Tensor:
    """Return a field that a test knows to be there."""
    assert found is not None
    return found


def scores(experiences: Sequence[Experience]) -> list[float]:
    """Return the advantage of the first action token of each experience."""
    return [float(tensor(e.advantages)[tensor(e.action_mask) != 0][0]) for e in experiences]


def written(writer: PlainWriter | StagedWriter) -> list[Experience]:
    """Return all that was written."""
    groups = writer.writes if isinstance(writer, PlainWriter) else writer.groups
    return [experience for some in groups for experience in some]


def rejected(writer: StagedWriter) -> list[tuple[str, str]]:
    """Return uid and reason of all that was rejected."""
    return [(e.eid.uid, reason) for e, reason in writer.rejections]
