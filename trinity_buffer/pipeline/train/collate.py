"""Collates rows into micro-batches of full-length, token-aligned tensors, padded or packed.

Element t describes token t; a response-aligned column is placed from ``prompt_length`` on, and
position 0 holds 0. The micro-batches of a rank are parts of one flat column of each name. Rows of
one shape at equal distances form a rectangle of it: a few large copies write each byte once.

In a step of usual size, the columns that most losses read are made ahead, while the trainer
computes. In a large step of long rows, every column stays in its stored bytes until it is first
read, and a column that no loss reads is never made.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from threading import Lock
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from trinity_buffer.algorithm.layout import BatchLayout, Totals
from trinity_buffer.codec.blob import mapped
from trinity_buffer.errors import DamagedSegmentError, InvalidArgumentError, TrainingError
from trinity_buffer.events import BatchLeased
from trinity_buffer.limits import sizes
from trinity_buffer.pipeline.load.columns import Array, Block, Facts, Field, LoadedRows
from trinity_buffer.pipeline.load.reading import RunRewards, rewards_by_run
from trinity_buffer.pipeline.manifest import MicroBatchPlan, plans_of
from trinity_buffer.pipeline.train import microbatch
from trinity_buffer.pipeline.train.step import TrainStep

REWARDS = "token_level_rewards"
WITH_IDS = ("input_ids", "rollout_logprob")
"""Columns stored in one family: bytes kept for one of them take more than making it."""

RESPONSES = {
    "rollout_logprob": "logprobs",
    "advantages": "advantages",
    "returns": "returns",
    REWARDS: "token_level_reward",
}
"""Response-aligned columns of every step: batch name -> stored name."""

OPTIONAL = {"teacher_logprob": "teacher_logprobs"}
"""Those that a step has only if all of its rows have them."""

LazyColumn: TypeAlias = "Callable[[Part], Array]"
"""Makes a column when it is first called, and returns a view of one micro-batch."""


def collate_step(
    lease: BatchLeased,
    rows: LoadedRows,
    mover: microbatch.Mover,
    memory: microbatch.StepMemory,
    *,
    rank: int = 0,
    world: int = 1,
) -> TrainStep:
    """Return a step with the micro-batches of one rank, still without its link of the chain.

    Each micro-batch has the denominators of the whole step. A stored pair becomes two rows, the
    chosen one first. A micro-batch without rows has tensors of the shapes ``[0, 1]``, packed
    ``[0]``. A step of which no row is left has no micro-batches.

    Args:
        lease, rows: the manifest of the step, and its rows.
        mover: moves the tensors to their device.
        memory: memory of earlier steps to reuse.
        rank, world: the rank, and the number of ranks.

    Raises:
        InvalidArgumentError: the step is partitioned over another number of ranks.
        DamagedSegmentError: a row is not as long as its event tells.
    """
    plans = plans_of(lease)
    if (ranks := 1 + max(plan.rank for plan in plans)) != world:
        raise InvalidArgumentError(f"step {lease.step} is dealt to {ranks} ranks, not to {world}")
    plans = [plan for plan in plans if plan.rank == rank]
    versions = [v for v in rows.facts.policy_version[~rows.expert] if v is not None]
    step = TrainStep(lease.step, [], lease, b"", recorded=False, policy_versions=versions)
    facts, groups = rows.facts, np.array(lease.groups, np.int64)
    runs = rewards_by_run(facts.reward, groups, facts.run, facts.step)
    step.reward = _mean_reward(groups, rows, runs)
    step.rows = sum(plan.stop - plan.start for plan in plans)
    if not lease.groups:
        return step
    size = 2 if rows.fields["chosen"].blocks else 1
    rewards = runs.rows if lease.by_run else facts.reward
    per_row = _per_row(lease, rows, runs)
    if size == 2:
        rows, rewards = rows.halves(), np.full(size * len(groups), np.nan)
        per_row = {name: column.repeat(size) for name, column in per_row.items()}
        plans = [MicroBatchPlan(size * p.start, size * p.stop, p.width) for p in plans]
    places = Places(rows.facts, plans, padded=lease.layout == "padded")
    responses, recorded = _responses(rows, pairs=size == 2)
    if recorded is not None:
        per_row["logprob_mask"] = recorded
    flat = _columns_of_step(rows, responses, rewards, places, memory)
    if rows.facts.sampling.any():
        flat |= _temperature(rows, places)
    total, expert = (_totals(rows, per_row["group_index"], of) for of in (slice(None), rows.expert))
    usual = _totals(rows, per_row["group_index"], ~rows.expert) if expert.sequences else total
    layout = BatchLayout(
        total=total, usual=usual, expert=expert, normalizer=lease.normalizer, world_size=world
    )
    for part in places.parts:
        tensors = _tensors(flat, per_row, places, part, mover)
        own = replace(layout, cu_seqlens=tensors.get("cu_seqlens"))
        modal = [mover.inputs(of) if of else of for of in rows.multi_modal[part.rows]]
        versions = [*rows.facts.policy_version[part.rows]]
        made = microbatch.MicroBatch(microbatch.LazyTensors(tensors), own, modal, versions)
        made.unrecorded, made.unscorable = rows.unrecorded, rows.unscorable
        made.unrewarded = rows.unrewarded
        step.microbatches.append(made)
    return step


def _totals(rows: LoadedRows, groups: Array, of: slice | Array) -> Totals:
    """Return the counts of some rows of a step."""
    tokens, num_groups = rows.facts.trained_tokens[of], len({*groups[of].tolist()})
    return Totals(int(tokens.sum()), len(tokens), num_groups, int(np.count_nonzero(tokens)))


def _tensors(
    flat: Mapping[str, Array | LazyColumn],
    per_row: Mapping[str, Array],
    places: Places,
    part: Part,
    mover: microbatch.Mover,
) -> dict[str, Any]:
    """Return the tensors of a micro-batch by name, made or lazy."""
    columns: dict[str, microbatch.Column] = {}
    for name, column in flat.items():
        if isinstance(column, np.ndarray):
            columns[name] = column[part.elements].reshape(part.shape)
        else:
            columns[name] = partial(column, part)
    if places.padded:
        columns["position_ids"] = mover.positions(part.shape)
    tensors = mover.columns(columns | {name: of[part.rows] for name, of in per_row.items()})
    if not places.padded:
        lengths = places.lengths[part.rows]
        ends = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths, out=ends[1:])
        # Not lazy, since the layout needs them too.
        tensors["cu_seqlens"] = mover.now(ends)
        tensors["max_seqlen"] = int(lengths.max(initial=0))
    if "rollout_logprob" in tensors:
        tensors["old_logprob"] = tensors["rollout_logprob"]
    return tensors


def _responses(rows: LoadedRows, *, pairs: bool) -> tuple[dict[str, Field], Array | None]:
    """Return the response-aligned columns, and which rows have log-probabilities.

    The latter is None if all or none have.
    """
    expert, tokens = rows.expert, rows.fields["tokens"]
    responses = {name: rows.fields[stored] for name, stored in RESPONSES.items()}
    if expert.any():
        # Log-probabilities of an expert's rows are not the policy's, so they become 0.
        responses = {name: field.without(expert) for name, field in responses.items()}
    for name, stored in OPTIONAL.items():
        if (optional := rows.fields[stored]).present().all():
            responses[name] = optional
    recorded = responses["rollout_logprob"].present()
    # A mixed step may have only the expert's rows left, whose zeros no loss reads.
    has_logprobs = bool(recorded.any() or expert.all()) and not pairs
    if not has_logprobs:
        del responses["rollout_logprob"]  # zeros would mean probabilities of 1
    if not rows.fields["action_mask"].present().all():
        raise InvalidArgumentError(
            "a row of the step has neither an action mask nor a pair of answers: run `verify`"
        )
    if (tokens.sizes() != rows.facts.length).any():
        raise DamagedSegmentError(
            "a row of the step is not as long as its event tells: run `verify`"
        )
    return responses, recorded if has_logprobs and not recorded.all() else None


def _mean_reward(groups: Array, rows: LoadedRows, runs: RunRewards) -> float | None:
    """Return the mean reward of the trainer's own rows of a step, each run once; None: unknown.

    The reward of a row with token-level rewards alone is their sum.

    Args:
        groups: the group of each row.
        rows: the rows of the step.
        runs: the rewards of all its runs, without those of tokens.
    """
    facts, of_tokens = rows.facts, rows.fields["token_level_reward"]
    unknown = np.flatnonzero(np.isnan(facts.reward)) if of_tokens.blocks else ()
    if not (len(unknown) or rows.expert.any()):
        return runs.mean
    rewards, values = facts.reward.copy(), of_tokens.values()
    for row in unknown:
        value = values[row]
        if isinstance(value, float):
            rewards[row] = value * facts.trained_tokens[row]
        elif value is not None:
            rewards[row] = value.sum()
    own = np.flatnonzero(~rows.expert)
    return rewards_by_run(rewards[own], *(of[own] for of in (groups, facts.run, facts.step))).mean


def lacking_of(name: str, lease: BatchLeased, rows: LoadedRows) -> list[int]:
    """Return the trainer's own rows of a step without a field.

    Token-level rewards count as a reward, and so does that of the last row of a run.
    """
    is_reward, facts = name == "reward", rows.facts
    lacks = ~(rows.fields["token_level_reward" if is_reward else name].present() | rows.expert)
    if is_reward:
        rewards = facts.reward
        if lease.by_run:
            rewards = rewards_by_run(rewards, np.array(lease.groups), facts.run, facts.step).rows
        lacks &= np.isnan(rewards)
    missing: list[int] = np.flatnonzero(lacks).tolist()
    return missing


def _temperature(rows: LoadedRows, places: Places) -> dict[str, Array]:
    """Return the column of temperatures, if some row was sampled at another one than 1.

    An expert's rows have none: they were not sampled from the policy.
    """
    hot = [
        (row, begin, end, temperature)
        for row, spans in enumerate(rows.facts.sampling)
        for begin, end, temperature, _ in (() if rows.expert[row] else spans or ())
        if temperature != 1
    ]
    if not hot:
        return {}
    column = np.ones(places.size, np.float32)
    for row, begin, end, temperature in hot:
        if (first := int(places.begins[row])) >= 0:  # on this rank
            column[first + begin : first + end] = temperature
    return {"temperature": column}


def _per_row(lease: BatchLeased, rows: LoadedRows, runs: RunRewards) -> dict[str, Array]:
    """Return the columns ``[rows]`` that identify each row."""
    number = len(lease.groups)
    columns = {
        "sample_index": np.arange(number, dtype=np.int32),
        "group_index": np.array(lease.groups, np.int32),
        "step": np.full(number, lease.step, np.int32),
    }
    if lease.sources:
        columns["expert_mask"] = rows.expert.copy()
    if lease.by_run:
        columns["run_index"] = runs.runs
    return columns


class Part(NamedTuple):
    """A micro-batch in the columns of its rank: its rows, its elements, and its shape."""

    rows: slice
    elements: slice
    shape: tuple[int, ...]


class Places:
    """The places of one rank's rows in the columns of a step, one micro-batch after the other.

    Args:
        facts: of the rows of the step.
        plans: the micro-batches of the rank.
        padded: whether they are padded.

    Attributes:
        begins: ``[rows]``, begin of each row of the step; negative: on another rank.
        prompts, lengths: ``[rows]``, number of tokens of the prompt and of the whole row.
        parts: the part of each micro-batch.
        size: number of elements of a column.
    """

    def __init__(self, facts: Facts, plans: Sequence[MicroBatchPlan], *, padded: bool) -> None:
        self.prompts, self.lengths, self.padded = facts.prompt_length, facts.length, padded
        self.begins = np.full(len(facts.length), -1, np.int64)
        self.size, self.parts = 0, list[Part]()
        extents = facts.length.copy()  # padding included
        self._shapes: dict[int, tuple[Array, tuple[int, ...] | None]] = {}
        for plan in plans:
            rows, number = slice(plan.start, plan.stop), plan.stop - plan.start
            if padded:
                shape: tuple[int, ...] = (number, plan.width)
                self.begins[rows] = self.size + np.arange(number) * plan.width
                extents[rows] = plan.width
            else:
                own_lengths = self.lengths[rows]
                shape = (int(own_lengths.sum()),)
                self.begins[rows] = self.size + np.cumsum(own_lengths) - own_lengths
            elements = slice(self.size, self.size + math.prod(shape))
            self.parts.append(Part(rows, elements, shape))
            self.size = elements.stop
        self._bounds = np.stack((self.begins, self.prompts, self.lengths, extents))

    def area(
        self, column: Array, block: Block, *, after_prompt: bool
    ) -> tuple[Array, int, int] | None:
        """Return the rows of a block as one view of a column, and where their values begin and end.

        None if they differ in shape or distance: they must be written one by one.
        """
        # Blocks of one segment share their array of rows, so its identity can be the cache key.
        rows, where = self._shapes.get(id(block.rows), (None, None))
        if rows is not block.rows:
            rows, where = block.rows, None
            bounds = self._bounds[:, rows]
            first, prompt, length, extent = bounds[:, 0].tolist()
            distance = int(bounds[0, 1]) - first if len(rows) > 1 else extent
            steps = bounds[:, 1:] - bounds[:, :-1]
            alike = (steps == [[distance], [0], [0], [0]]).all()
            if first >= 0 and distance >= extent and alike:
                where = first, distance, prompt, length, extent
            self._shapes[id(rows)] = rows, where
        if where is None:
            return None
        first, distance, prompt, length, extent = where
        start, width = prompt if after_prompt else 0, column.itemsize
        if not block.scaled and len(block.data) != len(rows) * (length - start):
            return None
        shape, strides = (len(rows), extent), (distance * width, width)
        return np.ndarray(shape, column.dtype, column, first * width, strides), start, length

    def put_last(self, values: Array, column: Array) -> None:
        """Write ``values``, one for the last token of each row, NaN for none."""
        there = ~np.isnan(values) & (self.begins >= 0)
        column[(self.begins + self.lengths)[there] - 1] = values[there]

    def put_text(self, column: Array) -> None:
        """Write the attention mask."""
        column.fill(1)
        for rows, elements, shape in self.parts if self.padded else ():
            lengths = self.lengths[rows]
            if (lengths < shape[1]).any():
                np.less(np.arange(shape[1]), lengths[:, None], out=column[elements].reshape(shape))

    def put_positions(self, column: Array) -> None:
        """Write the position of each token in its packed row."""
        for rows, elements, _ in self.parts:
            lengths = self.lengths[rows]
            longest = np.arange(lengths.max(initial=0))
            if len(lengths) and (lengths == lengths[0]).all():
                column[elements].reshape(len(lengths), len(longest))[...] = longest
            else:
                for begin, size in zip(self.begins[rows].tolist(), lengths.tolist(), strict=True):
                    column[begin : begin + size] = longest[:size]


@dataclass(slots=True)
class Source:
    """What a column is made of, once.

    Attributes:
        places: the places of its rows.
        dtype: dtype of its elements.
        blocks: stored rows, removed as they are written.
        after_prompt: whether they cover responses instead of whole rows.
        finish: writes what the blocks leave out.
        zeros: whether all other elements are 0; if not, ``finish`` writes each.
    """

    places: Places
    dtype: type[np.generic]
    blocks: deque[Block]
    after_prompt: bool = True
    finish: Callable[[Array], None] | None = None
    zeros: bool = True

    def write(self, column: Array, factors: Array | None) -> Iterator[None]:
        """Write a column into uninitialized memory, one block at a time."""
        blocks, area, after_prompt = self.blocks, self.places.area, self.after_prompt
        areas = deque(area(column, block, after_prompt=after_prompt) for block in blocks)
        on_rank = np.count_nonzero(self.places.begins >= 0)
        # Then the zeros between rows are written with the rows, while both are in the cache.
        whole = None not in areas and sum(len(block.rows) for block in blocks) == on_rank
        if self.zeros and not whole:
            column.fill(0)
        while blocks:
            block, where = blocks.popleft(), areas.popleft()
            if where is None:
                self._put_rows(column, block, factors)
            else:
                rows, start, stop = where
                if whole:
                    rows[:, :start] = rows[:, stop:] = 0
                target = rows[:, start:stop]
                if not block.scaled:
                    target[...] = block.data.reshape(target.shape)
                elif factors is None:
                    target[...] = block.data[:, None]
                else:
                    mask = area(factors, block, after_prompt=after_prompt)
                    assert mask is not None  # it has the places of the column
                    mine = mask[0][:, start:stop]
                    np.multiply(mine, block.data[:, None], out=target, casting="unsafe")
            del block
            yield
        if self.finish is not None:
            self.finish(column)

    def _put_rows(self, column: Array, block: Block, factors: Array | None) -> None:
        """Write the rows of a block one by one."""
        places, rows = self.places, block.rows
        begins = places.begins[rows]
        starts = begins + places.prompts[rows] if self.after_prompt else begins
        values: Any = block.data if block.scaled else block.values()
        stops = begins + places.lengths[rows] if block.scaled else starts + np.diff(block.ends)
        bounds = zip(begins.tolist(), starts.tolist(), stops.tolist(), values, strict=True)
        for begin, start, stop, value in bounds:
            if begin >= 0 and block.scaled and factors is not None:
                np.multiply(factors[start:stop], value, out=column[start:stop], casting="unsafe")
            elif begin >= 0:
                column[start:stop] = value


def _fill(
    columns: Mapping[str, Array], sources: Mapping[str, Source], factors: Array | None = None
) -> None:
    """Write whole columns into uninitialized memory, by turns a block of each.

    Stored bytes are released block by block, so that they and the columns never exist in full at
    the same time.
    """
    writers = (sources[name].write(column, factors) for name, column in columns.items())
    deque(zip_longest(*writers), maxlen=0)


def _factors(masks: Sequence[Block], places: Places, mask: Array | None = None) -> Array | None:
    """Return the factors of scaled values: the action mask, with its weights if it has any.

    None: every token of each response is trained.

    Args:
        masks, places: blocks of the action mask, and the places of the rows.
        mask: the column of the mask, if it is made already.
    """
    dtype: type[np.generic] = np.float32
    if all(block.data.dtype == np.bool_ for block in masks):
        if all(block.data.all() for block in masks):
            return None
        if mask is not None:
            return mask
        dtype = np.bool_
    weights = np.empty(places.size, dtype)
    _fill({"": weights}, {"": Source(places, dtype, deque(masks))})
    return weights


@dataclass(slots=True, eq=False)
class LazyColumns:
    """Columns of the same stored bytes, all made when one of them is first read.

    Attributes:
        inputs: what they are made of, and a function that returns the `_factors` of scaled values;
            released afterwards.
    """

    inputs: tuple[Mapping[str, Source], Callable[[], Array | None]] | None
    _made: dict[str, Array] = field(default_factory=dict, init=False)
    _lock: Lock = field(default_factory=Lock, init=False)  # threads of a trainer may read at once

    def part(self, name: str, part: Part) -> Array:
        """Return a view of one micro-batch of a column, which the caller may change.

        Raises:
            TrainingError: an earlier attempt was interrupted, and the inputs are gone.
        """
        with self._lock:
            inputs, self.inputs = self.inputs, None
            if inputs is not None:
                (sources, factors), made = inputs, {}
                for own, source in sources.items():
                    size = source.places.size * np.dtype(source.dtype).itemsize
                    memory = mapped(size) if size > sizes.bytes_read_at_once else bytearray(size)
                    made[own] = np.frombuffer(memory, source.dtype)
                _fill(made, sources, factors())
                self._made = made
        if not self._made:  # not a KeyError, which a mapping turns into "no such column"
            raise TrainingError(
                f"{name} of a step cannot be made: an error or Ctrl-C ended that half-way before; "
                "open the stream again, which serves the uncommitted steps as they were"
            )
        return self._made[name][part.elements].reshape(part.shape)


def _columns_of_step(
    rows: LoadedRows,
    responses: Mapping[str, Field],
    rewards: Array,
    places: Places,
    memory: microbatch.StepMemory,
) -> dict[str, Array | LazyColumn]:
    """Return the flat columns of all micro-batches by name, made or lazy."""
    tokens, masks = rows.fields["tokens"].blocks, rows.fields["action_mask"].blocks
    text, positions = places.put_text, places.put_positions
    sources = {"input_ids": Source(places, np.int64, deque(tokens), after_prompt=False)}
    if not places.padded:  # one row of positions serves all padded rows
        sources["position_ids"] = Source(places, np.int64, deque(), finish=positions, zeros=False)
    sources["attention_mask"] = Source(places, np.bool_, deque(), finish=text, zeros=False)
    sources["action_mask"] = Source(places, np.bool_, deque(masks))
    for name, column in responses.items():
        sources[name] = Source(places, np.float32, deque(column.blocks))
    # The reward of a row without token-level rewards is that of its last token; an expert's rows
    # have none.
    last = np.where(responses[REWARDS].present() | rows.expert, np.nan, rewards)
    sources[REWARDS].finish = partial(places.put_last, last)
    scaled = {name for name, of in sources.items() if any(block.scaled for block in of.blocks)}
    late, ahead = set(sources), dict[str, Array]()
    factors_later: Callable[[], Array | None] = partial(_factors, masks, places)
    width = sum(np.dtype(source.dtype).itemsize for source in sources.values())
    if places.size * width <= sizes.bytes_made_ahead:
        # Few losses read returns, rewards, or advantages that were not computed. They stay lazy
        # only if that keeps no more than the mask and one number per row alive.
        late = {name for name in RESPONSES if name in sources and not sources[name].blocks}
        by_mask = all(block.data.dtype == np.bool_ for block in masks)
        if by_mask and all(block.scaled for block in sources["returns"].blocks):
            late.add("returns")
        if not places.padded:
            late.add("attention_mask")
        dtypes = {name: of.dtype for name, of in sources.items() if name not in late}
        ahead = memory.columns(places.size, dtypes)
        # The mask first: scaled columns are multiples of it.
        others = dict(ahead)
        mask = others.pop("action_mask")
        _fill({"action_mask": mask}, sources)
        factors = _factors(masks, places, mask)
        _fill(others, sources, factors)
        # Copies, since the memory of the mask and of the segments may change before they are read.
        copied = factors.copy() if scaled & late and factors is not None else None
        factors_later = lambda: copied  # noqa: E731 - a function of one value
        for name in late:
            own = sources[name].blocks
            sources[name].blocks = deque(replace(b, data=b.data.copy()) for b in own)
    flat: dict[str, Array | LazyColumn] = {**ahead}
    together = [name for name in WITH_IDS if name in late]
    for names in (together, *([name] for name in late.difference(together))):
        of = {name: sources[name] for name in names}
        # The factors hold the blocks of the mask, which other columns do not need.
        made = LazyColumns((of, factors_later if scaled & of.keys() else lambda: None))
        flat |= {name: partial(made.part, name) for name in of}
    return {name: flat[name] for name in sources}
