"""``trinity-buffer import``: take in files that other packages wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from trinity_buffer.cli.escaping import escaped
from trinity_buffer.cli.options import STORE_VARIABLE, command, make_folder_of
from trinity_buffer.cli.output import Answer
from trinity_buffer.errors import UnknownNameError
from trinity_buffer.identity import require_name
from trinity_buffer.integrations.imports.formats import FORMATS, import_file, require_readable
from trinity_buffer.integrations.imports.rows import name_of
from trinity_buffer.pipeline.coordination.diagnosis import counted
from trinity_buffer.pipeline.store import open_store
from trinity_buffer.store.url import named


@command()
async def import_(
    name: Annotated[str, typer.Argument(metavar="FORMAT", help=f"One of {', '.join(FORMATS)}.")],
    path: Path,
    store: Annotated[str, typer.Option(envvar=STORE_VARIABLE)] = "runs/imported.db",
    experiment: str | None = None,
    tokenizer: Path | None = None,
    skip_bad_lines: bool = False,
) -> Answer:
    """Import files of another package into a store, ready to be annotated and trained.

    Blank lines are passed over, and a last line that is torn is left out.

    Example: trinity-buffer import trinity-rft buffer.db --store runs/run.db

    Args:
        path: The file or the folder.
        store: Path or URL of the store to fill.
        experiment: Experiment name; by default that of the file or folder.
        tokenizer: Folder of a transformers tokenizer, for files with texts.
        skip_bad_lines: Leave out and list what cannot be imported.
    """
    if name not in FORMATS:
        known = "; ".join(f"{key}: {one.holds}" for key, one in FORMATS.items())
        raise UnknownNameError(f"no format {name!r} ({known})")
    target = experiment or name_of(path)
    require_name("an experiment's name", target)
    options: dict[str, Any] = {"tokenizer": tokenizer, "skip_bad_lines": skip_bad_lines}
    require_readable(name, path, **options)  # before there is a store: a refusal leaves none
    make_folder_of(store)
    async with open_store(store) as opened:
        done = await import_file(opened, target, name, path, **options)
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
    return Answer(done.to_dict(), line, [late] if done.late else [])
