"""What the processes of the crash tests do: the real roles, on a task that takes milliseconds."""

from __future__ import annotations

from pathlib import Path

import anyio

from trinity_buffer.cli import roles


def explorer(url: str, experiment: str, actor: str, acknowledgements: str) -> None:
    """Explore until the experiment is finished."""

    async def main() -> None:
        path = Path(acknowledgements) / f"{actor}.ack"
        await roles.explore(
            url,
            experiment,
            actor=actor,
            acknowledgements=path,
            max_batches=None,
            say=roles.plain,
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
