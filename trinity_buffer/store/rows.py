"""Rows of the projections: their addresses, their values, and what an event makes of them.

The address of a row of an event is ``position * 2**20 + slot``, one integer. It is derived from the
log, hence no surrogate key: rebuilding the projections gives every row the same address. Sorting by
address sorts by position, then by slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, repeat
from typing import Any, NamedTuple

from trinity_buffer.events import (
    BatchLeased,
    BatchPlanned,
    ExperiencesAnnotated,
    ExperiencesRecorded,
    ExperiencesRejected,
    StepDealt,
)
from trinity_buffer.identity import EID, Key
from trinity_buffer.store.tables import consumer, experience, step

SLOT_BITS = 20
MAX_ROWS_PER_EVENT = 1 << SLOT_BITS


def address_of(position: int, slot: int) -> int:
    """Return the address of row ``slot`` of the event at ``position``."""
    return position << SLOT_BITS | slot


def first_address(position: int) -> int:
    """Return the lowest address of the event at ``position``."""
    return position << SLOT_BITS


def position_of(address: int) -> int:
    """Return the position of the event that ``address`` points into."""
    return address >> SLOT_BITS


def slot_of(address: int) -> int:
    """Return the number of the row, within its event, that ``address`` points to."""
    return address & (MAX_ROWS_PER_EVENT - 1)


def written_as(address: int) -> str:
    """Return ``position:slot``, the readable form of an address."""
    return f"{position_of(address)}:{slot_of(address)}"


class ExperienceRow(NamedTuple):
    """An experience as the log knows it, without its segment."""

    address: int
    eid: EID
    reward: float | None
    policy_version: int | None
    prompt_length: int
    length: int
    trained_tokens: int
    finish_reason: str | None
    refused: str | None
    segment: bytes
    digest: bytes


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A planned or sealed batch."""

    batch: Key
    actor: str
    rollouts_per_group: int | None
    planned_at: int | None
    sealed_at: int | None
    expected: int | None
    tasks: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class ConsumerRow:
    """A strategy or a trainer and how far it is; see `tables.consumer`."""

    name: str
    kind: str
    config: dict[str, Any]
    cursor: int
    calls: int
    rejected_groups: int
    token: int
    leased_step: int
    committed_step: int


@dataclass(frozen=True, slots=True)
class StepRow:
    """A gradient step that was handed out; see `tables.step`."""

    step: int
    leased_at: int
    rows: int
    groups: int
    manifest_digest: bytes
    committed_at: int | None
    checkpoint: str | None
    checkpoint_digest: str | None
    chain: bytes | None
    rows_by_rank: list[int] | None


STEP_COLUMNS = (
    'step, leased_at, "rows", "groups", manifest_digest, committed_at, checkpoint, '
    "checkpoint_digest, chain, rows_by_rank"
)


def read_step(row: Sequence[Any]) -> StepRow:
    """Return the value object of a row of `STEP_COLUMNS`."""
    *others, ranks = row
    return StepRow(*[*others, _RANKS.process_result_value(ranks, None)])


def read_consumer(row: Sequence[Any]) -> ConsumerRow:
    """Return the value object of a row of `consumer` from its name on."""
    name, kind, config, *numbers = row
    return ConsumerRow(name, kind, _CONFIG.process_result_value(config, None), *numbers)


_RANKS: Any = step.c.rows_by_rank.type
_CONFIG: Any = consumer.c.config.type


def typed(text_key: str, *, is_int: bool) -> Key:
    """Return a stored key with its type."""
    return int(text_key) if is_int else text_key


EXPERIENCE_COLUMNS = (
    experience.c.address,
    experience.c.batch,
    experience.c.task,
    experience.c.run,
    experience.c.step,
    experience.c.suffix,
    experience.c.int_keys,
    experience.c.reward,
    experience.c.policy_version,
    experience.c.prompt_length,
    experience.c.length,
    experience.c.trained_tokens,
    experience.c.finish_reason,
    experience.c.refused,
    experience.c.segment,
    experience.c.digest,
)


def experience_row(row: Any) -> ExperienceRow:
    """Return the value object of a row of `EXPERIENCE_COLUMNS`."""
    # Unpacked: looked up by name, the columns would take four times as long as all else.
    address, batch, task, run, step, suffix, kinds, *others, segment, digest = row
    eid = EID(
        typed(batch, is_int=bool(kinds & 1)), typed(task, is_int=bool(kinds & 2)), run, step, suffix
    )
    return ExperienceRow._make((int(address), eid, *others, bytes(segment), bytes(digest)))


def rows_recorded_by(position: int, fact: ExperiencesRecorded) -> list[ExperienceRow]:
    """Return the rows that an event made, from the event alone."""
    columns, base = fact.columns, first_address(position)
    eids = map(EID, columns.batch, columns.task, columns.run, columns.step, columns.suffix)
    rows = zip(
        eids,
        columns.reward,
        columns.policy_version,
        columns.prompt_length,
        columns.length,
        columns.trained_tokens,
        columns.finish_reason,
        columns.digest,
        strict=True,
    )
    return [
        ExperienceRow._make((base + slot, *known, fact.refused.get(slot), fact.segment, digest))
        for slot, (*known, digest) in enumerate(rows)
    ]


Row = tuple[Any, ...]
"""All columns of a table in their order, as the drivers take and give them."""


def experience_rows(experiment: int, position: int, fact: ExperiencesRecorded) -> list[Row]:
    """Return the rows of `experience` that an event makes."""
    columns, refused = fact.columns, fact.refused
    number, base = len(columns.batch), first_address(position)
    keys = zip(columns.batch, columns.task, strict=True)
    int_keys = [isinstance(batch, int) + 2 * isinstance(task, int) for batch, task in keys]
    return list(
        zip(
            repeat(experiment, number),
            range(base, base + number),
            map(str, columns.batch),
            map(str, columns.task),
            columns.run,
            columns.step,
            columns.suffix,
            int_keys,
            columns.reward,
            columns.policy_version,
            columns.prompt_length,
            columns.length,
            columns.trained_tokens,
            columns.finish_reason,
            map(refused.get, range(number)) if refused else repeat(None, number),
            repeat(fact.segment, number),
            columns.digest,
            strict=True,
        )
    )


def plan_rows(experiment: int, fact: BatchPlanned, first: int) -> list[Row]:
    """Return the rows of `plan` that an event makes; ``first`` is the ordinal of its first."""
    key = str(fact.batch)
    return [
        (experiment, key, str(task), isinstance(task, int), ordinal)
        for ordinal, task in enumerate(fact.tasks, first)
    ]


def annotation_rows(experiment: int, position: int, fact: ExperiencesAnnotated) -> list[Row]:
    """Return the rows of `annotation` that an event makes."""
    name, planned = fact.consumer, fact.planned
    addressed = zip(fact.experiences, fact.groups, strict=True)
    slots = zip(addressed, count(first_address(position)), strict=False)
    return [
        (experiment, name, slot, address, group, planned[group]) for (address, group), slot in slots
    ]


def rejection_rows(experiment: int, position: int, fact: ExperiencesRejected) -> list[Row]:
    """Return the rows of `rejection` that an event makes."""
    return [
        (experiment, fact.consumer, address, reason, position)
        for address, reason in zip(fact.experiences, fact.reasons, strict=True)
    ]


def delivery_rows(experiment: int, fact: BatchLeased) -> list[Row]:
    """Return the rows of `delivery` that an event makes."""
    name, number, addresses = fact.consumer, fact.step, fact.annotations
    if not fact.source:
        return [(experiment, name, "", address, number) for address in addresses]
    names = ("", *fact.sources)
    return [
        (experiment, name, names[of], address, number)
        for of, address in zip(fact.source, addresses, strict=True)
    ]


def own_rows(fact: BatchLeased) -> int:
    """Return how many rows of a step are of the trainer's own experiment."""
    return len(fact.annotations) - sum(map(bool, fact.source or ()))


def dropped_rows(experiment: int, fact: StepDealt) -> list[Row]:
    """Return the rows of `delivery` that an event takes away."""
    name, number = fact.consumer, fact.step
    sources = fact.dropped_from or ("",) * len(fact.dropped)
    pairs = zip(sources, fact.dropped, strict=True)
    return [(experiment, name, source, address, number) for source, address in pairs]
