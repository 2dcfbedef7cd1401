"""The columns of a step: made with it, or when somebody first looks at them.

What most losses read of a step of usual size is made ahead, while the trainer computes. Of a large
one, of long rows, nothing is: until then it is the bytes that were stored, and a column that no
loss reads is never made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from threading import Lock
from typing import NamedTuple, TypeAlias

import numpy as np

from trinity_buffer.blob import mapped
from trinity_buffer.errors import TrainingError
from trinity_buffer.pipeline.loading.blocks import Array, Block, Field
from trinity_buffer.pipeline.streaming.collate_buffers import (
    Arena,
    PackedMask,
    Places,
    StepMemory,
    put_positions,
    put_rows,
    put_text,
)
from trinity_buffer.sizes import sizes

REWARDS = "token_level_rewards"
WITH_IDS = ("input_ids", "rollout_logprob")
"""Columns that are stored together: to keep the bytes of one takes more than to make it."""

Weights: TypeAlias = Callable[[], "Array | None"]
"""Returns what scaled values are multiples of: the mask, with its weights if it has any.

None: every token of each response is trained.
"""


@dataclass(frozen=True, slots=True)
class RowColumns:
    """Per row of the step; ``responses`` begin at the row's prompt length.

    ``recorded`` says which rows have log-probabilities, None where all have or none has.
    """

    tokens: Field
    lengths: Array
    prompt_lengths: Array
    masks: Field
    responses: dict[str, Field]
    rewards: Sequence[float | None]
    trained_tokens: list[int]
    recorded: Array | None = None


class Making(NamedTuple):
    """How a column is made, once.

    Attributes:
        dtype: of its elements.
        fill: writes all of them into memory that may hold anything; yields after each block of
            rows, of which it lets go.
    """

    dtype: type[np.generic]
    fill: Callable[[Array], Iterator[None]]


class LateColumns:
    """Columns that are made when somebody first looks at one of them: of the same stored bytes.

    After each block these are let go of, so that never both are there whole.

    Args:
        size: elements of each.
        ways: how each is made; let go of then, and with it what it is made of.
    """

    def __init__(self, size: int, ways: Mapping[str, Making]) -> None:
        self._size = size
        self._ways: Mapping[str, Making] | None = ways
        self._made: dict[str, Array] = {}
        self._lock = Lock()  # threads of a trainer may look at the same time

    def column(self, name: str) -> Array:
        """Return one of them.

        Raises:
            TrainingError: making them was interrupted before, and what they are made of is gone.
        """
        with self._lock:
            ways, self._ways = self._ways, None
            if ways is not None:
                made = {name: self._room(how) for name, how in ways.items()}
                _done(zip_longest(*(how.fill(made[name]) for name, how in ways.items())))
                self._made = made
        if not self._made:  # no KeyError: to a mapping it would mean that there is no such column
            raise TrainingError(
                f"{name} of a step cannot be made: an error or Ctrl-C ended that half-way before; "
                "open the stream again, which serves the uncommitted steps as they were"
            )
        return self._made[name]

    def _room(self, how: Making) -> Array:
        size = self._size * np.dtype(how.dtype).itemsize
        large = size > sizes().bytes_read_at_once
        return np.frombuffer(mapped(size) if large else bytearray(size), how.dtype)


class LateColumn(NamedTuple):
    """A column that is made when somebody first looks at a part of it."""

    of: LateColumns
    name: str

    def part(self, elements: slice) -> Array:
        """Return some of its elements, as a view that is the caller's."""
        return self.of.column(self.name)[elements]


def columns_of_step(
    columns: RowColumns, places: Places, memory: StepMemory
) -> Mapping[str, Array | LateColumn]:
    """Return the flat columns of all micro-batches by name, made or to be made."""
    ways = _ways(columns, places, partial(_weights, columns.masks.blocks, places))
    width = sum(np.dtype(how.dtype).itemsize for how in ways.values())
    if places.size * width > sizes().bytes_made_ahead:
        ids = LateColumns(places.size, {n: ways[n] for n in WITH_IDS if n in ways})
        return {
            name: LateColumn(ids, name) if name in WITH_IDS else _late(places, name, how)
            for name, how in ways.items()
        }
    return _made_ahead(columns, places, memory, ways)


def _late(places: Places, name: str, how: Making) -> LateColumn:
    return LateColumn(LateColumns(places.size, {name: how}), name)


def _ways(columns: RowColumns, places: Places, weights: Weights) -> dict[str, Making]:
    """Return how each column is made."""
    tokens, masks = deque(columns.tokens.blocks), deque(columns.masks.blocks)
    ids = partial(put_rows, blocks=tokens, places=places, after_prompt=False)
    found = {
        "input_ids": Making(np.int64, ids),
        "position_ids": Making(np.int64, partial(put_positions, places=places)),
        "attention_mask": Making(np.bool_, partial(put_text, places=places)),
        "action_mask": Making(np.bool_, partial(put_rows, blocks=masks, places=places)),
    }
    if places.padded:
        del found["position_ids"]  # those of the longest row are those of all
    for name, some in columns.responses.items():
        fill = partial(_put_response, blocks=deque(some.blocks), places=places, weights=weights)
        if name == REWARDS:
            fill = partial(fill, last=_rewards_of_whole(columns))
        found[name] = Making(np.float32, fill)
    return found


def _put_response(
    column: Array,
    blocks: deque[Block],
    places: Places,
    weights: Weights,
    last: Array | None = None,
) -> Iterator[None]:
    """Write a column of the responses, as `put_rows` does.

    Args:
        column: may hold anything.
        blocks, places: of it.
        weights: of what is scaled.
        last: ``[rows]``, a number for the last token of each row, NaN for none.
    """
    scaled = any(block.scaled for block in blocks)
    yield from put_rows(column, blocks, places, weights() if scaled else None)
    if last is not None:
        there = ~np.isnan(last) & (places.begins >= 0)
        ends = places.begins + places.lengths
        column[ends[there] - 1] = last[there]


def _rewards_of_whole(columns: RowColumns) -> Array:
    """Return ``[rows]``: the reward of each row that has none for each token; NaN for none."""
    found = np.array(columns.rewards, np.float64)  # None becomes NaN, which no reward is
    found[columns.responses[REWARDS].present(len(found))] = np.nan
    return found


def _weights(masks: Sequence[Block], places: Places, mask: Array | None = None) -> Array | None:
    """Return `Weights`.

    Args:
        masks, places: of the step.
        mask: the column of the masks, if it is there.
    """
    if all(block.data.dtype == np.bool_ for block in masks):
        if all(block.data.all() for block in masks):
            return None
        if mask is not None:
            return mask
        dtype: type[np.generic] = np.bool_
    else:
        dtype = np.float32
    found = np.empty(places.size, dtype)
    _done(put_rows(found, deque(masks), places))
    return found


def _done(blocks: Iterator[object]) -> None:
    for _ in blocks:
        pass


def _made_ahead(
    columns: RowColumns, places: Places, memory: StepMemory, ways: Mapping[str, Making]
) -> dict[str, Array | LateColumn]:
    """Return the columns of a step of usual size, most of them made."""
    late = _waiting(columns, places)
    arena = Arena(memory, places.size, [how.dtype for n, how in ways.items() if n not in late])
    made = {name: arena.column() for name in ways if name not in late}
    mask = made["action_mask"]
    _done(ways["action_mask"].fill(mask))
    weights = _weights(columns.masks.blocks, places, mask)
    for name, how in _ways(columns, places, lambda: weights).items():
        if name in made and name != "action_mask":
            _done(how.fill(made[name]))
    kept = _kept(columns, late, places, weights)
    return {n: made[n] if n in made else _late(places, n, kept[n]) for n in ways}


def _waiting(columns: RowColumns, places: Places) -> set[str]:
    """Return the columns that wait for somebody to look at them.

    Few losses read returns, rewards, or advantages that nobody computed. They wait only if nothing
    but a number of each row, and the mask, has to be kept for them.
    """
    by_mask = all(block.data.dtype == np.bool_ for block in columns.masks.blocks)
    found = {
        name
        for name, some in columns.responses.items()
        if not some.blocks
        or (name == "returns" and by_mask and all(block.scaled for block in some.blocks))
    }
    return found if places.padded else found | {"attention_mask"}


def _kept(
    columns: RowColumns, late: Collection[str], places: Places, weights: Array | None
) -> dict[str, Making]:
    """Return how columns are made later without the bytes that were stored.

    The mask that they are multiples of is that of now, whatever becomes of its memory.
    """
    responses = {n: _copied(some) for n, some in columns.responses.items() if n in late}
    scaled = any(some.blocks for some in responses.values())
    mask = PackedMask.of(weights) if scaled and weights is not None else None
    bare = replace(columns, tokens=Field(), masks=Field(), responses=responses)
    return _ways(bare, places, lambda: None if mask is None else mask.unpacked())


def _copied(some: Field) -> Field:
    return Field([replace(block, data=block.data.copy()) for block in some.blocks])
