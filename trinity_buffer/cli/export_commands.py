"""Commands that take what is stored out, as files that other tools read."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Annotated, Any

import anyio.to_thread
import typer

from trinity_buffer.cli.asking import asked_of
from trinity_buffer.cli.options import (
    AsOfOption,
    ExperimentOption,
    JsonOption,
    StoreOption,
    TrainerOption,
    made_folder,
    require_no_database,
)
from trinity_buffer.cli.printing import console, end_if_damaged, print_json, size_of
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.inspector.output import strict_json
from trinity_buffer.inspector.source import Source
from trinity_buffer.inspector.table import Wanted, parquet_writer, record_batches
from trinity_buffer.pipeline.background import made_ahead

FORMATS = (".parquet", ".jsonl")


def export(
    output: Annotated[Path, typer.Option("--output", "-o", help="FILE.parquet or FILE.jsonl.")],
    store: StoreOption = None,
    experiment: ExperimentOption = None,
    annotation_set: Annotated[
        str | None,
        typer.Option(
            "--set", help="Annotation set whose advantages are shown. Default: the first one."
        ),
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="Only what this gradient step was trained on.", min=1)
    ] = None,
    trainer: TrainerOption = None,
    as_of: AsOfOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a file with a row for each rollout, its advantage and what became of it.

    What cannot be read is null, and the column `damaged` says why; the exit code is 1 then.

    State, step and advantage of a row are those of `--step` or of `--trainer`, else of the first
    committed step of the trainer furthest ahead.

    Parquet is read by pandas, DuckDB and Hugging Face datasets; JSONL by everything.

    Example: trinity-buffer export -o runs/demo.parquet
    """
    if output.suffix not in FORMATS:
        raise InvalidArgumentError(f"--output {output}: end the name in {' or '.join(FORMATS)}")
    require_no_database(output)
    made_folder(output.parent)
    wanted = Wanted(annotation_set, step, trainer)

    damaged: list[str] = []

    async def question(source: Source) -> int:
        with _written(output) as write:
            return await _exported(source, wanted, write, damaged)

    count = asked_of(store, experiment, as_of, question)
    size = output.stat().st_size
    if as_json:
        print_json({"path": str(output), "rows": count, "bytes": size})
    else:
        console().print(f"{count} rows, {size_of(size)}: {output}", markup=False)
    end_if_damaged(damaged)


async def _exported(
    source: Source, wanted: Wanted, write: Callable[[Any], None], damaged: list[str]
) -> int:
    """Write all rows, the next ones being read meanwhile; return how many."""
    count = 0
    gc.freeze()  # or all that was imported is walked again, every few pages
    async with aclosing(record_batches(source, wanted)) as batches:

        async def following() -> Any:
            return await anext(batches, None)

        async with made_ahead(following) as made:
            async for batch in made:
                await anyio.to_thread.run_sync(write, batch)
                count += batch.num_rows
                damaged.extend(_damaged(batch))
    return count


def _damaged(batch: Any) -> Iterator[str]:
    if batch.column("damaged").null_count == batch.num_rows:
        return
    for row in batch.select(["uid", "damaged"]).to_pylist():
        if row["damaged"] is not None:
            yield f"{row['uid']}: {row['damaged']}"


@contextmanager
def _written(path: Path) -> Iterator[Callable[[Any], None]]:
    """Yield what writes a batch; the file has its name once it is whole."""
    partial = path.with_name(f"{path.name}.writing")
    try:
        if path.suffix == ".parquet":
            with parquet_writer(partial) as write:
                yield write
        else:
            with partial.open("w", encoding="utf-8") as file:
                yield lambda batch: file.writelines(map(_line, batch.to_pylist()))
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


def _line(row: dict[str, Any]) -> str:
    return strict_json(row, str) + "\n"
