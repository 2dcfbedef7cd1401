"""Rows of the projections as values, and how a selected row becomes one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from trinity_buffer.events import ExperiencesRecorded
from trinity_buffer.identity import EID, Key
from trinity_buffer.store.address import first_address
from trinity_buffer.store.tables import (
    experience,
)


class ExperienceRow(NamedTuple):
    """What the log knows of an experience without opening its segment."""

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
    planned_groups_so_far: int
    manifest_digest: bytes
    committed_at: int | None
    checkpoint: str | None
    checkpoint_digest: str | None
    chain: bytes | None
    rows_by_rank: list[int] | None


def typed(text_key: str, *, is_int: bool) -> Key:
    """Return a stored key with its type."""
    return int(text_key) if is_int else text_key


def eid_of(row: Any) -> EID:
    """Return the EID of a row with the columns of `tables.experience`."""
    kinds = row.int_keys
    return EID(
        typed(row.batch, is_int=bool(kinds & 1)),
        typed(row.task, is_int=bool(kinds & 2)),
        row.run,
        row.step,
        row.suffix,
    )


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
    """Return the value object of a selected row."""
    return ExperienceRow(
        int(row.address),
        eid_of(row),
        row.reward,
        row.policy_version,
        row.prompt_length,
        row.length,
        row.trained_tokens,
        row.finish_reason,
        row.refused,
        bytes(row.segment),
        bytes(row.digest),
    )


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
