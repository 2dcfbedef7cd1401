"""What the processes of the crash tests do: the real roles, on a task that takes milliseconds."""

from __future__ import annotations

import os
from pathlib import Path

import anyio

import trinity_buffer as tb
from trinity_buffer.cli import roles


def explorer(url: str, experiment: str, actor: str, acknowledgements: str) -> None:
    """Explore until the experiment is finished."""

    async def main() -> None:
        path = Path(acknowledgements) / f"{actor}.ack"
        await roles.explore(
            url, experiment, actor=actor, acknowledgements=path, max_batches=None, say=roles.plain
        )

    anyio.run(main)


def any_rollout(url: str, actor: str, made: str, concurrency: int) -> None:
    """Go through a list of twelve tasks, twice; note in the file ``made`` each run that is made."""

    notes = os.open(made, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    async def rollout(task: str, model: str) -> list[tb.Experience]:
        os.write(notes, f"{actor} {task}\n".encode())
        return [tb.Experience(tokens=[1, 2], logprobs=[-0.5], reward=float(len(task)))]

    async def main() -> None:
        async with tb.open_store(url) as store:
            await tb.explore(
                await store.experiment("crash"),
                actor=actor,
                tasks=[f"task {number}" for number in range(12)],
                rollout=rollout,
                model="none",
                epochs=2,
                concurrency=concurrency,
            )

    anyio.run(main)


def strategy(url: str, experiment: str) -> None:
    """Annotate until the experiment is finished."""

    async def main() -> None:
        await roles.annotate(url, experiment, strategy=None, name=None, args=None, follow=True)

    anyio.run(main)


def trainer(url: str, experiment: str, checkpoints: str) -> None:
    """Train until the experiment is finished."""
    roles.train(
        url,
        experiment,
        checkpoints=Path(checkpoints),
        follow=True,
        resume_from=None,
        say=roles.plain,
    )
