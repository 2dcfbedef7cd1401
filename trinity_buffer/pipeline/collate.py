"""From rows to micro-batches: full-length, token-aligned tensors, padded or packed, under one set of names.

Element t describes token t; a response-aligned column is placed from ``prompt_length`` on, and
position 0 holds 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity_buffer.algorithm.layout import BatchLayout, Totals
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.pipeline.manifest import Manifest, MicroBatchPlan
from trinity_buffer.pipeline.row_loader import Array, LoadedRows, Value

OPTIONAL = {"teacher_logprobs": "teacher_logprob"}
"""Response-aligned columns that are there only when every row of the step has them: stored name -> batch name."""


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
    """Return the micro-batches of one rank, each with the denominators of the whole step."""
    total = Totals(
        tokens=sum(row.trained_tokens for row in rows.meta),
        sequences=len(rows.meta),
        groups=manifest.num_groups,
        active_sequences=sum(row.trained_tokens > 0 for row in rows.meta),
    )
    nothing = Totals(0, 0, 0, 0)
    columns = _columns(rows)
    batches = []
    for plan in manifest.microbatches:
        if plan.rank != rank:
            continue
        tensors = _padded(columns, plan) if manifest.layout == "padded" else _packed(columns, plan)
        chosen = slice(plan.start, plan.stop)
        tensors["sample_index"] = torch.arange(plan.start, plan.stop, dtype=torch.int32)
        tensors["group_index"] = torch.tensor(manifest.groups[chosen], dtype=torch.int32)
        tensors["step"] = torch.full((plan.stop - plan.start,), manifest.step, dtype=torch.int32)
        tensors = {name: _moved(value, device) for name, value in tensors.items()}
        tensors["old_logprob"] = tensors["rollout_logprob"]
        layout = BatchLayout(
            total=total,
            usual=total,
            expert=nothing,
            cu_seqlens=tensors.get("cu_seqlens"),
            normalizer=manifest.normalizer,
            world_size=world,
        )
        modal = [
            {
                name: _moved(torch.from_numpy(np.array(value)), device)
                for name, value in inputs.items()
            }
            for inputs in rows.multi_modal[chosen]
        ]
        batches.append(
            MicroBatch(tensors, layout, modal, [row.policy_version for row in rows.meta[chosen]])
        )
    return batches


def _moved(value: Any, device: str) -> Any:
    if not isinstance(value, Tensor) or device == "cpu":
        return value
    return value.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _Columns:
    """Per row of the step; ``responses`` are aligned with the response, from ``prompt_lengths`` on."""

    tokens: Sequence[Array]
    prompt_lengths: Sequence[int]
    masks: Sequence[Array]
    responses: dict[str, Sequence[Value]]
    rewards: Sequence[float | None]


def _columns(rows: LoadedRows) -> _Columns:
    masks = rows.column("action_mask")
    responses = {
        "rollout_logprob": rows.column("logprobs"),
        "advantages": rows.column("advantages"),
        "returns": rows.column("returns"),
        "token_level_rewards": rows.column("token_level_reward"),
    }
    for stored, name in OPTIONAL.items():
        values = rows.column(stored)
        if all(value is not None for value in values):
            responses[name] = values
    if any(not isinstance(mask, np.ndarray) for mask in masks):
        raise InvalidArgumentError(
            "a row of the step has no action mask; this stream trains single rows, not pairs"
        )
    return _Columns(
        rows.column("tokens"),  # type: ignore[arg-type]
        [row.prompt_length for row in rows.meta],
        masks,  # type: ignore[arg-type]
        responses,
        [row.reward for row in rows.meta],
    )


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
