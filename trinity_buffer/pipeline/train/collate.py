"""From rows to micro-batches: full-length, token-aligned tensors, padded or packed.

Element t describes token t; a response-aligned column is placed from ``prompt_length`` on, and
position 0 holds 0.

The columns of a step: made with it, or when somebody first looks at them.

What most losses read of a step of usual size is made ahead, while the trainer computes. Of a large
one, of long rows, nothing is: until then it is the bytes that were stored, and a column that no
loss reads is never made.
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
from trinity_buffer.blob import mapped
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


class ColumnRecipe(NamedTuple):
    """How a column is made, once.

    Attributes:
        dtype: of its elements.
        fill: writes all of them into memory that may hold anything; yields after each block of
            rows, of which it lets go.
    """

    dtype: type[np.generic]
    fill: Callable[[Array], Iterator[None]]


class LazyColumns:
    """Columns that are made when somebody first looks at one of them: of the same stored bytes.

    After each block these are let go of, so that never both are there whole.

    Args:
        size: elements of each.
        ways: how each is made; let go of then, and with it what it is made of.
    """

    def __init__(self, size: int, ways: Mapping[str, ColumnRecipe]) -> None:
        self._size = size
        self._ways: Mapping[str, ColumnRecipe] | None = ways
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

    def _room(self, how: ColumnRecipe) -> Array:
        size = self._size * np.dtype(how.dtype).itemsize
        large = size > sizes().bytes_read_at_once
        return np.frombuffer(mapped(size) if large else bytearray(size), how.dtype)


class LazyColumn(NamedTuple):
    """A column that is made when somebody first looks at a part of it."""

    of: LazyColumns
    name: str

    def part(self, elements: slice) -> Array:
        """Return some of its elements, as a view that is the caller's."""
        return self.of.column(self.name)[elements]


def columns_of_step(
    columns: RowColumns, places: Places, memory: StepMemory
) -> Mapping[str, Array | LazyColumn]:
    """Return the flat columns of all micro-batches by name, made or to be made."""
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
    """Return how each column is made."""
    tokens, masks = deque(columns.tokens.blocks), deque(columns.masks.blocks)
    ids = partial(put_rows, blocks=tokens, places=places, after_prompt=False)
    recipes = {
        "input_ids": ColumnRecipe(np.int64, ids),
        "position_ids": ColumnRecipe(np.int64, partial(put_positions, places=places)),
        "attention_mask": ColumnRecipe(np.bool_, partial(put_text, places=places)),
        "action_mask": ColumnRecipe(np.bool_, partial(put_rows, blocks=masks, places=places)),
    }
    if places.padded:
        del recipes["position_ids"]  # those of the longest row are those of all
    for name, field in columns.responses.items():
        fill = partial(_put_response, blocks=deque(field.blocks), places=places, weights=weights)
        if name == REWARDS:
            fill = partial(fill, last=_rewards_of_whole(columns))
        recipes[name] = ColumnRecipe(np.float32, fill)
    return recipes


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
    rewards = np.array(columns.rewards, np.float64)  # None becomes NaN, which no reward is
    rewards[columns.responses[REWARDS].present(len(rewards))] = np.nan
    return rewards


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
    weights = np.empty(places.size, dtype)
    _done(put_rows(weights, deque(masks), places))
    return weights


def _done(blocks: Iterator[object]) -> None:
    for _ in blocks:
        pass


def _made_ahead(
    columns: RowColumns, places: Places, memory: StepMemory, ways: Mapping[str, ColumnRecipe]
) -> dict[str, Array | LazyColumn]:
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
    recipes = _detached(columns, late, places, weights)
    return {n: made[n] if n in made else _late(places, n, recipes[n]) for n in ways}


def _waiting(columns: RowColumns, places: Places) -> set[str]:
    """Return the columns that wait for somebody to look at them.

    Few losses read returns, rewards, or advantages that nobody computed. They wait only if nothing
    but a number of each row, and the mask, has to be kept for them.
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
    """Return how columns are made later without the bytes that were stored.

    The mask that they are multiples of is that of now, whatever becomes of its memory.
    """
    responses = {n: _copied(field) for n, field in columns.responses.items() if n in late}
    scaled = any(field.blocks for field in responses.values())
    mask = PackedMask.of(weights) if scaled and weights is not None else None
    bare = replace(columns, tokens=Field(), masks=Field(), responses=responses)
    return _ways(bare, places, lambda: None if mask is None else mask.unpacked())


def _copied(field: Field) -> Field:
    return Field([replace(block, data=block.data.copy()) for block in field.blocks])


T = TypeVar("T")

OPTIONAL = {"teacher_logprobs": "teacher_logprob"}
"""Response-aligned columns that a step has only if all of its rows do: stored -> batch."""


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
        manifest, rows: of the step, and what it names.
        rank, world: whose micro-batches, of how many ranks.
        mover: puts the tensors where they are computed with; None: that is here.
        memory: of earlier steps, to be used again.

    Raises:
        InvalidArgumentError: the step is dealt to another number of ranks.
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
    """Return the column of temperatures, if some row of the step has another one than 1.

    An expert's rows have none: they were not the policy's.
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
    """Return how many rows of a manifest the micro-batches hold; a pair is one."""
    size = 2 if rows.field("chosen").blocks else 1
    return sum(len(microbatch.policy_versions) for microbatch in microbatches) // size


def _each(items: Sequence[T], size: int) -> Sequence[T]:
    """Return every item ``size`` times."""
    return items if size == 1 else [item for item in items for _ in range(size)]


def _per_row(
    manifest: Manifest,
    plan: MicroBatchPlan,
    size: int,
    recorded: Array | None,
    runs: Array | None,
) -> dict[str, Column]:
    """Return the columns ``[N]`` that say of each row what it is."""
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
    """Return a number for each row of a step, ``int32``, that only the rows of its run have."""
    groups = np.array(manifest.groups, np.int64)
    keys = (groups << 32) + np.array(rows.facts.runs, np.int64)
    order = np.argsort(keys, kind="stable")
    numbers = np.empty(len(keys), np.int32)
    numbers[order] = np.cumsum(np.diff(keys[order], prepend=keys[order[:1]]) != 0)
    return numbers


def rewards_of(manifest: Manifest, rows: LoadedRows) -> Sequence[float | None]:
    """Return the reward of each row of a step: of one without, that of the last row of its run."""
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

    A row that recorded rewards of its tokens alone has their sum.
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
    """Return the policy versions of the trainer's own rows of a step, where they are known."""
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
    """Return the denominators: over all rows, over the usual ones, over the expert's."""
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
    """Return the denominators over rows of these groups, with so many trained tokens each."""
    return Totals(
        tokens=sum(tokens),
        sequences=len(tokens),
        groups=len(set(groups)),
        active_sequences=len(tokens) - tokens.count(0),
    )


def _part(column: Array | LazyColumn, part: Part) -> Column:
    """Return what a column is in one micro-batch, or what makes that."""
    if isinstance(column, LazyColumn):
        return lambda: column.part(part.elements).reshape(part.shape)
    return column[part.elements].reshape(part.shape)


def _columns(manifest: Manifest, rows: LoadedRows) -> tuple[RowColumns, int]:
    """Return the columns, and how many rows they have for each of the manifest: two of a pair."""
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
        # What an expert's rows hold of a rollout was not the policy's: it is 0.
        expert = np.array(manifest.source) > 0
        responses = {name: field.without(expert) for name, field in responses.items()}
        rewards = [None if of else value for value, of in zip(rewards, expert, strict=True)]
    for stored_name, name in OPTIONAL.items():
        field = rows.field(stored_name)
        if not field.missing(number):
            responses[name] = field
    recorded = responses["rollout_logprob"].present(number)
    # What is left of a mixed step may be the expert's rows alone, whose 0 no loss reads.
    is_of_experts = bool(manifest.source) and all(manifest.source)
    if not (recorded.any() or is_of_experts):
        del responses["rollout_logprob"]  # zeros would be read as probabilities of 1
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
    """Return the columns of pairs: prompt and chosen answer, prompt and rejected one, in turn."""
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
    """Return per stored pair what `plan_microbatches` asks, or the tokens of its longer half."""
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
    """Return where rows of these lengths end that are packed one after another.

    They are read of the layout, too, which is there whole.
    """
    ends = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    return {
        "cu_seqlens": mover.now(ends.astype(np.int32)),
        "max_seqlen": int(lengths.max(initial=0)),
    }
