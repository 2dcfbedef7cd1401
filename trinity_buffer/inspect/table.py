"""What is stored, as a table: a row for each experience, in record batches of Arrow.

Memory does not grow with the store: a page of experiences is one batch.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import numpy as np

from trinity_buffer.codec import Segment
from trinity_buffer.errors import InvalidArgumentError, UnknownNameError
from trinity_buffer.events import ExperiencesRecorded
from trinity_buffer.inspect.blobs import Damage, EventWithSegment, readable_events
from trinity_buffer.inspect.fates import Fate, fates
from trinity_buffer.inspect.source import Source, as_of
from trinity_buffer.inspect.steps import rows_of_step
from trinity_buffer.inspect.tensors import elements_of
from trinity_buffer.pipeline.store import open_store
from trinity_buffer.sizes import sizes
from trinity_buffer.store import queries, reads
from trinity_buffer.store.rows import ExperienceRow, position_of, slot_of
from trinity_buffer.store.transaction import Transaction

FAMILIES = ("light", "tokens", "text")
_TEXTS = ("prompt_text", "response_text")


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which rows, and whose decisions stand beside them.

    Attributes:
        annotation_set: whose advantages, state and reason; None: the first set there is.
        step: only the rows of this gradient step; None: all that are stored.
        trainer: whose step it is.
    """

    annotation_set: str | None = None
    step: int | None = None
    trainer: str | None = None


def to_arrow(
    url: str,
    experiment: str | None = None,
    *,
    set: str | None = None,  # noqa: A002 - the word that everybody uses for it
    step: int | None = None,
    trainer: str | None = None,
    as_of_position: int | None = None,
) -> Any:
    """Return what is stored as a ``pyarrow.Table``, a row for each experience.

    Columns: the address (``uid``, ``batch``, ``task``, ``run``, ``step``, ``suffix``,
    ``position``), ``reward``, ``policy_version``, lengths, ``finish_reason``, ``refused``;
    ``tokens``, ``logprobs``, ``action_mask`` as lists; texts; ``messages`` and ``info`` as JSON,
    and ``info.KEY`` for each number or text in it; of the annotation set ``state``, ``reason``,
    ``advantage`` (mean over the response), ``advantages``; ``trained_step`` and ``trainer``;
    ``damaged``: why something of the row cannot be read, which is null then.

    Args:
        url: of the store.
        experiment: its name; may be left out where the store has one.
        set: annotation set; by default the first there is.
        step: only what this gradient step was trained on.
        trainer: whose step; by default the one furthest ahead.
        as_of_position: as it was when this was the log's last position.

    Raises:
        InvalidArgumentError: pyarrow is not installed, or there are several experiments.
        UnknownNameError: no such set, step or trainer.
    """
    arrow = pyarrow()
    wanted = Wanted(set, step, trainer)

    async def main() -> Any:
        async with open_store(url, read_only=True) as store:
            names = await store.experiments()
            if experiment is None and len(names) != 1:
                raise InvalidArgumentError(
                    f"{store.url}: say experiment=, one of {', '.join(names)}"
                )
            found = await store.experiment(experiment or names[0])
            async with as_of(found, as_of_position) as source:
                batches = [batch async for batch in record_batches(source, wanted)]
        return arrow.concat_tables(
            [arrow.Table.from_batches([batch]) for batch in batches], promote_options="default"
        )

    return anyio.run(main)


def pyarrow() -> Any:
    """Return the library.

    Raises:
        InvalidArgumentError: it is not installed.
    """
    try:
        import pyarrow as arrow  # noqa: PLC0415 - an optional extra
    except ImportError as error:
        raise InvalidArgumentError(
            "this needs pyarrow: pip install 'trinity-buffer[parquet]'"
        ) from error
    return arrow


@contextmanager
def parquet_writer(path: Path) -> Iterator[Callable[[Any], None]]:
    """Yield what writes record batches into a new Parquet file.

    Raises:
        InvalidArgumentError: pyarrow is not installed.
    """
    pyarrow()
    from pyarrow import parquet  # noqa: PLC0415 - an optional extra

    with ExitStack() as stack:
        writers: list[Any] = []

        def write(batch: Any) -> None:
            if not writers:
                opened = parquet.ParquetWriter(path, batch.schema, compression="zstd")
                writers.append(stack.enter_context(opened))
            writers[0].write_batch(batch)

        yield write


async def record_batches(source: Source, wanted: Wanted) -> AsyncIterator[Any]:
    """Yield record batches of the rows that are wanted, in order of the log; at least one.

    All have the columns of the first: a key of ``info`` that comes up later is in ``info`` alone.

    Raises:
        InvalidArgumentError: pyarrow is not installed.
        UnknownNameError: no such set, step or trainer.
    """
    arrow = pyarrow()
    chosen = await _chosen_set(source, wanted.annotation_set)
    schema: Any = None
    async for rows in _pages(source, wanted):
        columns = await _columns(source, rows, chosen)
        if schema is None:
            schema = _schema(arrow, columns)
        arrays = [arrow.array(columns.get(f.name, [None] * len(rows)), f.type) for f in schema]
        yield arrow.RecordBatch.from_arrays(arrays, schema=schema)
    if schema is None:
        schema = _schema(arrow, {})
        yield arrow.RecordBatch.from_pylist([], schema=schema)


async def _chosen_set(source: Source, wanted: str | None) -> str | None:
    consumers = await source.read(queries.consumers, source.key)
    names = [name for name, row in consumers.items() if row.kind == "strategy"]
    if wanted is not None and wanted not in names:
        known = ", ".join(names) or "none"
        raise UnknownNameError(f"no annotation set {wanted!r} (there: {known})")
    return wanted or next(iter(names), None)


async def _pages(source: Source, wanted: Wanted) -> AsyncIterator[list[ExperienceRow]]:
    limit = sizes().experiences_per_page
    if wanted.step is not None:
        rows = await rows_of_step(source, wanted.step, trainer=wanted.trainer)
        for start in range(0, len(rows), limit):
            yield rows[start : start + limit]
        return
    everything, after = reads.Filter(include_refused=True), -1
    while rows := await source.read(
        reads.experiences, source.key, everything, after=after, limit=limit
    ):
        yield rows
        after = rows[-1].address


async def _columns(
    source: Source, rows: Sequence[ExperienceRow], chosen: str | None
) -> dict[str, list[Any]]:
    def look(tx: Transaction) -> dict[int, list[Fate]]:
        return fates(tx, source.key, rows)

    decided = await source.read(look)
    own = [next((f for f in decided[r.address] if f.annotation_set == chosen), None) for r in rows]
    noted = [f.annotations[0].position for f in own if f is not None and f.annotations]
    recorded, damaged = await readable_events(
        source, [position_of(r.address) for r in rows], FAMILIES
    )
    notes, damaged_notes = await readable_events(source, noted, ["annotation"])
    damaged |= damaged_notes
    found: dict[str, list[Any]] = {}
    for at, (row, fate) in enumerate(zip(rows, own, strict=True)):
        cells = _known(row, recorded.get(position_of(row.address))) | _decided(row, fate, notes)
        cells["damaged"] = _damaged(row, fate, damaged)
        for name, value in cells.items():
            found.setdefault(name, [None] * len(rows))[at] = value
    return found


def _damaged(row: ExperienceRow, fate: Fate | None, damaged: Mapping[int, Damage]) -> str | None:
    notes = () if fate is None else fate.annotations[:1]
    positions = [position_of(row.address), *(note.position for note in notes)]
    told = [f"event {at} cannot be read: {damaged[at]}" for at in positions if at in damaged]
    return "; ".join(told) or None


def _known(row: ExperienceRow, recorded: EventWithSegment | None) -> dict[str, Any]:
    eid = row.eid
    cells = {
        "uid": eid.uid,
        "batch": str(eid.batch),
        "task": str(eid.task),
        "run": eid.run,
        "step": eid.step,
        "suffix": eid.suffix,
        "position": position_of(row.address),
        "reward": row.reward,
        "policy_version": row.policy_version,
        "prompt_length": row.prompt_length,
        "length": row.length,
        "trained_tokens": row.trained_tokens,
        "finish_reason": row.finish_reason,
        "refused": row.refused,
    }
    return cells if recorded is None else cells | _recorded(slot_of(row.address), recorded)


def _recorded(slot: int, recorded: EventWithSegment) -> dict[str, Any]:
    """Return the cells that only the event and its segment have."""
    event, segments = recorded.event, recorded.families.values()
    assert isinstance(recorded.fact, ExperiencesRecorded)  # where the row is of
    objects = {
        name: values[slot] for segment in segments for name, values in segment.objects.items()
    }
    info = objects.get("info") or {}
    cells = {
        "recorded_at": event.recorded_at,
        "actor": event.actor,
        "kind": recorded.fact.columns.kind[slot],
        "tokens": _of(segments, "tokens", slot),
        "logprobs": _of(segments, "logprobs", slot),
        "action_mask": _of(segments, "action_mask", slot),
        "messages": _as_json(objects.get("messages")),
        "info": _as_json(info or None),
    }
    cells |= {name: objects.get(name) for name in _TEXTS}
    flat = {key: value for key, value in info.items() if isinstance(value, str | int | float)}
    return cells | {f"info.{key}": value for key, value in flat.items()}


def _decided(
    row: ExperienceRow, fate: Fate | None, notes: Mapping[int, EventWithSegment]
) -> dict[str, Any]:
    if fate is None:
        return {"state": None if row.refused is None else "refused", "reason": row.refused}
    cells: dict[str, Any] = {"set": fate.annotation_set, "state": fate.state, "reason": fate.reason}
    if not fate.annotations:
        return cells
    first = fate.annotations[0]
    note = notes.get(first.position)
    segments = () if note is None else note.families.values()
    values = _of(segments, "advantages", slot_of(first.address))
    if values is not None and len(values):
        cells |= {"advantage": float(np.mean(values)), "advantages": values}
    steps = [step for note in fate.annotations for step in note.steps]
    for step in steps:
        if step.step is None:
            cells |= {"trainer": step.trainer, "reason": step.reason}
        else:
            cells |= {"trainer": step.trainer, "trained_step": step.step}
            cells["state"] = "committed" if step.committed else "leased"
    return cells


def _of(segments: Any, name: str, slot: int) -> Any:
    segment: Segment
    for segment in segments:
        values = elements_of(segment, name, slot)
        if values is not None:
            return values
    return None


def _as_json(value: Any) -> str | None:
    return None if value is None else json.dumps(value, default=str, ensure_ascii=False)


def _schema(arrow: Any, columns: Mapping[str, Sequence[Any]]) -> Any:
    """Return the columns that every table has, and those of ``info`` that the first page has."""
    text, number, real = arrow.string(), arrow.int64(), arrow.float64()
    texts: tuple[str, ...] = (
        "uid",
        "batch",
        "task",
        "suffix",
        "actor",
        "kind",
        "finish_reason",
        "refused",
    )
    texts += (*_TEXTS, "messages", "info", "set", "state", "reason", "trainer", "damaged")
    numbers: tuple[str, ...] = (
        "run",
        "step",
        "position",
        "policy_version",
        "prompt_length",
        "length",
    )
    numbers += ("trained_tokens", "trained_step")
    fields = [(name, text) for name in texts] + [(name, number) for name in numbers]
    fields += [(name, real) for name in ("recorded_at", "reward", "advantage")]
    fields += [("tokens", arrow.list_(number)), ("action_mask", arrow.list_(arrow.bool_()))]
    fields += [(name, arrow.list_(arrow.float32())) for name in ("logprobs", "advantages")]
    for name, values in columns.items():
        if name.startswith("info."):
            known = [value for value in values if value is not None]
            numeric = all(isinstance(value, int | float) for value in known)
            fields.append((name, real if numeric else text))
    return arrow.schema(fields)
