"""What is stored, as a table: a row for each experience, in record batches of Arrow.

Memory does not grow with the store: a page of experiences is one batch. What stands in ``info``,
and which characters a text has, is unchecked: no such value ends an export.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from anyio.from_thread import start_blocking_portal

from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.events import ExperiencesRecorded
from trinity_buffer.inspector.experience import EventWithSegment, elements_of_rows, readable_events
from trinity_buffer.inspector.fates import Fate, StepView, fates
from trinity_buffer.inspector.output import strict_json, writable
from trinity_buffer.inspector.source import Source, as_of, chosen_set
from trinity_buffer.inspector.step_lines import rows_of_step, trainer_of
from trinity_buffer.lazy import extra
from trinity_buffer.limits import sizes
from trinity_buffer.pipeline.store import open_store
from trinity_buffer.store import writer_queries
from trinity_buffer.store.rows import ExperienceRow, position_of, slot_of

TEXTS = ("prompt_text", "response_text")
_TEXT_COLUMNS = (
    *("uid", "batch", "task", "suffix", "actor", "kind", "finish_reason", "refused"),
    *(*TEXTS, "messages", "info", "set", "state", "reason", "trainer", "damaged"),
)
_NUMBER_COLUMNS = (
    *("run", "step", "position", "policy_version", "prompt_length", "length"),
    *("trained_tokens", "trained_step"),
)
_INFO = "info."


def array_of(arrow: Any, values: Sequence[Any], kind: Any) -> Any:
    """Return values, or arrays of numbers, as an array of ``kind``; null in place of any other."""
    if not arrow.types.is_list(kind):
        try:
            return arrow.array(values, kind)
        except (ValueError, TypeError):  # of Arrow, and of a text that UTF-8 cannot write
            if arrow.types.is_string(kind):
                values = [writable(value) if isinstance(value, str) else None for value in values]
            else:
                values = [*map(_number, values)]
            return arrow.array(values, kind)
    # One array and its offsets: a Python list for each row would be built and thrown away.
    there = [row for row in values if row is not None]
    flat = arrow.array(np.concatenate(there)) if there else arrow.array([], kind.value_type)
    ends = np.zeros(len(values) + 1, np.int32)
    np.cumsum([0 if row is None else len(row) for row in values], out=ends[1:])
    absent = arrow.array([row is None for row in values])
    offsets, elements = arrow.array(ends), flat.cast(kind.value_type)
    return arrow.ListArray.from_arrays(offsets, elements, type=kind, mask=absent)


def _number(value: Any) -> float | None:
    """Return a number as a float, None if none is equal to it."""
    if isinstance(value, float):
        return value
    try:
        return float(value) if isinstance(value, int) and float(value) == value else None
    except OverflowError:
        return None


def schema_of(arrow: Any, columns: Mapping[str, Sequence[Any]]) -> Any:
    """Return the columns that every table has, and those of ``info`` that the first page has."""
    text, number, real = arrow.string(), arrow.int64(), arrow.float64()
    fields = [(name, text) for name in _TEXT_COLUMNS]
    fields += [(name, number) for name in _NUMBER_COLUMNS]
    fields += [(name, real) for name in ("recorded_at", "reward", "advantage")]
    fields += [("tokens", arrow.list_(number)), ("action_mask", arrow.list_(arrow.bool_()))]
    fields += [(name, arrow.list_(arrow.float32())) for name in ("logprobs", "advantages")]
    for name, values in columns.items():
        if name.startswith(_INFO):
            known = [value for value in values if value is not None]
            numeric = all(isinstance(value, int | float) for value in known)
            fields.append((name, real if numeric else text))
    return arrow.schema(fields)


FAMILIES = ("light", "tokens", "text")
_TENSORS = ("tokens", "logprobs", "action_mask")
_OF_THE_SET = ("set", "state", "reason", "trainer", "trained_step")


def to_arrow(
    url: str,
    experiment: str | None = None,
    *,
    set: str | None = None,  # noqa: A002 - the word for it
    step: int | None = None,
    trainer: str | None = None,
    as_of_position: int | None = None,
) -> Any:
    """Return the stored experiences as a ``pyarrow.Table``, one row each.

    Columns: the address (``uid``, ``batch``, ``task``, ``run``, ``step``, ``suffix``,
    ``position``), ``reward`` (of the scoring that the set was run with, if any),
    ``policy_version``, lengths, ``finish_reason``, ``refused``;
    ``tokens``, ``logprobs``, ``action_mask`` as lists; texts; ``messages`` and ``info`` as JSON,
    and ``info.KEY`` for each number or text in it; of the annotation set ``state``, ``reason``,
    ``advantages`` (one number if all trained tokens have it, the others 0), ``advantage`` (it, else
    the mean over all response tokens), ``trained_step``, ``trainer``; ``damaged``: why something of
    it, null then, is unreadable. ``state`` is ``refused``, ``unseen``, ``waiting``, ``rejected``,
    ``annotated`` (in no step: what `groups` calls ready), ``leased``, ``committed``, or ``skipped``
    (committed, and the step changed no weights). From ``state`` to ``trained_step`` a row is about
    one delivery: of ``step``, else committed before skipped before leased before ``rejected`` by a
    trainer, of the trainer furthest ahead, its first step. In
    ``info.KEY``, of numbers if its first page is, else of texts, what does not fit is null.

    Args:
        url: of the store.
        experiment: its name; may be left out where the store has one.
        set: annotation set; by default the trainer's, else the first there is.
        step: only what this gradient step was trained on.
        trainer: whose step, by default the one furthest ahead; without ``step`` by default all.
        as_of_position: as it was when this was the log's last position.

    Raises:
        InvalidArgumentError: pyarrow is not installed, or there are several experiments.
        UnknownNameError: no such set, step or trainer.
    """
    arrow = extra("pyarrow", "parquet")

    async def main() -> Any:
        async with open_store(url, read_only=True) as store:
            names = await store.experiments()
            if experiment is None and len(names) != 1:
                known = ", ".join(names)
                raise InvalidArgumentError(f"{store.url}: say experiment=, one of {known}")
            handle = await store.experiment(experiment or names[0])
            async with as_of(handle, as_of_position) as source:
                batches = record_batches(source, set, step, trainer)
                return arrow.Table.from_batches([batch async for batch in batches])

    with start_blocking_portal() as portal:  # a notebook's own loop runs in this thread
        return portal.call(main)


async def record_batches(
    source: Source, annotation_set: str | None, step: int | None, trainer: str | None
) -> AsyncGenerator[Any, None]:
    """Yield record batches of the rows that are wanted, in order of the log; at least one.

    All have the columns of the first: a key of ``info`` that comes up later is in ``info`` alone.

    Args:
        source: the experiment.
        annotation_set: whose advantages, state and reason; None: that of the trainer, or the first.
        step: only the rows of this gradient step; None: all that are stored.
        trainer: whose steps; None: of ``step`` the one furthest ahead, else all.

    Raises:
        InvalidArgumentError: pyarrow is not installed.
        UnknownNameError: no such set, step or trainer.
    """
    arrow = extra("pyarrow", "parquet")
    consumers = await source.read(writer_queries.consumers, source.key)
    if step is None and trainer is None:
        trainers = [row for row in consumers.values() if row.kind == "trainer"]
        names = [row.name for row in sorted(trainers, key=lambda row: -row.leased_step)]
    else:
        names = [await trainer_of(source, trainer)]
    own = chosen_set(consumers, annotation_set, next(iter(names), None))
    scoring = consumers[own].config.get("rewards") if own in consumers else None

    async def columns_of(rows: Sequence[ExperienceRow]) -> dict[str, list[Any]]:
        decided = await source.read(fates, source.key, rows)
        became = [_what_became(row, decided[row.address], own, names, step) for row in rows]
        noted = [note for note, _ in became]
        addresses = [row.address for row in rows]
        recorded, damaged = await readable_events(source, _by_position(addresses), FAMILIES)
        notes, damaged_notes = await readable_events(source, _by_position(noted), ["annotation"])
        columns = _known(rows)
        if scoring is not None:  # whose rewards stand in place of the recorded ones, as in `groups`
            rewarded = (source.key, scoring, addresses)
            rewards = await source.read(writer_queries.assigned_rewards, *rewarded)
            columns["reward"] = [*map(rewards.get, addresses)]
        columns |= _gathered(addresses, recorded, _recorded)
        columns |= {name: [cells.get(name) for _, cells in became] for name in _OF_THE_SET}
        columns |= _gathered(noted, notes, _scored)
        damaged |= damaged_notes
        columns["damaged"] = [None] * len(rows)
        for place, both in enumerate(zip(addresses, noted, strict=True) if damaged else ()):
            positions = [position_of(address) for address in both if address is not None]
            why = [f"event {at} cannot be read: {damaged[at]}" for at in positions if at in damaged]
            columns["damaged"][place] = "; ".join(why) or None
        return columns

    schema: Any = None
    async for rows in _pages(source, None if step is None else (step, names[0])):
        columns = await columns_of(rows)
        # Batches of one table share a schema, so the first page decides it.
        if schema is None:
            schema = schema_of(arrow, columns)
        nothing = [None] * len(rows)
        arrays = [array_of(arrow, columns.get(f.name, nothing), f.type) for f in schema]
        yield arrow.RecordBatch.from_arrays(arrays, schema=schema)
    if schema is None:
        yield arrow.RecordBatch.from_pylist([], schema=schema_of(arrow, {}))


async def _pages(source: Source, of: tuple[int, str] | None) -> AsyncIterator[list[ExperienceRow]]:
    """Yield the rows of a step of a trainer, or all; each page asks the same questions once."""
    limit = 2 * sizes.experiences_per_page
    if of is not None:
        step, trainer = of
        rows = await rows_of_step(source, step, trainer=trainer)
        for start in range(0, len(rows), limit):
            yield rows[start : start + limit]
        return
    everything, after = writer_queries.Filter(include_refused=True), -1
    while rows := await source.read(
        writer_queries.experiences, source.key, everything, after=after, limit=limit
    ):
        yield rows
        after = rows[-1].address


def _by_position(addresses: Iterable[int | None]) -> dict[int, list[int]]:
    """Return position of an event -> the places of its rows among ``addresses``."""
    places: dict[int, list[int]] = defaultdict(list)
    for place, address in enumerate(addresses):
        if address is not None:
            places[position_of(address)].append(place)
    return places


def _known(rows: Sequence[ExperienceRow]) -> dict[str, list[Any]]:
    """Return the columns that the log knows without opening a segment."""
    columns: dict[str, list[Any]] = {"position": [position_of(row.address) for row in rows]}
    for name in ("uid", "run", "step", "suffix", "batch", "task"):
        columns[name] = [getattr(row.eid, name) for row in rows]
    for name in ("batch", "task"):
        columns[name] = [*map(str, columns[name])]
    # What no table has, such as the digest, goes by the schema.
    known = zip(ExperienceRow._fields, zip(*rows, strict=True), strict=True)
    return columns | {name: [*values] for name, values in known}


def _gathered(
    addresses: Sequence[int | None],
    events: Mapping[int, EventWithSegment],
    cells: Callable[[EventWithSegment, Sequence[int]], Mapping[str, Sequence[Any]]],
) -> dict[str, list[Any]]:
    """Return the columns of what ``cells`` gives of some rows of an event."""
    columns: dict[str, list[Any]] = {}
    for position, places in _by_position(addresses).items():
        if position not in events:
            continue
        slots = [slot_of(addresses[place] or 0) for place in places]
        for name, values in cells(events[position], slots).items():
            column = columns.setdefault(name, [None] * len(addresses))
            for place, value in zip(places, values, strict=True):
                column[place] = value
    return columns


def _recorded(recorded: EventWithSegment, slots: Sequence[int]) -> dict[str, list[Any]]:
    """Return the cells that only the event and its segment have."""
    event, segment = recorded.event, recorded.segment
    assert isinstance(recorded.fact, ExperiencesRecorded)  # where the rows are of
    nothing: list[Any] = [None] * len(slots)
    objects = {name: values.values(slots) for name, values in segment.objects.items()}
    infos = [
        None if info is None else {str(key): value for key, value in info.items()}
        for info in objects.get("info", nothing)
    ]
    cells: dict[str, list[Any]] = {
        "recorded_at": [event.recorded_at] * len(slots),
        "actor": [event.actor] * len(slots),
        "kind": [recorded.fact.columns.kind[slot] for slot in slots],
        "messages": [_as_json(messages) for messages in objects.get("messages", nothing)],
        "info": [_as_json(info or None) for info in infos],
    }
    cells |= {name: elements_of_rows(segment, name, slots) for name in _TENSORS}
    cells |= {name: objects.get(name, nothing) for name in TEXTS}
    flat: dict[str, list[Any]] = {}
    for at, info in enumerate(infos):
        for key, value in (info or {}).items():
            if isinstance(value, str | int | float):
                flat.setdefault(writable(f"{_INFO}{key}"), nothing.copy())[at] = value
    return cells | flat


_STATES = ("trained", "skipped", "leased", "rejected")


def _what_became(
    row: ExperienceRow, by_set: list[Fate], own: str | None, trainers: list[str], wanted: int | None
) -> tuple[int | None, dict[str, Any]]:
    """Return the annotation that the cells of a row are about, and those of the set ``own``."""
    fate = next((fate for fate in by_set if fate.annotation_set == own), None)
    if fate is None:
        return None, {"state": None if row.refused is None else "refused", "reason": row.refused}
    known = [
        (note, step)
        for note, steps in fate.annotations.items()
        for step in steps
        if step.trainer in trainers and wanted in (None, step.step)
    ]

    def order(delivery: tuple[int, StepView]) -> tuple[int, int, int]:
        step = delivery[1]
        return _STATES.index(step.state), trainers.index(step.trainer), step.step or 0

    # Committed before skipped before leased before rejected; see `to_arrow`.
    note, step = min(known, key=order, default=(fate.first, None))
    cells: dict[str, Any] = {"set": fate.annotation_set, "state": fate.state, "reason": fate.reason}
    if step is not None:
        state = "committed" if step.state == "trained" else step.state
        cells |= {"state": state, "reason": step.reason}
        cells |= {"trainer": step.trainer, "trained_step": step.step}
    return note, cells


def _scored(note: EventWithSegment, slots: Sequence[int]) -> dict[str, list[Any]]:
    columns = elements_of_rows(note.segment, "advantages", slots)
    values = [row if row is not None and len(row) else None for row in columns]
    means = [None if row is None else float(row.mean(dtype=float)) for row in values]
    return {"advantages": values, "advantage": means}


def _as_json(value: Any) -> str | None:
    return None if value is None else strict_json(value, str)
