"""The formats that `trinity-buffer import` reads, and how they get into a store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.experience import Experience
from trinity_buffer.identity import Key
from trinity_buffer.integrations.imports import preferences, prime_rl, sft, trinity, verl_dumps
from trinity_buffer.integrations.imports.texts import Texts
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.pipeline.store import Store
from trinity_buffer.pipeline.writing.validation import validate

PER_WRITE = 256


@dataclass(frozen=True, slots=True)
class Format:
    """A format of files.

    Attributes:
        read: yields the experiences of a file or folder, in the order in which they stand there.
        schema: of the experiment that they go into.
        holds: what it is, in a few words.
    """

    read: Callable[[Path, Texts], Iterator[Experience]]
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
    """

    written: int = 0
    duplicates: int = 0
    batches: int = 0
    late: int = 0

    def to_dict(self) -> dict[str, int]:
        """Return the counts by name."""
        return asdict(self)


def require_readable(name: str, path: Path, *, tokenizer: Path | None = None) -> None:
    """Return if what goes in first can be read and stored: asked before a store is made for it.

    Raises:
        InvalidArgumentError: nothing is there, or what is there is not of the format ``name``.
    """
    if not path.exists():
        raise InvalidArgumentError(f"{path}: there is no such file or folder")
    chosen = FORMATS[name]
    found = list(islice(chosen.read(path, Texts(tokenizer)), PER_WRITE))
    if not found:
        raise InvalidArgumentError(
            f"{path}: there is nothing to import; {name} means {chosen.holds}"
        )
    for one in found:
        validate(one, chosen.schema)


async def import_file(
    store: Store, experiment: str, name: str, path: Path, *, tokenizer: Path | None = None
) -> Imported:
    """Write what stands in ``path`` into ``experiment``, which is made if there is none.

    Every batch is sealed, so that strategies need no plan. The same again is a no-op.

    Args:
        store: where to.
        experiment: its name.
        name: of the format, a key of `FORMATS`.
        path: a file or a folder.
        tokenizer: the folder of a tokenizer of transformers; formats that hold texts need it.

    Raises:
        InvalidArgumentError: a line is not of the format, or texts come without a tokenizer;
            what stands before the line may be stored already.
        ConflictingExperienceError: another content is stored under the same address.
    """
    chosen = FORMATS[name]
    config = {"schema": chosen.schema, **({"tokenizer": str(tokenizer)} if tokenizer else {})}
    found = await store.experiment(experiment, config=config)
    return await _written(found, chosen.read(path, Texts(tokenizer)), f"import-{name}")


async def _written(found: Experiment, given: Iterable[Experience], actor: str) -> Imported:
    writer, done = found.writer(actor=actor), Imported()
    batches: dict[Key, None] = {}
    rest = iter(given)
    try:
        while some := list(islice(rest, PER_WRITE)):
            receipt = await writer.write(some)
            done.written += receipt.written
            done.duplicates += receipt.duplicates
            done.late += receipt.rejected
            batches.update(dict.fromkeys(one.eid.batch for one in some))
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
