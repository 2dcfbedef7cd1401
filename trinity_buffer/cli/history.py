"""Commands that use what was recorded: train again, annotate again, archive and restore tensors."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import anyio
import typer

from trinity_buffer.cli import options, output
from trinity_buffer.pipeline.coordination.diagnosis import counted
from trinity_buffer.pipeline.history.compact import compact as compact_experiment
from trinity_buffer.pipeline.history.compact import restore as restore_experiment
from trinity_buffer.pipeline.store import Experiment
from trinity_buffer.pipeline.verify.projections import Progress
from trinity_buffer.store import writer_queries


@options.command()
def replay(
    place: options.Place,
    steps: str | None = None,
    from_checkpoint: Path | None = None,
    loss: str | None = None,
    algorithm: str | None = None,
    overrides: list[str] | None = None,
    tolerance: Annotated[float | None, typer.Option(min=0)] = None,
    as_json: bool = False,
) -> output.Answer:
    """Train again on the recorded batches, without explorers and without changing the store.

    With the run's own configuration the weights come out bit for bit, on the same software, device
    and settings: a warning names those that differ. Exit code 1 if the weights are others, or with
    --tolerance, if they are too far apart.

    Example: trinity-buffer replay --steps 1:40 --json

    Args:
        steps: A:B; by default all committed ones.
        from_checkpoint: Start from the weights of this checkpoint, after its step.
        loss: Another policy loss.
        algorithm: Another algorithm; one with a strategy reads the recorded advantages.
        tolerance: Pass if no weight differs by more than this part of the largest of its tensor; by
            default, if all bits are the same.
    """
    from trinity_buffer.cli import roles  # noqa: PLC0415 - torch

    name = anyio.run(options.chosen_experiment, place.url, place.experiment)
    # Last, so that --loss and --algorithm win over --set.
    changed = [*(overrides or [])]
    changed += [f"loss.name={loss}"] if loss else []
    changed += [f"algorithm={algorithm}"] if algorithm else []
    report = roles.replay(
        place.url,
        name,
        steps=steps,
        from_checkpoint=from_checkpoint,
        overrides=changed,
        tolerance=tolerance,
        say=(lambda _: None) if as_json else roles.plain,
    )

    verdict = "bit-identical" if report.identical else "DIFFERENT"
    if report.identical is None:
        verdict = "not compared, none were published after the last step"
        if changed:
            verdict = f"not compared, with {', '.join(changed)}"
    line = f"steps {report.first} to {report.last}: weights {verdict}"
    lines = [line, f"replayed {report.digest}", f"recorded {report.recorded}"]
    if report.tensor is not None:
        largest = f"{report.largest_difference:.3g}, in {report.tensor}"
        if tolerance is not None:
            largest += f": {'within' if report.within else 'above'} {tolerance:g}"
        lines.append(f"largest relative difference {largest}")
    elif tolerance is not None or report.identical is False:
        lines.append(
            "largest relative difference unknown: the recorded weights are not on the disk any "
            "more (`train --keep-checkpoints` keeps them)"
        )
    passed = report.within
    if passed is None:  # no tolerance, or the recorded weights are gone: then the bits decide
        passed = report.identical is True or (tolerance is None and report.identical is None)
    # A digest is for copying, so it must stay in one piece.
    text = [output.verbatim("\n".join(lines))]
    return output.Answer(report, text, failed=not passed, soft_wrap=True)


@options.command(read_only=False)
async def reannotate(
    experiment: Experiment,
    strategy: options.Required,
    name: options.Required,
    arguments: list[str] | None = None,
    rewards: str | None = None,
) -> output.Answer:
    """Add a second set of annotations beside the first, without touching it.

    Example: trinity-buffer reannotate --strategy grpo --set epsilon=1e-4 --name grpo-4

    Args:
        strategy: Registered name, or several as a+b.
        name: Name of the new annotation set.
        rewards: Name of a scoring whose rewards replace the recorded ones.
    """
    from trinity_buffer.cli.roles import run_named  # noqa: PLC0415 - torch
    from trinity_buffer.cli.run_config import overridden  # noqa: PLC0415

    # Asked before: a set that existed may have had nothing left to decide.
    existed = name in await experiment.database.read(writer_queries.consumers, experiment.key)
    args, parts = overridden({}, arguments or []), strategy.split("+")
    report = await run_named(experiment, parts, args, name=name, rewards=rewards)
    line = (
        f"set {name}: {report.annotated} annotated, {report.rejected} rejected, "
        f"{report.waiting} waiting in {report.waiting_groups} incomplete groups"
    )
    if existed and not any(asdict(report).values()):
        line = f"set {name} was complete already: all that is recorded is decided in it"
    return output.Answer({"set": name, **asdict(report)}, line)


@options.command(read_only=False)
async def compact(
    experiment: Experiment,
    keep_steps: Annotated[int, typer.Option()],
    archive: Path | None = None,
    delete: bool = False,
    *,
    progress: Progress,
) -> output.Answer:
    """Archive, or delete, the tensors of what was committed long ago; events and lineage stay.

    Example: trinity-buffer compact --keep-steps 100 --archive runs/archive

    Args:
        keep_steps: How many of each trainer's last steps keep their tensors.
        archive: Folder for Parquet files.
        delete: Delete the tensors for good, without an archive.
    """
    report = await compact_experiment(
        experiment, keep_steps=keep_steps, archive=archive, delete=delete, progress=progress
    )
    where = f" to {counted(len(report.files), 'file')}" if report.files else ""
    count = counted(report.segments, "segment")
    lines = [f"{count} ({report.bytes / 1e6:.1f} MB) left the store{where}"]
    if report.damaged:
        lines.append(f"{report.damaged} cannot be read and stayed: `verify` names what is damaged")
    return output.Answer(report, lines)


@options.command(read_only=False)
async def restore(
    experiment: Experiment,
    folder: Annotated[Path | None, typer.Option("--from")] = None,
    *,
    progress: Progress,
) -> output.Answer:
    """Restore archived tensors; the archive files stay where they are.

    Example: trinity-buffer restore --from /mnt/archive

    Args:
        folder: Where the files are now, if they were moved.
    """
    report = await restore_experiment(experiment, folder=folder, progress=progress)
    verb = "is" if report.segments == 1 else "are"
    count = counted(report.segments, "segment")
    line = f"{count} ({report.bytes / 1e6:.1f} MB) {verb} in the store again"
    return output.Answer(report, line)
