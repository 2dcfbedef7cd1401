"""Collates rows into micro-batches of full-length, token-aligned tensors, padded or packed.

Element t describes token t; a response-aligned column is placed from ``prompt_length`` on, and
position 0 holds 0.

In a step of usual size, the columns that most losses read are made ahead, while the trainer
computes. In a large step of long rows, every column stays in its stored bytes until it is first
read, and a column that no loss reads is never made.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress, repeat, zip_longest
from threading import Lock
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from trinity_buffer.algorithm.layout import BatchLayout, Totals
from trinity_buffer.codec.blob import mapped
from trinity_buffer.errors import InvalidArgumentError, TrainingError
from trinity_buffer.limits import sizes
from trinity_buffer.pipeline.annotate.run_rewards import mean_over_runs
from trinity_buffer.pipeline.load.blocks import Array, Block, Field, field_of_values
from trinity_buffer.pipeline.load.columns import LoadedRows
from trinity_buffer.pipeline.manifest import Manifest, MicroBatchPlan
from trinity_buffer.pipeline.train.buffers import (
    Arena,
    PackedMask,
    Part,
    Places,
    StepMemory,
    put_positions,
    put_rows,
    put_text,
)
from trinity_buffer.pipeline.train.microbatch import LazyTensors, MicroBatch
from trinity_buffer.pipeline.train.moving import Column, Mover

REWARDS = "token_level_rewards"
WITH_IDS = ("input_ids", "rollout_logprob")
"""Columns stored in one family: bytes kept for one of them take more than making it."""

Weights: TypeAlias = Callable[[], "Array | None"]
"""Returns the factors of scaled values: the action mask, with its weights if it has any.

None: every token of each response is trained.
"""


@dataclass(frozen=True, slots=True)
class RowColumns:
    """The inputs of collation, per row of the step; ``responses`` begin at the prompt length.

    ``recorded`` tells which rows have log-probabilities, None if all or none have.
    """

    tokens: Field
    lengths: Array
    prompt_lengths: Array
    masks: Field
    responses: dict[str, Field]
    rewards: Sequence[float | None]
    trained_tokens: list[int]
    recorded: Array | None = None


class ColumnRecipe(NamedTuple):
    """How a column is made, once.

    Attributes:
        dtype: dtype of its elements.
        fill: writes all elements into uninitialized memory; yields after each block of rows, which
            it has released by then.
    """

    dtype: type[np.generic]
    fill: Callable[[Array], Iterator[None]]


class LazyColumns:
    """Columns of the same stored bytes, all made when one of them is first read.

    Stored bytes are released block by block, so that they and the columns never exist in full at
    the same time.

    Args:
        size: number of elements of each.
        ways: recipe of each, released afterwards together with its inputs.
    """

    def __init__(self, size: int, ways: Mapping[str, ColumnRecipe]) -> None:
        self._size = size
        self._ways: Mapping[str, ColumnRecipe] | None = ways
        self._made: dict[str, Array] = {}
        self._lock = Lock()  # threads of a trainer may read at the same time

    def column(self, name: str) -> Array:
        """Return a column.

        Raises:
            TrainingError: an earlier attempt was interrupted, and the inputs are gone.
        """
        with self._lock:
            ways, self._ways = self._ways, None
            if ways is not None:
                made = {name: self._room(how) for name, how in ways.items()}
                _done(zip_longest(*(how.fill(made[name]) for name, how in ways.items())))
                self._made = made
        if not self._made:  # not a KeyError, which a mapping turns into "no such column"
            raise TrainingError(
                f"{name} of a step cannot be made: an error or Ctrl-C ended that half-way before; "
                "open the stream again, which serves the uncommitted steps as they were"
            )
        return self._made[name]

    def _room(self, how: ColumnRecipe) -> Array:
        size = self._size * np.dtype(how.dtype).itemsize
        large = size > sizes().bytes_read_at_once
        return np.frombuffer(mapped(size) if large else bytearray(size), how.dtype)


class LazyColumn(NamedTuple):
    """A column that is made when a part of it is first read."""

    of: LazyColumns
    name: str

    def part(self, elements: slice) -> Array:
        """Return a view of some elements, which the caller may change."""
        return self.of.column(self.name)[elements]


def columns_of_step(
    columns: RowColumns, places: Places, memory: StepMemory
) -> Mapping[str, Array | LazyColumn]:
    """Return the flat columns of all micro-batches by name, made or lazy."""
    ways = _ways(columns, places, partial(_weights, columns.masks.blocks, places))
    width = sum(np.dtype(how.dtype).itemsize for how in ways.values())
    if places.size * width > sizes().bytes_made_ahead:
        ids = LazyColumns(places.size, {n: ways[n] for n in WITH_IDS if n in ways})
        return {
            name: LazyColumn(ids, name) if name in WITH_IDS else _late(places, name, how)
            for name, how in ways.items()
        }
    return _made_ahead(columns, places, memory, ways)


def _late(places: Places, name: str, how: ColumnRecipe) -> LazyColumn:
    return LazyColumn(LazyColumns(places.size, {name: how}), name)


def _ways(columns: RowColumns, places: Places, weights: Weights) -> dict[str, ColumnRecipe]:
    """Return the recipe of each column."""
    tokens, masks = deque(columns.tokens.blocks), deque(columns.masks.blocks)
    ids = partial(put_rows, blocks=tokens, places=places, after_prompt=False)
    recipes = {
        "input_ids": ColumnRecipe(np.int64, ids),
        "position_ids": ColumnRecipe(np.int64, partial(put_positions, places=places)),
        "attention_mask": ColumnRecipe(np.bool_, partial(put_text, places=places)),
        "action_mask": ColumnRecipe(np.bool_, partial(put_rows, blocks=masks, places=places)),
    }
    if places.padded:
        del recipes["position_ids"]  # one row of positions serves all padded rows
    for name, field in columns.responses.items():
        fill = partial(_put_response, blocks=deque(field.blocks), places=places, weights=weights)
        if name == REWARDS:
            fill = partial(fill, last=_rewards_of_whole(columns))
        recipes[name] = ColumnRecipe(np.float32, fill)
    return recipes


def _put_response(
    column: Array, blocks: deque[Block], places: Places, weights: Weights, last: Array | None = None
) -> Iterator[None]:
    """Write a column of the responses by `put_rows`.

    Args:
        column: uninitialized memory.
        blocks, places: its blocks, and the places of the rows.
        weights: factors of scaled values.
        last: ``[rows]``, a value for the last token of each row, NaN for none.
    """
    scaled = any(block.scaled for block in blocks)
    yield from put_rows(column, blocks, places, weights() if scaled else None)
    if last is not None:
        there = ~np.isnan(last) & (places.begins >= 0)
        ends = places.begins + places.lengths
        column[ends[there] - 1] = last[there]


def _rewards_of_whole(columns: RowColumns) -> Array:
    """Return ``[rows]``: the reward of rows without token-level rewards; NaN for the others."""
    rewards = np.array(columns.rewards, np.float64)  # None becomes NaN; stored rewards are finite
    rewards[columns.responses[REWARDS].present(len(rewards))] = np.nan
    return rewards


def _weights(masks: Sequence[Block], places: Places, mask: Array | None = None) -> Array | None:
    """Return the result of `Weights`.

    Args:
        masks, places: blocks of the action mask, and the places of the rows.
        mask: the column of the mask, if it is made already.
    """
    if all(block.data.dtype == np.bool_ for block in masks):
        if all(block.data.all() for block in masks):
            return None
        if mask is not None:
            return mask
        dtype: type[np.generic] = np.bool_
    else:
        dtype = np.float32
    weights = np.empty(places.size, dtype)
    _done(put_rows(weights, deque(masks), places))
    return weights


def _done(blocks: Iterator[object]) -> None:
    for _ in blocks:
        pass


def _made_ahead(
    columns: RowColumns, places: Places, memory: StepMemory, ways: Mapping[str, ColumnRecipe]
) -> dict[str, Array | LazyColumn]:
    """Return the columns of a step of usual size, most of them made ahead."""
    late = _waiting(columns, places)
    arena = Arena(memory, places.size, [how.dtype for n, how in ways.items() if n not in late])
    made = {name: arena.column() for name in ways if name not in late}
    # The mask first: scaled columns are multiples of it.
    mask = made["action_mask"]
    _done(ways["action_mask"].fill(mask))
    weights = _weights(columns.masks.blocks, places, mask)
    for name, how in _ways(columns, places, lambda: weights).items():
        if name in made and name != "action_mask":
            _done(how.fill(made[name]))
    recipes = _detached(columns, late, places, weights)
    return {n: made[n] if n in made else _late(places, n, recipes[n]) for n in ways}


def _waiting(columns: RowColumns, places: Places) -> set[str]:
    """Return the columns that are made only when read.

    Few losses read returns, rewards, or advantages that were not computed. They stay lazy only if
    that keeps no more than the mask and one number per row alive.
    """
    by_mask = all(block.data.dtype == np.bool_ for block in columns.masks.blocks)
    names = {
        name
        for name, field in columns.responses.items()
        if not field.blocks
        or (name == "returns" and by_mask and all(block.scaled for block in field.blocks))
    }
    return names if places.padded else names | {"attention_mask"}


def _detached(
    columns: RowColumns, late: Collection[str], places: Places, weights: Array | None
) -> dict[str, ColumnRecipe]:
    """Return recipes of lazy columns that do not refer to the stored bytes.

    The mask is copied, since the memory of its column may change before they are made.
    """
    responses = {n: _copied(field) for n, field in columns.responses.items() if n in late}
    # Without scaled columns the mask need not be kept at all.
    scaled = any(field.blocks for field in responses.values())
    mask = PackedMask.of(weights) if scaled and weights is not None else None
    bare = replace(columns, tokens=Field(), masks=Field(), responses=responses)
    return _ways(bare, places, lambda: None if mask is None else mask.unpacked())


def _copied(field: Field) -> Field:
    return Field([replace(block, data=block.data.copy()) for block in field.blocks])


T = TypeVar("T")

OPTIONAL = {"teacher_logprobs": "teacher_logprob"}
"""Response-aligned columns that a step has only if all rows have them: stored -> batch name."""


def collate_step(
    manifest: Manifest,
    rows: LoadedRows,
    *,
    rank: int = 0,
    world: int = 1,
    mover: Mover | None = None,
    memory: StepMemory | None = None,
) -> list[MicroBatch]:
    """Return the micro-batches of one rank, each with the denominators of the whole step.

    A stored pair becomes two rows, the chosen one first. A micro-batch without rows has tensors of
    the shapes ``[0, 1]``, packed ``[0]``. A step of which no row is left has no micro-batches.

    Args:
        manifest, rows: the manifest of the step, and its rows.
        rank, world: the rank, and the number of ranks.
        mover: moves the tensors to their device; None: they stay on the CPU.
        memory: memory of earlier steps to reuse.

    Raises:
        InvalidArgumentError: the step is partitioned over another number of ranks.
    """
    _require_ranks(manifest, world)
    if not manifest.groups:
        return []
    columns, size = _columns(manifest, rows)
    layout = _layout_of_step(manifest, columns, size, world)
    plans = [plan for plan in manifest.microbatches if plan.rank == rank]
    wide = [replace(plan, start=size * plan.start, stop=size * plan.stop) for plan in plans]
    places = _places(columns, wide, padded=manifest.layout == "padded")
    flat = dict(columns_of_step(columns, places, memory or StepMemory()))
    if any(rows.facts.sampling):
        flat |= _temperature(manifest, rows, places)
    runs = run_numbers(manifest, rows) if manifest.by_run else None
    mover = mover or Mover("cpu")
    batches = []
    for plan, part in zip(plans, places.parts, strict=True):
        parts = {name: _part(column, part) for name, column in flat.items()}
        if places.padded:
            parts["position_ids"] = mover.positions(part.shape)
        tensors = mover.columns(parts | _per_row(manifest, plan, size, columns.recorded, runs))
        if not places.padded:
            tensors |= _boundaries(columns.lengths[part.rows], mover)
        if "rollout_logprob" in tensors:
            tensors["old_logprob"] = tensors["rollout_logprob"]
        chosen = slice(plan.start, plan.stop)
        modal = [mover.inputs(inputs) for inputs in _each(rows.multi_modal[chosen], size)]
        versions = list(_each(rows.facts.policy_versions[chosen], size))
        mine = replace(layout, cu_seqlens=tensors.get("cu_seqlens"))
        batches.append(
            MicroBatch(
                LazyTensors(tensors), mine, modal, versions, rows.unrecorded, rows.unscorable
            )
        )
    return batches


def _temperature(manifest: Manifest, rows: LoadedRows, places: Places) -> dict[str, Array]:
    """Return the column of temperatures, if some row was sampled at another one than 1.

    An expert's rows have none: they were not sampled from the policy.
    """
    expert = manifest.source or [0] * len(rows.facts)
    hot = [
        (row, begin, end, temperature)
        for row, spans in enumerate(rows.facts.sampling)
        for begin, end, temperature, _ in (() if expert[row] else spans or ())
        if temperature != 1
    ]
    if not hot:
        return {}
    column = np.ones(places.size, np.float32)
    for row, begin, end, temperature in hot:
        first = int(places.begins[row])
        if first >= 0:  # on this rank
            column[first + begin : first + end] = temperature
    return {"temperature": column}


def _require_ranks(manifest: Manifest, world: int) -> None:
    if manifest.world_size != world:
        raise InvalidArgumentError(
            f"step {manifest.step} is dealt to {manifest.world_size} ranks, not to {world}"
        )


def rows_in(microbatches: Sequence[MicroBatch], rows: LoadedRows) -> int:
    """Return the number of rows of a manifest in the micro-batches; a pair counts as one."""
    size = 2 if rows.field("chosen").blocks else 1
    return sum(len(microbatch.policy_versions) for microbatch in microbatches) // size


def _each(items: Sequence[T], size: int) -> Sequence[T]:
    """Repeat every item ``size`` times."""
    return items if size == 1 else [item for item in items for _ in range(size)]


def _per_row(
    manifest: Manifest, plan: MicroBatchPlan, size: int, recorded: Array | None, runs: Array | None
) -> dict[str, Column]:
    """Return the columns ``[N]`` that identify each row."""
    chosen = slice(plan.start, plan.stop)
    slots = np.arange(plan.start, plan.stop, dtype=np.int32).repeat(size)
    groups = np.array(manifest.groups[chosen], np.int32).repeat(size)
    columns: dict[str, Column] = {
        "sample_index": slots,
        "group_index": groups,
        "step": np.full(len(slots), manifest.step, np.int32),
    }
    if manifest.sources:
        columns["expert_mask"] = np.array(_each(manifest.source[chosen], size)) > 0
    if recorded is not None:
        columns["logprob_mask"] = recorded[chosen]
    if runs is not None:
        columns["run_index"] = runs[chosen].repeat(size)
    return columns


def run_numbers(manifest: Manifest, rows: LoadedRows) -> Array:
    """Return an ``int32`` for each row of a step that is equal for the rows of one run."""
    groups = np.array(manifest.groups, np.int64)
    keys = (groups << 32) + np.array(rows.facts.runs, np.int64)
    order = np.argsort(keys, kind="stable")
    numbers = np.empty(len(keys), np.int32)
    numbers[order] = np.cumsum(np.diff(keys[order], prepend=keys[order[:1]]) != 0)
    return numbers


def rewards_of(manifest: Manifest, rows: LoadedRows) -> Sequence[float | None]:
    """Return the reward of each row; a row without one takes that of the last row of its run."""
    facts = rows.facts
    if not manifest.by_run or None not in facts.rewards:
        return facts.rewards
    last: dict[tuple[int, int], tuple[int, float | None]] = {}
    runs = list(zip(manifest.groups, facts.runs, strict=True))
    for run, step, reward in zip(runs, facts.steps, facts.rewards, strict=True):
        if run not in last or step >= last[run][0]:
            last[run] = step, reward
    pairs = zip(runs, facts.rewards, strict=True)
    return [last[run][1] if reward is None else reward for run, reward in pairs]


def mean_reward(manifest: Manifest, rows: LoadedRows) -> float | None:
    """Return the mean reward of the trainer's own rows of a step, each run once; None: unknown.

    The reward of a row with token-level rewards alone is their sum.
    """
    facts = rows.facts
    rewards = np.array(facts.rewards, np.float64)
    field, unknown = rows.field("token_level_reward"), np.flatnonzero(np.isnan(rewards))
    if field.blocks and len(unknown):
        values = field.values(len(facts))
        for row in unknown.tolist():
            of_tokens = values[row]
            if isinstance(of_tokens, float):
                rewards[row] = of_tokens * facts.trained_tokens[row]
            elif of_tokens is not None:
                rewards[row] = of_tokens.sum()
    own = np.flatnonzero(np.array(manifest.source or [0] * len(facts)) == 0)
    columns = (manifest.groups, facts.runs, facts.steps)
    return mean_over_runs(rewards[own], *(np.array(column, np.int64)[own] for column in columns))


def known_versions(manifest: Manifest, rows: LoadedRows) -> list[int]:
    """Return the known policy versions of the trainer's own rows of a step."""
    versions = rows.facts.policy_versions
    expert = manifest.source or repeat(0)
    return [v for v, of in zip(versions, expert, strict=False) if v is not None and not of]


def lacking_of(field: str, manifest: Manifest, rows: LoadedRows) -> list[int]:
    """Return the rows of a step without a field; see `rewards_of`."""
    missing = rows.lacking(field)
    if field != "reward" or not missing:
        return missing
    rewards = rewards_of(manifest, rows)
    return [row for row in missing if rewards[row] is None]


def _layout_of_step(manifest: Manifest, columns: RowColumns, size: int, world: int) -> BatchLayout:
    """Return the denominators over all rows, over the usual and over the expert's rows."""
    groups, tokens = _each(manifest.groups, size), columns.trained_tokens
    of = _each(manifest.source, size)
    total = usual = _totals(groups, tokens)
    if any(of):
        own = [not source for source in of]
        usual = _totals(list(compress(groups, own)), list(compress(tokens, own)))
    return BatchLayout(
        total=total,
        usual=usual,
        expert=_totals(list(compress(groups, of)), list(compress(tokens, of))),
        normalizer=manifest.normalizer,
        world_size=world,
    )


def _totals(groups: Sequence[int], tokens: Sequence[int]) -> Totals:
    """Return the denominators over rows with these groups and numbers of trained tokens."""
    return Totals(
        tokens=sum(tokens),
        sequences=len(tokens),
        groups=len(set(groups)),
        active_sequences=len(tokens) - tokens.count(0),
    )


def _part(column: Array | LazyColumn, part: Part) -> Column:
    """Return the part of a column in one micro-batch, or a function that makes it."""
    if isinstance(column, LazyColumn):
        return lambda: column.part(part.elements).reshape(part.shape)
    return column[part.elements].reshape(part.shape)


def _columns(manifest: Manifest, rows: LoadedRows) -> tuple[RowColumns, int]:
    """Return the columns, and their number of rows per row of the manifest: 2 for pairs."""
    if rows.field("chosen").blocks:
        return _halves(rows), 2
    masks, number = rows.field("action_mask"), len(rows.facts)
    stored = {
        "rollout_logprob": "logprobs",
        "advantages": "advantages",
        "returns": "returns",
        REWARDS: "token_level_reward",
    }
    responses = {name: rows.field(field) for name, field in stored.items()}
    rewards = rewards_of(manifest, rows)
    if any(manifest.source):
        # Log-probabilities of an expert's rows are not the policy's, so they become 0.
        expert = np.array(manifest.source) > 0
        responses = {name: field.without(expert) for name, field in responses.items()}
        rewards = [None if of else value for value, of in zip(rewards, expert, strict=True)]
    for stored_name, name in OPTIONAL.items():
        field = rows.field(stored_name)
        if not field.missing(number):
            responses[name] = field
    recorded = responses["rollout_logprob"].present(number)
    # A mixed step may have only the expert's rows left, whose zeros no loss reads.
    is_of_experts = bool(manifest.source) and all(manifest.source)
    if not (recorded.any() or is_of_experts):
        del responses["rollout_logprob"]  # zeros would mean probabilities of 1
    if masks.missing(number):
        raise InvalidArgumentError(
            "a row of the step has neither an action mask nor a pair of answers: run `verify`"
        )
    tokens = rows.field("tokens")
    prompts = np.array(rows.facts.prompt_lengths)
    row_columns = RowColumns(
        tokens,
        tokens.sizes(number),
        prompts,
        masks,
        responses,
        rewards,
        rows.facts.trained_tokens,
        recorded if (recorded.any() or is_of_experts) and not recorded.all() else None,
    )
    return row_columns, 1


def _halves(rows: LoadedRows) -> RowColumns:
    """Return the columns of pairs as alternating rows: prompt + chosen, prompt + rejected."""
    pairs = zip(*(rows.values(name) for name in ("tokens", "chosen", "rejected")), strict=True)
    answers: list[Any] = [(prompt, half) for prompt, *both in pairs for half in both]
    names = ("advantages", "returns", REWARDS)
    tokens = [np.concatenate([prompt, half]) for prompt, half in answers]
    return RowColumns(
        field_of_values(tokens),
        np.array([len(ids) for ids in tokens]),
        np.array([len(prompt) for prompt, _ in answers]),
        field_of_values([np.ones(len(half), np.bool_) for _, half in answers]),
        {name: Field() for name in names},
        [None] * len(answers),
        [len(half) for _, half in answers],
    )


def row_lengths(manifest: Manifest, rows: LoadedRows, *, longest: bool = False) -> list[int]:
    """Return the length of each stored pair for `plan_microbatches`, or of its longer half."""
    sizes = _halves(rows).lengths.tolist()
    of_pair = max if longest or manifest.layout == "padded" else sum
    return [of_pair(pair) for pair in zip(sizes[0::2], sizes[1::2], strict=True)]


def _places(columns: RowColumns, plans: Sequence[MicroBatchPlan], *, padded: bool) -> Places:
    lengths = columns.lengths
    begins, extents = np.full(len(lengths), -1, np.int64), lengths
    if padded:
        extents = np.zeros(len(lengths), np.int64)
    size, parts = 0, list[Part]()
    for plan in plans:
        rows = slice(plan.start, plan.stop)
        number, own_lengths = plan.stop - plan.start, lengths[rows]
        if padded:
            shape: tuple[int, ...] = (number, plan.width)
            begins[rows] = size + np.arange(number) * plan.width
            extents[rows] = plan.width
        else:
            shape = (int(own_lengths.sum()),)
            begins[rows] = size + np.cumsum(own_lengths) - own_lengths
        parts.append(Part(rows, slice(size, size + math.prod(shape)), shape))
        size = parts[-1].elements.stop
    return Places(begins, columns.prompt_lengths, lengths, extents, parts, padded)


def _boundaries(lengths: Array, mover: Mover) -> dict[str, Any]:
    """Return the ends of packed rows of these lengths.

    Not lazy, since the layout needs them too.
    """
    ends = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    return {
        "cu_seqlens": mover.now(ends.astype(np.int32)),
        "max_seqlen": int(lengths.max(initial=0)),
    }
