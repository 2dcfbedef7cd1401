"""The command that gives a run's numbers to an experiment tracker."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from trinity_buffer.cli.asking import asked
from trinity_buffer.cli.options import ExperimentOption, StoreOption, TrainerOption
from trinity_buffer.cli.printing import console
from trinity_buffer.cli.running import run
from trinity_buffer.inspector.tracking import track as track_steps
from trinity_buffer.integrations.trackers import tracker_of
from trinity_buffer.pipeline.experiment import Experiment


def track(
    to: Annotated[str, typer.Option("--to", help="tensorboard:FOLDER or trackio:PROJECT[/RUN].")],
    store: StoreOption = None,
    experiment: ExperimentOption = None,
    trainer: TrainerOption = None,
    after: Annotated[int, typer.Option(help="Begin after this gradient step.", min=0)] = 0,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            "-f",
            help="Wait for the trainer, and for more until the experiment is finished.",
        ),
    ] = False,
) -> None:
    """Send each committed step's numbers to TensorBoard or trackio, during a run or after it.

    Example: trinity-buffer track --to tensorboard:runs/tensorboard/demo
    """

    async def question(found: Experiment) -> int:
        with closing(tracker_of(to)) as tracker:
            return await track_steps(found, tracker, trainer=trainer, after=after, follow=follow)

    last = run(lambda: asked(store, experiment, question))
    console().print(f"steps up to {last}: {to}", markup=False)
