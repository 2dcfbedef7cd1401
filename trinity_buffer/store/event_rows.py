"""Rows of projections that one event makes by itself, whatever came before it.

Each is a tuple of all columns of its table in their order, as the drivers take and give them.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count, repeat
from typing import Any

from trinity_buffer.events import (
    BatchLeased,
    BatchPlanned,
    ExperiencesAnnotated,
    ExperiencesRecorded,
    ExperiencesRejected,
    StepsCommitted,
)
from trinity_buffer.identity import Key
from trinity_buffer.store.address import first_address

Row = tuple[Any, ...]


def experience_rows(experiment: int, position: int, fact: ExperiencesRecorded) -> list[Row]:
    """Return the rows of `experience` that an event makes."""
    columns, refused = fact.columns, fact.refused
    number, base = len(columns), first_address(position)
    return list(
        zip(
            repeat(experiment, number),
            range(base, base + number),
            map(str, columns.batch),
            map(str, columns.task),
            columns.run,
            columns.step,
            columns.suffix,
            map(_int_keys, columns.batch, columns.task),
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


def _int_keys(batch_key: Key, task: Key) -> int:
    return isinstance(batch_key, int) + 2 * isinstance(task, int)


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


def commit(fact: StepsCommitted) -> dict[str, Any]:
    """Return what the row of `step` of the last step of a commit takes from its event."""
    return {
        "checkpoint": fact.checkpoint,
        "checkpoint_digest": fact.checkpoint_digest,
        "chain": fact.chain,
        "rows_by_rank": list(fact.rows_by_rank[-1]) if fact.rows_by_rank else None,
    }


NOT_COMMITTED: Mapping[str, None] = dict.fromkeys(
    ("committed_at", "checkpoint", "checkpoint_digest", "chain", "rows_by_rank")
)
"""What a row of `step` says until it is committed on the live line, in the order of its columns."""
