"""Commands that run something: the demo, and each of its processes by hand.

This module loads no torch, so that a refusal or a help page is quick.

``trinity-buffer init``: a folder to begin with.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import anyio
import typer

from trinity_buffer.cli import options
from trinity_buffer.cli.options import make_folder
from trinity_buffer.cli.output import print_json
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.identity import require_name


@options.command()
def demo(
    store: str | None = None,
    name: str | None = None,
    model: str | None = None,
    algorithm: str | None = None,
    task: str | None = None,
    digits: int | None = None,
    explorers: options.Count = 2,
    chaos: bool = False,
    chaos_every: Annotated[float | None, typer.Option(min=0.1)] = None,
    limit: Annotated[float | None, typer.Option(min=0)] = None,
    seed: int | None = None,
    config: Path | None = None,
    overrides: list[str] | None = None,
) -> None:
    """Train a small policy from scratch, in four processes on one store, and watch it.

    What the algorithm needs is made for it: solutions, pairs, a teacher, an expert's data.

    Example: trinity-buffer demo --algorithm dpo --chaos

    Args:
        store: Path or URL; by default runs/NAME.db.
        name: Name of the run and of its files under runs/; by default demo (with hf: demo-hf).
        model: hf: a small transformers model, which learns a game in a conversation; by default our
            own transformer.
        algorithm: Registered name, see `trinity-buffer algorithms`; by default the task's.
        task: sort or guess; by default the algorithm's.
        digits: sort: how many digits; by default 3.
        explorers: How many explorer processes.
        chaos: Kill a random process every few seconds.
        chaos_every: Seconds between kills, on average; by default 4.
        limit: Stop after N seconds.
        seed: Of weights, problems and rollouts; by default 0.
    """
    from trinity_buffer.cli import demo_run  # noqa: PLC0415 - torch
    from trinity_buffer.cli.run_config import RunFile, read_file  # noqa: PLC0415

    if model not in (None, "hf"):
        raise InvalidArgumentError(f"--model {model}: there is hf; `trinity-buffer init` has yours")
    if chaos_every is not None and not chaos:
        raise InvalidArgumentError(f"--chaos-every {chaos_every:g} needs --chaos")
    file = RunFile() if config is None else read_file(config)
    name = (file.experiment if name is None else name) or ("demo-hf" if model else "demo")
    url, base = demo_run.demo_place(store or file.store, name)
    named = {"algorithm": algorithm, "seed": seed, "task.name": task, "task.digits": digits}
    chosen = {key: value for key, value in named.items() if value is not None}
    own_model = options.beside(base, ".model") if model else None
    recipe = demo_run.demo_config(chosen, own_model, file.values or {}, overrides or [])
    every_s = (chaos_every or 4.0) if chaos else None
    run = demo_run.Demo(url, base, name, recipe, explorers, every_s, limit_s=limit)
    raise typer.Exit(run.run())


@options.command(resumable=True)
async def explore(
    run: options.Run,
    actor: options.Required,
    acknowledge: Path | None = None,
    batches: options.OptionalCount = None,
    take_over: bool = False,
) -> None:
    """Generate rollouts with the newest published policy, until the experiment is finished.

    With a model, rollouts and tasks of your own in the file of --config, until they are through.

    Example: trinity-buffer explore --store runs/demo.db --actor e0

    Args:
        actor: Name of this explorer; its batches are ACTOR-0, ACTOR-1, ...; with tasks of your own
            all explorers share epoch0-0, epoch0-1, ...
        acknowledge: Folder for the file ACTOR.ack, which proves what was acknowledged.
        batches: End after so many batches; without tasks of your own, those of earlier calls count.
        take_over: Finish batches of explorers that are gone, too.
    """
    from trinity_buffer.cli import roles  # noqa: PLC0415 - torch

    if not actor or "/" in actor:
        raise InvalidArgumentError(f"--actor {actor!r}: must be a text without '/'")
    require_name("--actor", actor)
    if acknowledge is not None:
        options.require_folder(acknowledge)
    receipts = None if acknowledge is None else acknowledge / f"{actor}.ack"
    limits: dict[str, Any] = {"max_batches": batches, "acknowledgements": receipts}
    name = await roles.prepare(run, explores=True)
    await roles.explore(run.url, name, actor=actor, take_over=take_over, say=roles.plain, **limits)


@options.command(resumable=True)
async def annotate(
    place: options.Place,
    strategy: str | None = None,
    name: str | None = None,
    arguments: list[str] | None = None,
    follow: bool = False,
    as_json: bool = False,
) -> None:
    """Run a strategy over stored rollouts, and store its advantages as annotations.

    Example: trinity-buffer annotate --strategy grpo --set epsilon=1e-5 --name grpo-5

    Args:
        strategy: Registered name, or several as a+b; by default the set's, or the experiment's.
        name: Name of the annotation set; by default the strategy's.
    """
    from trinity_buffer.cli import roles  # noqa: PLC0415 - torch
    from trinity_buffer.cli.run_config import overridden  # noqa: PLC0415

    choose = options.awaited_experiment if follow else options.chosen_experiment
    chosen = await choose(place.url, place.experiment)
    args = overridden({}, arguments) if arguments else None
    if follow and not as_json:
        roles.plain(f"annotates {chosen}")
    report = await roles.annotate(
        place.url, chosen, strategy=strategy, name=name, args=args, follow=follow
    )
    if as_json:
        print_json(asdict(report))
    else:
        roles.plain(
            f"{report.annotated} annotated, {report.rejected} rejected, "
            f"{report.waiting} waiting in {report.waiting_groups} incomplete groups"
        )


@options.command(resumable=True)
def train(
    run: options.Run,
    checkpoints: Path | None = None,
    resume_from: int | None = None,
    drop_damaged_rows: bool = False,
    drop: Annotated[list[str] | None, typer.Option(metavar="UID")] = None,
    keep_checkpoints: str = "2",
    follow: bool = False,
) -> None:
    """Train on annotated groups, and commit each checkpoint with what it was trained on.

    Under torchrun (`torchrun --nproc-per-node 2 --no-python trinity-buffer train`) each process is
    one rank of the trainer.

    Example: trinity-buffer train --store runs/demo.db --follow

    Args:
        checkpoints: Folder for this trainer only; by default one beside the store.
        resume_from: Rewind to this committed step; its checkpoint must still exist.
        drop_damaged_rows: Continue without unreadable rows.
        drop: Never train this row, and go on with the rest of its step; may be repeated.
        keep_checkpoints: How many of the newest checkpoints stay on disk: a number, or all.
        follow: Wait for more; otherwise end with what is stored.
    """
    from trinity_buffer.cli import roles  # noqa: PLC0415 - torch

    newest = None
    if keep_checkpoints != "all":
        newest = int(keep_checkpoints) if keep_checkpoints.isdecimal() else 0
        if newest < 1:
            raise InvalidArgumentError(
                f"--keep-checkpoints {keep_checkpoints}: it must be a number from 1 on, or all"
            )
    if checkpoints is not None:  # before anything is recorded
        options.require_folder(checkpoints)
    elif options.path_of(run.url) is None:
        raise InvalidArgumentError(
            "a store on a server has no folder beside it: say --checkpoints FOLDER"
        )
    prepare = partial(roles.prepare, run, resume_from=roles.step_to_rewind_to(resume_from))
    with roles.ranks_of_environment() as processes:
        # One rank creates the experiment, and the others learn its name.
        name = roles.on_rank_0(processes, lambda: anyio.run(prepare))
        folder = checkpoints or anyio.run(options.folder_beside, run.url, name)
        roles.train(
            run.url,
            name,
            checkpoints=folder,
            keep_checkpoints=newest,
            follow=follow,
            resume_from=resume_from,
            damaged_rows="drop" if drop_damaged_rows else "refuse",
            drop=tuple(drop or ()),
            say=(lambda _: None) if processes.rank else roles.plain,
            processes=processes,
        )


WRITTEN = ("run.toml", "rollout.py", "README.md")
MODEL = "model"


@options.command()
def init(folder: Path, seed: int = 0) -> None:
    """Write a run to start from: configuration, rollouts, a small random model.

    It runs as it is; its README says how.

    Example: trinity-buffer init own

    Args:
        folder: Folder to write to; created if missing.
        seed: Of the random weights.
    """
    from trinity_buffer.demo.tiny_model import make_tiny_model  # noqa: PLC0415 - torch

    taken = [name for name in (*WRITTEN, MODEL) if (folder / name).exists()]
    if taken:
        raise InvalidArgumentError(
            f"{folder} has {', '.join(taken)} already: nothing was written, name another folder"
        )
    make_folder(folder)
    make_tiny_model(folder / MODEL, seed=seed)
    for name in WRITTEN:
        text = files("trinity_buffer.demo").joinpath("own", name).read_text()
        (folder / name).write_text(text)
    typer.echo(f"{folder}: {', '.join(WRITTEN)} and {MODEL}/; {folder / 'README.md'} says how")
