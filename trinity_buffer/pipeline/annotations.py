"""Encodes computed advantages as segments; a per-token ``scalar * mask`` is stored as one scalar.

Most advantages have that form: GRPO's 65 thousand numbers of a write become 64.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trinity_buffer.codec.blob import Buffer, writable
from trinity_buffer.codec.segments import ANNOTATED, Column, decode_segment, encode_segment
from trinity_buffer.errors import CodecError
from trinity_buffer.experience import Experience
from trinity_buffer.pipeline import encoding

_SCALED_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def encode_annotations(experiences: Sequence[Experience]) -> bytes:
    """Encode the advantages, returns and token-level rewards of ``experiences`` as one segment.

    A tensor that is bit for bit ``scalar * action_mask`` is stored as the scalar, and ``returns``
    that are bit for bit the advantages are not stored again; None stays None.
    """
    known = [experience.__dict__ for experience in experiences]
    masks = [fields.get("action_mask") for fields in known]
    tensors = {field: [fields.get(field) for fields in known] for field in ANNOTATED}
    aliases = {}
    # As bytes: 0.0 == -0.0, and NaN != NaN.
    advantages, returns = (
        [(c.dtype, c.shapes.tolist(), [*c.places], c.data.tobytes()) for c in columns]
        for columns in (
            encoding.columns_of(field, tensors[field]) for field in ("advantages", "returns")
        )
    )
    if advantages and advantages == returns:
        del tensors["returns"]
        aliases["returns"] = "advantages"
    columns = [column for field, rows in tensors.items() for column in _columns(field, rows, masks)]
    return encode_segment(columns, {}, len(experiences), aliases=aliases)


def _columns(
    field: str, tensors: Sequence[Tensor | None], masks: Sequence[Tensor | None]
) -> list[Column]:
    scalable: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for row, (tensor, mask) in enumerate(zip(tensors, masks, strict=True)):
        if tensor is None or mask is None or tensor.dtype not in _SCALED_DTYPES:
            continue
        if tensor.ndim == 1 and tensor.shape == mask.shape:
            scalable.setdefault((tensor.dtype, mask.dtype), []).append(row)
    rest, columns = list(tensors), []
    for rows in scalable.values():
        scaled, scalars = _scalars(rows, tensors, masks)
        for row in scaled:
            rest[row] = None
        if scaled:
            column = Column(
                field,
                encoding.DTYPE_NAMES[scalars.dtype],
                np.zeros((len(scaled), 0), np.int64),
                encoding.bytes_of([scalars]),
                None if len(scaled) == len(tensors) else np.array(scaled, np.int64),
                "scaled_mask",
            )
            columns.append(column)
    return columns + encoding.columns_of(field, rest)


def _scalars(
    rows: Sequence[int], tensors: Sequence[Tensor | None], masks: Sequence[Tensor | None]
) -> tuple[list[int], Tensor]:
    """Return those of ``rows``, all of one dtype, that are a scalar times their mask, and these."""
    present = [tensor for row in rows if (tensor := tensors[row]) is not None]
    sizes = [tensor.numel() for tensor in present]
    values = torch.cat(present).detach()
    weights = torch.cat([mask for row in rows if (mask := masks[row]) is not None]).to(values.dtype)
    # Only its first selected token can give the scalar of a row; without tokens, it is 0.
    trained, starts = (weights != 0).numpy(), np.cumsum([0, *sizes])[:-1].tolist()
    filled = [row for row, size in enumerate(sizes) if size]
    firsts = [starts[row] + int(trained[starts[row] :][: sizes[row]].argmax()) for row in filled]
    divisor, scalars = weights[firsts], values.new_zeros(len(sizes))
    scalars[filled] = values[firsts] / divisor.masked_fill(divisor == 0, 1)
    product = _products(scalars, weights, sizes)
    bits = _BITS[values.element_size()]
    # Compare bits, not values: 0.0 == -0.0, and NaN != NaN.
    same = product.view(bits) == values.view(bits)
    if bool(same.all()):
        return list(rows), scalars
    scaled = [
        index for index, piece in enumerate(same.split_with_sizes(sizes)) if bool(piece.all())
    ]
    return [rows[index] for index in scaled], scalars[scaled]


def _products(scalars: Tensor, weights: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return each row's scalar times its piece of ``weights``; encoding and decoding share it."""
    return scalars.repeat_interleave(torch.tensor(sizes, dtype=torch.int64)) * weights


def decode_annotations(
    blob: Buffer, slots: Sequence[int] | None, masks: Sequence[Tensor | None]
) -> list[dict[str, Tensor | None]]:
    """Return the advantages and returns of each of ``slots`` as full tensors.

    Args:
        blob: from `encode_annotations`.
        slots: the rows to decode, in their order; None: all.
        masks: the action masks of ``slots``, in their order.

    Returns:
        ``{"advantages": ..., "returns": ...}`` for each slot, and ``token_level_reward`` where it
        was stored.

    Raises:
        CodecError: a damaged blob, or a mask that is missing.
    """
    segment = decode_segment(writable(blob))
    wanted = list(range(segment.rows)) if slots is None else list(slots)
    if len(wanted) != len(masks) or any(not 0 <= slot < segment.rows for slot in wanted):
        raise CodecError(
            f"slots {wanted} with {len(masks)} masks, of annotations of {segment.rows} experiences"
        )
    computed: list[dict[str, Tensor | None]] = [
        {"advantages": None, "returns": None} for _ in wanted
    ]
    for field in ANNOTATED:
        for column in segment.columns.get(field, []):
            index_of = {row: index for index, row in enumerate(column.places)}
            places = [place for place, slot in enumerate(wanted) if slot in index_of]
            indices = [index_of[wanted[place]] for place in places]
            if column.encoding == "scaled_mask":
                of_places = [masks[place] for place in places]
                tensors = _full(encoding.flat_tensor(column)[indices], of_places, field)
            else:  # two fields that share a column get memory of their own
                tensors, shared = encoding.tensors_of(column, indices), field in segment.aliases
                tensors = [tensor.clone() for tensor in tensors] if shared else tensors
            for place, tensor in zip(places, tensors, strict=True):
                computed[place][field] = tensor
    return computed


def _full(scalars: Tensor, masks: Sequence[Tensor | None], field: str) -> Sequence[Tensor]:
    """Return the full tensors of scalars: each times its mask."""
    present = [mask for mask in masks if mask is not None]
    if len(present) < len(masks):
        raise CodecError(f"{field} is stored as a multiple of an action mask, and there is no mask")
    if not present:
        return []
    sizes = [mask.numel() for mask in present]
    # Convert each mask first if dtypes differ: ``torch.cat`` would promote all of them.
    alike = len({mask.dtype for mask in present}) == 1
    weights = torch.cat(present if alike else [mask.to(scalars.dtype) for mask in present])
    return _products(scalars, weights.to(scalars.dtype), sizes).split_with_sizes(sizes)
