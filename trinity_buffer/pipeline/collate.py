"""From rows to micro-batches: full-length, token-aligned tensors, padded or packed.

Element t describes token t; a response-aligned column is placed from ``prompt_length`` on, and
position 0 holds 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity_buffer.algorithm.layout import BatchLayout, Totals
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.pipeline.manifest import Manifest, MicroBatchPlan
from trinity_buffer.pipeline.row_loader import Array, LoadedRows, Value

OPTIONAL = {"teacher_logprobs": "teacher_logprob"}
"""Response-aligned columns that a step has only if all of its rows do: stored -> batch name."""


@dataclass(slots=True)
class MicroBatch(Mapping[str, Any]):
    """A mapping of tensors; N rows, padded to ``[N, T]`` or packed to ``[T]``.

    ``input_ids`` and ``position_ids`` int64, ``attention_mask`` and ``action_mask`` bool;
    ``rollout_logprob``, ``old_logprob`` (the same tensor until the trainer recomputes it),
    ``advantages``, ``returns`` and ``token_level_rewards`` float32; ``sample_index`` (slot in the
    manifest), ``group_index`` and ``step`` int32 ``[N]``; packed also ``cu_seqlens`` int32
    ``[N + 1]`` and ``max_seqlen``.

    Attributes:
        tensors: the mapping itself; assign to it what the trainer computes (``values``,
            ``ref_logprob``, ...).
        layout: sequence boundaries, and the denominators of the whole step.
        multi_modal_inputs: one mapping per row, name -> tensor.
        policy_versions: one per row, None where unknown.
    """

    tensors: dict[str, Any]
    layout: BatchLayout
    multi_modal_inputs: list[dict[str, Tensor]] = field(default_factory=list)
    policy_versions: list[int | None] = field(default_factory=list)

    def __getitem__(self, key: str) -> Any:
        return self.tensors[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.tensors[key] = value

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def collate_step(
    manifest: Manifest, rows: LoadedRows, *, rank: int = 0, world: int = 1, device: str = "cpu"
) -> list[MicroBatch]:
    """Return the micro-batches of one rank, each with the denominators of the whole step.

    A stored pair becomes two rows, the chosen one first.
    """
    columns, pairs = _columns(manifest, rows)
    size = 2 if pairs else 1
    layout = _layout_of_step(manifest, columns, size, world)
    batches = []
    for plan in manifest.microbatches:
        if plan.rank != rank:
            continue
        place = replace(plan, start=size * plan.start, stop=size * plan.stop)
        padded = manifest.layout == "padded"
        tensors = _padded(columns, place) if padded else _packed(columns, place)
        tensors |= _per_row(manifest, plan, size)
        tensors = {name: _moved(value, device) for name, value in tensors.items()}
        tensors["old_logprob"] = tensors["rollout_logprob"]
        chosen = slice(plan.start, plan.stop)
        modal = [
            {
                name: _moved(torch.from_numpy(np.array(value)), device)
                for name, value in inputs.items()
            }
            for inputs in rows.multi_modal[chosen]
            for _ in range(size)
        ]
        versions = [row.policy_version for row in rows.meta[chosen] for _ in range(size)]
        mine = replace(layout, cu_seqlens=tensors.get("cu_seqlens"))
        batches.append(MicroBatch(tensors, mine, modal, versions))
    return batches


def _per_row(manifest: Manifest, plan: MicroBatchPlan, size: int) -> dict[str, Tensor]:
    """Return the tensors ``[N]`` that say of each row what it is."""
    chosen = slice(plan.start, plan.stop)
    slots = torch.arange(plan.start, plan.stop, dtype=torch.int32).repeat_interleave(size)
    groups = torch.tensor(manifest.groups[chosen], dtype=torch.int32).repeat_interleave(size)
    found = {
        "sample_index": slots,
        "group_index": groups,
        "step": torch.full((len(slots),), manifest.step, dtype=torch.int32),
    }
    if manifest.sources:
        of = torch.tensor(manifest.source[chosen], dtype=torch.int32)
        found["expert_mask"] = (of > 0).repeat_interleave(size)
    return found


def _layout_of_step(manifest: Manifest, columns: _Columns, size: int, world: int) -> BatchLayout:
    """Return the denominators: over all rows, over the usual ones, over the expert's."""
    tokens = [int(np.count_nonzero(mask)) for mask in columns.masks]
    groups = [group for group in manifest.groups for _ in range(size)]
    expert = [of > 0 for of in manifest.source or [0] * len(manifest.groups) for _ in range(size)]
    every = range(len(tokens))

    def count(rows: Sequence[int]) -> Totals:
        return Totals(
            tokens=sum(tokens[row] for row in rows),
            sequences=len(rows),
            groups=len({groups[row] for row in rows}),
            active_sequences=sum(tokens[row] > 0 for row in rows),
        )

    return BatchLayout(
        total=count(every),
        usual=count([row for row in every if not expert[row]]),
        expert=count([row for row in every if expert[row]]),
        normalizer=manifest.normalizer,
        world_size=world,
    )


def _moved(value: Any, device: str) -> Any:
    if not isinstance(value, Tensor) or device == "cpu":
        return value
    return value.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _Columns:
    """Per row of the step; ``responses`` begin at ``prompt_lengths``."""

    tokens: Sequence[Array]
    prompt_lengths: Sequence[int]
    masks: Sequence[Array]
    responses: dict[str, Sequence[Value]]
    rewards: Sequence[float | None]


def _columns(manifest: Manifest, rows: LoadedRows) -> tuple[_Columns, bool]:
    """Return the columns, and whether they are those of pairs, two rows each."""
    if any(value is not None for value in rows.column("chosen")):
        return _halves(rows), True
    masks = rows.column("action_mask")
    stored = {
        "rollout_logprob": "logprobs",
        "advantages": "advantages",
        "returns": "returns",
        "token_level_rewards": "token_level_reward",
    }
    responses = {name: rows.column(source) for name, source in stored.items()}
    rewards: Sequence[float | None] = [row.reward for row in rows.meta]
    if any(manifest.source):
        # What an expert's rows hold of a rollout was not the policy's: it is 0.
        responses = {name: _usual(values, manifest) for name, values in responses.items()}
        rewards = _usual(rewards, manifest)
    for column, name in OPTIONAL.items():
        values = rows.column(column)
        if all(value is not None for value in values):
            responses[name] = values
    if any(not isinstance(mask, np.ndarray) for mask in masks):
        raise InvalidArgumentError(
            "a row of the step has neither an action mask nor a pair of answers: run `verify`"
        )
    found = _Columns(
        rows.column("tokens"),  # type: ignore[arg-type]
        [row.prompt_length for row in rows.meta],
        masks,  # type: ignore[arg-type]
        responses,
        rewards,
    )
    return found, False


def _usual(values: Sequence[Any], manifest: Manifest) -> list[Any]:
    """Return ``values`` with None for the rows of an expert."""
    return [None if of else value for value, of in zip(values, manifest.source, strict=True)]


def _halves(rows: LoadedRows) -> _Columns:
    """Return the columns of pairs: the prompt with the chosen and the rejected answer, in turn."""
    prompts, halves = rows.column("tokens"), (rows.column("chosen"), rows.column("rejected"))
    pairs = zip(prompts, *halves, strict=True)
    answers = [(np.asarray(prompt), np.asarray(half)) for prompt, *both in pairs for half in both]
    nothing: Sequence[Value] = [None] * len(answers)
    names = ("rollout_logprob", "advantages", "returns", "token_level_rewards")
    return _Columns(
        [np.concatenate([prompt, half]) for prompt, half in answers],
        [len(prompt) for prompt, _ in answers],
        [np.ones(len(half), np.bool_) for _, half in answers],
        dict.fromkeys(names, nothing),
        [None] * len(answers),
    )


def row_lengths(manifest: Manifest, rows: LoadedRows, *, longest: bool = False) -> list[int]:
    """Return per stored pair what `plan_microbatches` asks for, or its longer half's tokens."""
    sizes = [len(tokens) for tokens in _halves(rows).tokens]
    of_pair = max if longest or manifest.layout == "padded" else sum
    return [of_pair(pair) for pair in zip(sizes[0::2], sizes[1::2], strict=True)]


def _padded(columns: _Columns, plan: MicroBatchPlan) -> dict[str, Any]:
    """Right-padded ``[N, width]`` tensors."""
    number, width = plan.stop - plan.start, plan.width
    lengths = np.array([len(columns.tokens[row]) for row in range(plan.start, plan.stop)])
    tokens = np.zeros((number, width), np.int64)
    mask = np.zeros((number, width), np.bool_)
    responses = {name: np.zeros((number, width), np.float32) for name in columns.responses}
    for i, row in enumerate(range(plan.start, plan.stop)):
        tokens[i, : lengths[i]] = columns.tokens[row]
        _fill_row(
            columns,
            row,
            mask[i],
            {name: out[i] for name, out in responses.items()},
            int(lengths[i]),
        )
    positions = torch.arange(width).expand(number, width)
    return {
        "input_ids": torch.from_numpy(tokens),
        "position_ids": positions,
        "attention_mask": positions < torch.from_numpy(lengths)[:, None],
        "action_mask": torch.from_numpy(mask),
        **{name: torch.from_numpy(out) for name, out in responses.items()},
    }


def _packed(columns: _Columns, plan: MicroBatchPlan) -> dict[str, Any]:
    """Tensors ``[T]`` of all rows one after another, and their boundaries."""
    chosen = range(plan.start, plan.stop)
    lengths = np.array([len(columns.tokens[row]) for row in chosen])
    ends = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    total = int(ends[-1])
    mask = np.zeros(total, np.bool_)
    responses = {name: np.zeros(total, np.float32) for name in columns.responses}
    for i, row in enumerate(chosen):
        place = slice(int(ends[i]), int(ends[i + 1]))
        _fill_row(
            columns,
            row,
            mask[place],
            {name: out[place] for name, out in responses.items()},
            int(lengths[i]),
        )
    tokens = np.concatenate([columns.tokens[row] for row in chosen]).astype(np.int64)
    positions = np.arange(total) - np.repeat(ends[:-1], lengths)
    return {
        "input_ids": torch.from_numpy(tokens),
        "position_ids": torch.from_numpy(positions),
        "attention_mask": torch.ones(total, dtype=torch.bool),
        "action_mask": torch.from_numpy(mask),
        **{name: torch.from_numpy(out) for name, out in responses.items()},
        "cu_seqlens": torch.from_numpy(ends.astype(np.int32)),
        "max_seqlen": int(lengths.max()),
    }


def _fill_row(
    columns: _Columns, row: int, mask: Array, responses: Mapping[str, Array], length: int
) -> None:
    """Place the response of one row into its slice of every column."""
    begin = columns.prompt_lengths[row]
    stored = columns.masks[row]
    mask[begin:length] = stored
    for name, out in responses.items():
        value = columns.responses[name][row]
        if isinstance(value, float):
            np.multiply(stored, value, out=out[begin:length], casting="unsafe")
        elif value is not None:
            out[begin:length] = value
        elif name == "token_level_rewards" and columns.rewards[row] is not None:
            out[length - 1] = columns.rewards[row]
