"""Commands that use what was recorded: exports and imports, training again, archives of tensors.

Importing this module loads no torch.
"""

from __future__ import annotations

import gc
import uuid
from collections.abc import Callable, Iterator
from contextlib import aclosing, closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import anyio.to_thread
import typer

from trinity_buffer.cli import options
from trinity_buffer.cli.escaping import escaped
from trinity_buffer.cli.output import Answer, size_of, verbatim
from trinity_buffer.errors import InvalidArgumentError, UnknownNameError
from trinity_buffer.identity import require_name
from trinity_buffer.inspector.output import strict_json
from trinity_buffer.inspector.source import Source
from trinity_buffer.inspector.table import record_batches
from trinity_buffer.inspector.tracking import track as track_steps
from trinity_buffer.lazy import extra
from trinity_buffer.pipeline.coordination.diagnosis import counted
from trinity_buffer.pipeline.history.compact import compact as compact_experiment
from trinity_buffer.pipeline.history.compact import restore as restore_experiment
from trinity_buffer.pipeline.store import Experiment, Store, open_store
from trinity_buffer.pipeline.verify.projections import Progress
from trinity_buffer.store import writer_queries
from trinity_buffer.store.url import named

SUFFIXES = (".parquet", ".jsonl")
"""Of the files that `export` writes."""


def _writable(output: Path) -> Path:
    """Return ``output`` if a table may be written there, with its folder; see `export`."""
    if output.suffix not in SUFFIXES:
        raise InvalidArgumentError(f"--output {output}: end the name in {' or '.join(SUFFIXES)}")
    options.make_folder(options.no_database(output).parent)
    return output


@options.command()
async def export(
    source: Source,
    output: Annotated[Path, typer.Option("--output", "-o", callback=_writable)],
    annotation_set: str | None = None,
    step: options.OptionalCount = None,
    trainer: str | None = None,
) -> Answer:
    """Write a file with a row for each rollout, its advantage and what became of it.

    What cannot be read is null, and the column `damaged` says why; the exit code is 1 then.

    State, step and advantage of a row are those of `--step` or of `--trainer`, else of the first
    committed step of the trainer furthest ahead.

    Parquet is read by pandas, DuckDB and Hugging Face datasets; JSONL by everything.

    Example: trinity-buffer export -o runs/demo.parquet

    Args:
        output: FILE.parquet or FILE.jsonl.
        step: Only what this gradient step was trained on.
    """
    damaged: list[str] = []
    count = 0
    gc.freeze()  # else everything that was imported is scanned again, every few pages
    async with aclosing(record_batches(source, annotation_set, step, trainer)) as batches:
        batch = await anext(batches)
        with _written(output, batch.schema) as write:
            while batch is not None:
                await anyio.to_thread.run_sync(write, batch)  # it compresses
                count += batch.num_rows
                if batch.column("damaged").null_count < batch.num_rows:
                    rows = batch.select(["uid", "damaged"]).to_pylist()
                    damaged += [f"{r['uid']}: {r['damaged']}" for r in rows if r["damaged"]]
                batch = await anext(batches, None)
    size = output.stat().st_size
    value = {"path": str(output), "rows": count, "bytes": size}
    return Answer(value, f"{count} rows, {size_of(size)}: {output}", damaged)


@contextmanager
def _written(path: Path, schema: Any) -> Iterator[Callable[[Any], None]]:
    """Yield a function that writes a batch; the file gets its name once it is complete."""
    # Another export may write to the same name at the same time.
    partial = path.with_name(f"{uuid.uuid4().hex}.writing")
    try:
        if path.suffix == ".parquet":
            parquet = extra("pyarrow.parquet", "parquet")
            with parquet.ParquetWriter(partial, schema, compression="zstd") as writer:
                yield writer.write_batch
        else:
            with partial.open("w", encoding="utf-8") as file:
                yield lambda batch: file.writelines(
                    strict_json(row, str) + "\n" for row in batch.to_pylist()
                )
        partial.rename(path)  # atomic: a reader never sees half of it
    finally:
        partial.unlink(missing_ok=True)


@options.command()
async def report(
    store: Store,
    output: Annotated[Path, typer.Option("--output", "-o", callback=options.no_database)],
    experiment: str | None = None,
) -> str:
    """Write a page about a run: one file that opens offline, without scripts.

    Example: trinity-buffer report -o runs/report.html

    Args:
        output: HTML file to write.
    """
    from trinity_buffer.web.report import report as page_of  # noqa: PLC0415 - jinja2

    page = await page_of(store, await options.experiment_in(store, experiment))
    options.make_folder(output.parent)
    output.write_text(page, encoding="utf-8")
    return str(output)


@options.command()
async def track(
    experiment: Experiment,
    to: options.Required,
    trainer: str | None = None,
    after: Annotated[int, typer.Option(min=0)] = 0,
    follow: Annotated[bool, typer.Option("--follow", "-f")] = False,
) -> str:
    """Send each committed step's numbers to TensorBoard or trackio, during a run or after it.

    Example: trinity-buffer track --to tensorboard:runs/tensorboard/demo

    Args:
        to: tensorboard:FOLDER or trackio:PROJECT[/RUN].
        after: Begin after this gradient step.
        follow: Wait for the trainer, and for more until the experiment is finished.
    """
    from trinity_buffer.integrations.trackers import tracker_of  # noqa: PLC0415 - torch

    with closing(tracker_of(to)) as tracker:
        last = await track_steps(experiment, tracker, trainer=trainer, after=after, follow=follow)
    return f"steps up to {last}: {to}"


@options.command()
async def import_(
    name: Annotated[str, typer.Argument(metavar="FORMAT")],
    path: Path,
    store: Annotated[str, typer.Option(envvar=options.STORE_VARIABLE)] = "runs/imported.db",
    experiment: str | None = None,
    tokenizer: Path | None = None,
    skip_bad_lines: bool = False,
) -> Answer:
    """Import files of another package into a store, ready to be annotated and trained.

    Blank lines are passed over, and a last line that is torn is left out.

    Example: trinity-buffer import trinity-rft buffer.db --store runs/run.db

    Args:
        name: One of trinity-rft, verl, prime-rl, preferences, sft.
        path: The file or the folder.
        store: Path or URL of the store to fill.
        experiment: Experiment name; by default that of the file or folder.
        tokenizer: Folder of a transformers tokenizer, for files with texts.
        skip_bad_lines: Leave out and list what cannot be imported.
    """
    from trinity_buffer.integrations.imports import formats  # noqa: PLC0415 - torch
    from trinity_buffer.integrations.imports.rows import name_of  # noqa: PLC0415

    if name not in formats.FORMATS:
        known = "; ".join(f"{key}: {one.holds}" for key, one in formats.FORMATS.items())
        raise UnknownNameError(f"no format {name!r} ({known})")
    target = experiment or name_of(path)
    require_name("an experiment's name", target)
    chosen: dict[str, Any] = {"tokenizer": tokenizer, "skip_bad_lines": skip_bad_lines}
    formats.require_readable(name, path, **chosen)  # before there is a store: a refusal leaves none
    options.make_folder_of(store)
    async with open_store(store) as opened:
        done = await formats.import_file(opened, target, name, path, **chosen)
    line = (
        f"{counted(done.written, 'experience')} in {counted(done.batches, 'batch')} written to "
        f"{named(store)}, {done.duplicates} there already, {counted(len(done.left_out), 'row')} "
        "left out"
    )
    for row in done.left_out:
        typer.echo(escaped(f"left out: {row}"), err=True)
    late = (
        f"{done.late} of them are of batches that an earlier import sealed: they are recorded as "
        "late and never trained; give the grown file an --experiment of its own"
    )
    return Answer(done, line, [late] if done.late else [])


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
) -> Answer:
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
    named = {"loss.name": loss, "algorithm": algorithm}
    changed = [*(overrides or []), *(f"{key}={value}" for key, value in named.items() if value)]
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
    text = [verbatim("\n".join(lines))]
    return Answer(report, text, failed=not passed, soft_wrap=True)


@options.command(read_only=False)
async def reannotate(
    experiment: Experiment,
    strategy: options.Required,
    name: options.Required,
    arguments: list[str] | None = None,
    rewards: str | None = None,
) -> Answer:
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
    return Answer({"set": name, **asdict(report)}, line)


@options.command(read_only=False)
async def compact(
    experiment: Experiment,
    keep_steps: Annotated[int, typer.Option()],
    archive: Path | None = None,
    delete: bool = False,
    *,
    progress: Progress,
) -> Answer:
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
    left = f"{count} ({report.bytes / 1e6:.1f} MB) left the store{where}"
    if not report.segments:
        left += (
            "; one leaves when all its rows are rejected, or committed more than "
            f"{counted(keep_steps, 'step')} ago by each trainer (there must be one): see "
            "`trinity-buffer stats`"
        )
    lines = [left]
    if report.damaged:
        lines.append(f"{report.damaged} cannot be read and stayed: `verify` names what is damaged")
    return Answer(report, lines)


@options.command(read_only=False)
async def restore(
    experiment: Experiment,
    folder: Annotated[Path | None, typer.Option("--from")] = None,
    *,
    progress: Progress,
) -> Answer:
    """Restore archived tensors; the archive files stay where they are.

    Example: trinity-buffer restore --from /mnt/archive

    Args:
        folder: Where the files are now, if they were moved.
    """
    report = await restore_experiment(experiment, folder=folder, progress=progress)
    verb = "is" if report.segments == 1 else "are"
    count = counted(report.segments, "segment")
    return Answer(report, f"{count} ({report.bytes / 1e6:.1f} MB) {verb} in the store again")
