"""The formats that `trinity-buffer import` reads, and how they get into a store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from trinity_buffer.errors import ConflictingExperienceError, InvalidArgumentError
from trinity_buffer.experience import Experience
from trinity_buffer.identity import Key
from trinity_buffer.integrations.imports import preferences, prime_rl, sft, trinity, verl_dumps
from trinity_buffer.integrations.imports.rows import Rows
from trinity_buffer.integrations.imports.texts import Texts
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.pipeline.store import Store
from trinity_buffer.writer import BufferWriter, WriteReceipt

PER_WRITE = 256


@dataclass(frozen=True, slots=True)
class Format:
    """A format of files.

    Attributes:
        read: yields the experiences of a file or folder, in the order in which they stand there.
        schema: of the experiment that they go into.
        holds: what it is, in a few words.
    """

    read: Callable[[Path, Texts, Rows], Iterator[Experience]]
    schema: str
    holds: str


FORMATS = {
    "trinity-rft": Format(
        trinity.read, "experience", "an experience buffer of Trinity-RFT: SQLite, or JSONL of texts"
    ),
    "verl": Format(
        verl_dumps.read, "experience", "rollouts dumped by verl: STEP.jsonl, or a folder"
    ),
    "prime-rl": Format(
        prime_rl.read, "experience", "episodes of prime-rl's file monitor: the folder of the run"
    ),
    "preferences": Format(
        preferences.read,
        "dpo",
        "pairs as TRL takes them: JSONL, JSON, Parquet, or a saved data set",
    ),
    "sft": Format(sft.read, "sft", "demonstrations as TRL takes them, in the same kinds of file"),
}


@dataclass(slots=True)
class Imported:
    """What an import did.

    Attributes:
        written: experiences that were new.
        duplicates: those that were stored already.
        batches: how many there are.
        late: new ones of batches that an earlier import sealed; counted in ``written``, never
            trained.
        left_out: the rows that are not imported: where each stands, and why.
    """

    written: int = 0
    duplicates: int = 0
    batches: int = 0
    late: int = 0
    left_out: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it by name."""
        return asdict(self)


def require_readable(
    name: str, path: Path, *, tokenizer: Path | None = None, skip_bad_lines: bool = False
) -> None:
    """Return if what goes in first can be read and stored: asked before a store is made for it.

    Raises:
        InvalidArgumentError: nothing is there, or what is there is not of the format ``name``.
    """
    if not path.exists():
        raise InvalidArgumentError(f"{path}: there is no such file or folder")
    chosen = FORMATS[name]
    rows = Rows(chosen.schema, skip_bad=skip_bad_lines)
    if not list(islice(chosen.read(path, Texts(tokenizer), rows), PER_WRITE)):
        left_out = f"; left out, first of all: {rows.left_out[0]}" if rows.left_out else ""
        raise InvalidArgumentError(
            f"{path}: there is nothing to import; {name} means {chosen.holds}{left_out}"
        )


async def import_file(
    store: Store,
    experiment: str,
    name: str,
    path: Path,
    *,
    tokenizer: Path | None = None,
    skip_bad_lines: bool = False,
) -> Imported:
    """Write what stands in ``path`` into ``experiment``, which is made if there is none.

    Every batch is sealed, so that strategies need no plan. The same again is a no-op. Blank lines
    are passed over, and a last line that is torn is left out.

    Args:
        store: where to.
        experiment: its name.
        name: of the format, a key of `FORMATS`.
        path: a file or a folder.
        tokenizer: the folder of a tokenizer of transformers; formats that hold texts need it.
        skip_bad_lines: leave out a row that cannot be imported.

    Raises:
        InvalidArgumentError: a row is not of the format, or texts come without a tokenizer;
            what stands before the row may be stored already.
        ConflictingExperienceError: another content is stored under the same address.
    """
    chosen = FORMATS[name]
    config = {"schema": chosen.schema, **({"tokenizer": str(tokenizer)} if tokenizer else {})}
    found = await store.experiment(experiment, config=config)
    rows = Rows(chosen.schema, skip_bad=skip_bad_lines)
    made = chosen.read(path, Texts(tokenizer), rows)
    return await _written(found, ((one, rows.where) for one in made), rows, f"import-{name}")


async def _written(
    found: Experiment, given: Iterator[tuple[Experience, str]], rows: Rows, actor: str
) -> Imported:
    """Write what is ``given``, each with its place, and seal its batches."""
    writer, done = found.writer(actor=actor), Imported(left_out=rows.left_out)
    batches: dict[Key, None] = {}
    try:
        while page := list(islice(given, PER_WRITE)):
            receipt = await _stored(writer, page)
            done.written += receipt.written
            done.duplicates += receipt.duplicates
            done.late += receipt.rejected
            batches.update(dict.fromkeys(one.eid.batch for one, _ in page))
    except InvalidArgumentError as error:
        if not batches:
            raise
        raise InvalidArgumentError(
            f"{error}; the {done.written + done.duplicates} experiences before it are stored and "
            "not sealed yet: mend it and import the same again, which skips them"
        ) from error
    for batch in batches:
        await writer.seal(batch, await writer.stored(batch))
    done.batches = len(batches)
    return done


async def _stored(writer: BufferWriter, page: Sequence[tuple[Experience, str]]) -> WriteReceipt:
    try:
        return await writer.write([one for one, _ in page])
    except ConflictingExperienceError as error:
        places = [where for one, where in page if one.eid.uid == error.uid]
        raise ConflictingExperienceError(f"{' and '.join(places)}: {error}") from error
