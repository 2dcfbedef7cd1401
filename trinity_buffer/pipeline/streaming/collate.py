"""From rows to micro-batches: full-length, token-aligned tensors, padded or packed.

Element t describes token t; a response-aligned column is placed from ``prompt_length`` on, and
position 0 holds 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from trinity_buffer.algorithm.layout import BatchLayout, Totals
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.pipeline.loading.blocks import Array, Field, field_of_values
from trinity_buffer.pipeline.streaming.collate_buffers import (
    Arena,
    StepMemory,
    copy_rows,
    fill_rows,
    scale_mask,
)
from trinity_buffer.pipeline.streaming.manifest import Manifest, MicroBatchPlan
from trinity_buffer.pipeline.streaming.row_loader import LoadedRows

T = TypeVar("T")

OPTIONAL = {"teacher_logprobs": "teacher_logprob"}
"""Response-aligned columns that a step has only if all of its rows do: stored -> batch."""


@dataclass(slots=True)
class MicroBatch(Mapping[str, Any]):
    """A mapping of tensors; N rows, padded to ``[N, T]`` or packed to ``[T]``.

    ``input_ids`` and ``position_ids`` int64, ``attention_mask`` and ``action_mask`` bool;
    ``rollout_logprob``, ``old_logprob`` (the same tensor until the trainer recomputes it; both
    absent where no row of the step recorded any), ``advantages``, ``returns`` and
    ``token_level_rewards`` float32; ``logprob_mask`` bool ``[N]`` (which rows recorded theirs)
    where only some did; ``sample_index`` (slot in the
    manifest), ``group_index`` and ``step`` int32 ``[N]``; packed also ``cu_seqlens`` int32
    ``[N + 1]`` and ``max_seqlen``.

    Attributes:
        tensors: the mapping itself; assign to it what the trainer computes (``values``,
            ``ref_logprob``, ...).
        layout: sequence boundaries, and the denominators of the whole step.
        multi_modal_inputs: one mapping per row, name -> tensor.
        policy_versions: one per row, None where unknown.
        unrecorded: ``usual`` or ``expert`` -> uid of a row of the step without log-probabilities,
            where others have some.
        read_zeros: called when ``advantages`` are read that nobody computed; None: there are some.
    """

    tensors: dict[str, Any]
    layout: BatchLayout
    multi_modal_inputs: list[dict[str, Tensor]] = field(default_factory=list)
    policy_versions: list[int | None] = field(default_factory=list)
    unrecorded: Mapping[str, str] = field(default_factory=dict)
    read_zeros: Callable[[], None] | None = None

    @override
    def __getitem__(self, key: str) -> Any:
        if self.read_zeros is not None and key == "advantages":
            self.read_zeros()
        return self.tensors[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.tensors[key] = value
        if key == "advantages":
            self.read_zeros = None

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    @override
    def __len__(self) -> int:
        return len(self.tensors)


def collate_step(
    manifest: Manifest,
    rows: LoadedRows,
    *,
    rank: int = 0,
    world: int = 1,
    device: str = "cpu",
    memory: StepMemory | None = None,
) -> list[MicroBatch]:
    """Return the micro-batches of one rank, each with the denominators of the whole step.

    A stored pair becomes two rows, the chosen one first. A micro-batch without rows has tensors of
    the shapes ``[0, 1]``, packed ``[0]``. A step of which no row is left has no micro-batches.

    Args:
        manifest, rows: of the step, and what it names.
        rank, world: whose micro-batches, of how many ranks.
        device: where the tensors are put.
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
    flat = _filled(columns, places, memory or StepMemory())
    batches = []
    for plan, place, part in zip(plans, wide, places.parts, strict=True):
        tensors = _tensors(columns, flat, place, *part)
        tensors |= _per_row(manifest, plan, size)
        if columns.recorded is not None:
            tensors["logprob_mask"] = torch.from_numpy(columns.recorded[plan.start : plan.stop])
        tensors = {name: _moved(value, device) for name, value in tensors.items()}
        if "rollout_logprob" in tensors:
            tensors["old_logprob"] = tensors["rollout_logprob"]
        chosen = slice(plan.start, plan.stop)
        modal = [
            {name: _moved(value, device) for name, value in inputs.items()} if inputs else {}
            for inputs in _each(rows.multi_modal[chosen], size)
        ]
        versions = list(_each(rows.facts.policy_versions[chosen], size))
        mine = replace(layout, cu_seqlens=tensors.get("cu_seqlens"))
        batches.append(MicroBatch(tensors, mine, modal, versions, rows.unrecorded))
    return batches


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


def _per_row(manifest: Manifest, plan: MicroBatchPlan, size: int) -> dict[str, Tensor]:
    """Return the tensors ``[N]`` that say of each row what it is."""
    chosen = slice(plan.start, plan.stop)
    slots = np.arange(plan.start, plan.stop, dtype=np.int32).repeat(size)
    groups = np.array(manifest.groups[chosen], np.int32).repeat(size)
    found = {
        "sample_index": torch.from_numpy(slots),
        "group_index": torch.from_numpy(groups),
        "step": torch.full((len(slots),), manifest.step, dtype=torch.int32),
    }
    if manifest.sources:
        found["expert_mask"] = torch.tensor(_each(manifest.source[chosen], size)) > 0
    return found


def _layout_of_step(manifest: Manifest, columns: _Columns, size: int, world: int) -> BatchLayout:
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


def _moved(value: Any, device: str) -> Any:
    if not isinstance(value, Tensor) or device == "cpu":
        return value
    return value.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _Columns:
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


def _columns(manifest: Manifest, rows: LoadedRows) -> tuple[_Columns, int]:
    """Return the columns, and how many rows they have for each of the manifest: two of a pair."""
    if rows.field("chosen").blocks:
        return _halves(rows), 2
    masks, number = rows.field("action_mask"), len(rows.facts)
    stored = {
        "rollout_logprob": "logprobs",
        "advantages": "advantages",
        "returns": "returns",
        "token_level_rewards": "token_level_reward",
    }
    responses = {name: rows.field(field) for name, field in stored.items()}
    rewards: Sequence[float | None] = rows.facts.rewards
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
    if not recorded.any():
        del responses["rollout_logprob"]  # zeros would be read as probabilities of 1
    if masks.missing(number):
        raise InvalidArgumentError(
            "a row of the step has neither an action mask nor a pair of answers: run `verify`"
        )
    tokens = rows.field("tokens")
    prompts = np.array(rows.facts.prompt_lengths)
    found = _Columns(
        tokens,
        tokens.sizes(number),
        prompts,
        masks,
        responses,
        rewards,
        rows.facts.trained_tokens,
        recorded if recorded.any() and not recorded.all() else None,
    )
    return found, 1


def _halves(rows: LoadedRows) -> _Columns:
    """Return the columns of pairs: prompt and chosen answer, prompt and rejected one, in turn."""
    pairs = zip(*(rows.values(name) for name in ("tokens", "chosen", "rejected")), strict=True)
    answers: list[Any] = [(prompt, half) for prompt, *both in pairs for half in both]
    names = ("advantages", "returns", "token_level_rewards")
    tokens = [np.concatenate([prompt, half]) for prompt, half in answers]
    return _Columns(
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


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the rows of one rank lie in the columns of a step.

    A column holds the micro-batches of the rank one after another, each padded or packed.

    Attributes:
        size: elements of a column.
        begins: ``[rows]``, where each row of the step begins; below 0: on another rank.
        parts: of each micro-batch, its elements and its shape.
        padded: whether the micro-batches are.
    """

    size: int
    begins: Array
    parts: list[tuple[slice, tuple[int, ...]]]
    padded: bool


def _places(columns: _Columns, plans: Sequence[MicroBatchPlan], *, padded: bool) -> _Places:
    begins = np.full(len(columns.lengths), -1, np.int64)
    size, parts = 0, list[tuple[slice, tuple[int, ...]]]()
    for plan in plans:
        rows = slice(plan.start, plan.stop)
        number, lengths = plan.stop - plan.start, columns.lengths[rows]
        if padded:
            shape: tuple[int, ...] = (number, plan.width)
            begins[rows] = size + np.arange(number) * plan.width
        else:
            shape = (int(lengths.sum()),)
            begins[rows] = size + np.cumsum(lengths) - lengths
        part = slice(size, size + math.prod(shape))
        parts.append((part, shape))
        size = part.stop
    return _Places(size, begins, parts, padded)


def _filled(columns: _Columns, places: _Places, memory: StepMemory) -> dict[str, Array]:
    """Return the flat columns of all micro-batches."""
    tokens = ["input_ids"] if places.padded else ["input_ids", "position_ids"]
    kinds = [np.int64] * len(tokens) + [np.bool_] * 2 + [np.float32] * len(columns.responses)
    padding = places.size > int(columns.lengths[places.begins >= 0].sum())
    arena = Arena(memory, places.size, kinds)
    out: dict[str, Array] = {}
    ids = out["input_ids"] = arena.column(zeros=padding)
    for block in columns.tokens.blocks:
        copy_rows(ids, block, places.begins)
    longest = columns.lengths.max()
    if not places.padded:
        out["position_ids"] = arena.column(zeros=padding)
        fill_rows(out["position_ids"], places.begins, columns.lengths, np.arange(longest))
    there = out["attention_mask"] = arena.column(zeros=padding)
    fill_rows(there, places.begins, columns.lengths, np.ones(longest, np.bool_))
    mask = out["action_mask"] = arena.column()
    begins = np.where(places.begins < 0, -1, places.begins + columns.prompt_lengths)
    for block in columns.masks.blocks:
        copy_rows(mask, block, begins)
    weights = _weights(columns, mask, begins)
    for name, some in columns.responses.items():
        column = out[name] = arena.column()
        for block in some.blocks:
            if block.scaled:
                scale_mask(column, block, begins, weights, columns.lengths - columns.prompt_lengths)
            else:
                copy_rows(column, block, begins)
    _put_rewards(out["token_level_rewards"], columns, places.begins)
    return out


def _weights(columns: _Columns, mask: Array, begins: Array) -> Array:
    """Return what scaled values are multiples of: the mask, with its weights if it has any."""
    if all(block.data.dtype == np.bool_ for block in columns.masks.blocks):
        return mask
    weights = np.zeros(len(mask), np.float32)
    for block in columns.masks.blocks:
        copy_rows(weights, block, begins)
    return weights


def _put_rewards(column: Array, columns: _Columns, begins: Array) -> None:
    """Give rows without a reward for each token that of the whole, at the last token."""
    values = np.array(columns.rewards, np.float64)  # None becomes NaN, which no reward is
    there = columns.responses["token_level_rewards"].present(len(begins))
    put = ~(np.isnan(values) | (begins < 0) | there)
    column[(begins + columns.lengths - 1)[put]] = values[put]


def _tensors(
    columns: _Columns, flat: Mapping[str, Array], place: MicroBatchPlan, part: slice, shape: Any
) -> dict[str, Any]:
    """Return the tensors of one micro-batch: views of the flat columns."""
    found: dict[str, Any] = {
        name: torch.from_numpy(column[part].reshape(shape)) for name, column in flat.items()
    }
    lengths = columns.lengths[place.start : place.stop]
    if len(shape) == 2:
        found["position_ids"] = torch.arange(shape[1]).expand(shape)
        return found
    ends = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    found["cu_seqlens"] = torch.from_numpy(ends.astype(np.int32))
    found["max_seqlen"] = int(lengths.max(initial=0))
    return found
