"""The workload: 512 tasks × 8 runs × (256 prompt + 1,024 response tokens), 2 KiB of text each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trinity_buffer.experience import EID, Experience

TASKS, RUNS = 512, 8
PROMPT, RESPONSE = 256, 1024
BATCH = "e0-0"
ROWS_PER_STEP = 256

_TEXT = ("The quick brown fox reasons step by step about the answer. " * 40)[:2048]


def experiences(tasks: int = TASKS, *, first_task: int = 0, batch: str = BATCH) -> list[Experience]:
    """Return the rollouts of ``tasks`` tasks; the same arguments give the same numbers."""
    generator = torch.Generator().manual_seed(first_task)
    return [
        _experience(EID(batch, task, run), generator)
        for task in range(first_task, first_task + tasks)
        for run in range(RUNS)
    ]


def _experience(eid: EID, generator: torch.Generator) -> Experience:
    size = (PROMPT + RESPONSE,)
    right = bool(torch.rand((), generator=generator) < 0.5)
    return Experience(
        eid=eid,
        tokens=torch.randint(0, 151_000, size, dtype=torch.int32, generator=generator),
        prompt_length=PROMPT,
        logprobs=-torch.rand(RESPONSE, generator=generator),
        reward=right + 0.01 * eid.run,
        response_text=_TEXT,
        info={"model_version": 0, "temperature": 1.0},
    )


def calls(some: Sequence[Experience], per_call: int) -> list[Sequence[Experience]]:
    """Return ``some`` in slices, each for one call of ``write``."""
    return [some[start : start + per_call] for start in range(0, len(some), per_call)]
