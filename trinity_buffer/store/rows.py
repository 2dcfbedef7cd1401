"""Rows of the projections: their addresses, their values, and what an event makes of them.

The address of a row of an event is ``position * 2**20 + slot``, one integer. It is derived from the
log, hence no surrogate key: rebuilding the projections gives every row the same address. Sorting by
address sorts by position, then by slot.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar

from trinity_buffer.errors import StoreError
from trinity_buffer.identity import EID, Key
from trinity_buffer.store.tables import experience

T = TypeVar("T")

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


def format_address(address: int) -> str:
    """Return ``position:slot``, the readable form of an address."""
    return f"{position_of(address)}:{slot_of(address)}"


def tokens_of(prompt_length: int, length: int, trained_tokens: int) -> int:
    """Return how many tokens a trainer computes of an experience: of a pair those of both rows.

    Of a pair the prompt is all of ``length``, and ``trained_tokens`` are its two responses; of a
    prompt that was cut there are none.
    """
    is_pair = prompt_length == length and trained_tokens > 0
    return 2 * length + trained_tokens if is_pair else length


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

    @property
    def num_tokens(self) -> int:
        """See `tokens_of`."""
        return tokens_of(self.prompt_length, self.length, self.trained_tokens)


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


STEP_COLUMNS, CONSUMER_COLUMNS = (
    ", ".join(f'"{column.name}"' for column in fields(row)) for row in (StepRow, ConsumerRow)
)
EXPERIENCE_COLUMNS = ", ".join(column.name for column in experience.columns[1:])
"""All of the table, in its order, but the experiment."""


def parsed(stored: str | None, kind: type[T]) -> T | None:
    """Return the value of a column of JSON, a dict or a list.

    Raises:
        StoreError: it is not JSON of that kind: the file was edited or damaged.
    """
    if stored is None:
        return None
    why: object = f"in place of {kind.__name__}"
    try:
        value = json.loads(stored)
        if isinstance(value, kind):
            return value
        why = f"{type(value).__name__} {why}"
    except (TypeError, ValueError) as error:
        why = error
    raise StoreError(
        f"a value that the store keeps as JSON is damaged ({why}): run `trinity-buffer rebuild`, "
        "which makes it from the log again; if that cannot open the experiment, restore the store "
        "from a backup"
    )


def read_step(row: Sequence[Any]) -> StepRow:
    """Return the value object of a row of `STEP_COLUMNS`."""
    *others, ranks = row
    return StepRow(*[*others, parsed(ranks, list)])


def read_consumer(row: Sequence[Any]) -> ConsumerRow:
    """Return the value object of a row of `CONSUMER_COLUMNS`."""
    name, kind, config, *numbers = row
    return ConsumerRow(name, kind, parsed(config, dict) or {}, *numbers)


def typed(text_key: str, *, is_int: bool) -> Key:
    """Return a stored key with its type."""
    return int(text_key) if is_int else text_key


def experience_row(row: Sequence[Any]) -> ExperienceRow:
    """Return the value object of a row of `EXPERIENCE_COLUMNS`."""
    # Unpacked: looked up by name, the columns would take four times as long as all else.
    address, batch, task, run, step, suffix, kinds, *others, segment, digest = row
    key = int(batch) if kinds & 1 else batch
    eid = EID(key, int(task) if kinds & 2 else task, run, step, suffix)
    return ExperienceRow._make((int(address), eid, *others, bytes(segment), bytes(digest)))
