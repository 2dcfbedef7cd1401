"""What strategies compute, as segments: a per-token value that is ``scalar * mask`` is one scalar.

Most advantages are: GRPO's 65 thousand numbers of a write are 64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trinity_buffer.codec import Column, Segment, decode_segment, encode_segment
from trinity_buffer.errors import CodecError
from trinity_buffer.experience import Experience
from trinity_buffer.pipeline.tensor_columns import bytes_of, columns_of, tensors_of

ANNOTATED = ("advantages", "returns", "token_level_reward")
"""Fields of an annotation, ``[R]`` each."""

_SCALED_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def encode_annotations(experiences: Sequence[Experience]) -> bytes:
    """Return the advantages, returns and token-level rewards of ``experiences`` as one segment.

    A tensor that is bit for bit ``scalar * action_mask`` is stored as the scalar, and ``returns``
    that are bit for bit the advantages are not stored again; None stays None.
    """
    masks = [experience.__dict__.get("action_mask") for experience in experiences]
    columns: dict[str, list[Column]] = {}
    for field in ANNOTATED:
        tensors = [experience.__dict__.get(field) for experience in experiences]
        columns[field] = _columns(field, tensors, masks)
    aliases = {}
    if columns["returns"] and _same(columns["returns"], columns["advantages"]):
        del columns["returns"]
        aliases["returns"] = "advantages"
    every = [column for some in columns.values() for column in some]
    return encode_segment(every, {}, len(experiences), aliases=aliases)


def _columns(
    field: str, tensors: Sequence[Tensor | None], masks: Sequence[Tensor | None]
) -> list[Column]:
    scaled: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for row, (tensor, mask) in enumerate(zip(tensors, masks, strict=True)):
        if tensor is not None and mask is not None and _may_scale(tensor, mask):
            scaled.setdefault((tensor.dtype, mask.dtype), []).append(row)
    rest = list(tensors)
    found: dict[torch.dtype, list[tuple[int, Tensor]]] = {}
    for rows in scaled.values():
        for row, scalar in _scalars(rows, tensors, masks):
            found.setdefault(scalar.dtype, []).append((row, scalar))
            rest[row] = None
    columns = columns_of(field, rest)
    for pairs in found.values():
        columns.append(_scaled_column(field, sorted(pairs, key=_row_of), len(tensors)))
    return columns


def _row_of(pair: tuple[int, Tensor]) -> int:
    return pair[0]


def _may_scale(tensor: Tensor, mask: Tensor) -> bool:
    return tensor.dtype in _SCALED_DTYPES and tensor.ndim == 1 and tensor.shape == mask.shape


def _scaled_column(field: str, pairs: Sequence[tuple[int, Tensor]], rows: int) -> Column:
    scalars = [scalar.reshape(1) for _, scalar in pairs]
    (column,) = columns_of(field, scalars)
    return Column(
        field,
        column.dtype,
        np.zeros((len(pairs), 0), np.int64),
        bytes_of(scalars),
        None if len(pairs) == rows else np.array([row for row, _ in pairs], np.int64),
        "scaled_mask",
    )


def _scalars(
    rows: Sequence[int], tensors: Sequence[Tensor | None], masks: Sequence[Tensor | None]
) -> list[tuple[int, Tensor]]:
    """Return (row, scalar) of the rows, of one dtype, that are a scalar times their mask."""
    values = torch.cat([tensor for row in rows if (tensor := tensors[row]) is not None]).detach()
    weights = torch.cat([mask for row in rows if (mask := masks[row]) is not None]).to(values.dtype)
    sizes = [len(tensor) for row in rows if (tensor := tensors[row]) is not None]
    scalars = _candidates(values, weights, sizes)
    product = scalars.repeat_interleave(torch.tensor(sizes)) * weights
    bits = _BITS[values.element_size()]
    # Bits, not values: 0.0 and -0.0 are equal, and no NaN is.
    same = product.view(bits) == values.view(bits)
    if bool(same.all()):
        return list(zip(rows, scalars.unbind(), strict=True))
    return [
        (row, scalar)
        for row, scalar, piece in zip(
            rows, scalars.unbind(), same.split_with_sizes(sizes), strict=True
        )
        if bool(piece.all())
    ]


def _candidates(values: Tensor, weights: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the only scalar that each row can be a multiple of its mask by, ``[n]``."""
    trained = (weights != 0).numpy()
    starts = np.cumsum([0, *sizes])[:-1].tolist()
    places = [
        start + int(trained[start : start + size].argmax()) if size else -1
        for start, size in zip(starts, sizes, strict=True)
    ]
    index = torch.tensor([max(place, 0) for place in places])
    if not len(values):
        return values.new_zeros(len(sizes))
    divisor = weights[index]
    return values[index] / torch.where(divisor == 0, torch.ones_like(divisor), divisor)


def _same(some: Sequence[Column], others: Sequence[Column]) -> bool:
    return len(some) == len(others) and all(map(_same_column, some, others))


def _same_column(one: Column, other: Column) -> bool:
    return (
        (one.dtype, one.encoding) == (other.dtype, other.encoding)
        and np.array_equal(one.shapes, other.shapes)
        and np.array_equal(one.data, other.data)
        and (one.rows is None) == (other.rows is None)
        and (one.rows is None or np.array_equal(one.rows, other.rows))  # type: ignore[arg-type]  # the line above
    )


def decode_annotations(
    blob: bytes | bytearray, slots: Sequence[int] | None, masks: Sequence[Tensor | None]
) -> list[dict[str, Tensor | None]]:
    """Return, for each of ``slots``, its advantages and returns as full tensors.

    Args:
        blob: from `encode_annotations`.
        slots: which rows, in which order; None: all.
        masks: the action masks of ``slots``, in their order.

    Returns:
        ``{"advantages": ..., "returns": ...}`` for each slot, and ``token_level_reward`` where it
        was stored.

    Raises:
        CodecError: a damaged blob, or a mask that is missing.
    """
    segment = decode_segment(blob if isinstance(blob, bytearray) else bytearray(blob))
    wanted = list(range(segment.rows)) if slots is None else list(slots)
    if len(wanted) != len(masks) or any(not 0 <= slot < segment.rows for slot in wanted):
        raise CodecError(
            f"slots {wanted} with {len(masks)} masks, of annotations of {segment.rows} experiences"
        )
    found: list[dict[str, Tensor | None]] = [{"advantages": None, "returns": None} for _ in wanted]
    for field in ANNOTATED:
        for column in segment.columns.get(field, []):
            _fill(found, field, column, wanted, masks, shared=field in segment.aliases)
    return found


def _fill(
    found: Sequence[dict[str, Tensor | None]],
    field: str,
    column: Column,
    wanted: Sequence[int],
    masks: Sequence[Tensor | None],
    *,
    shared: bool,
) -> None:
    rows = range(len(column.shapes)) if column.rows is None else column.rows.tolist()
    index_of = {row: index for index, row in enumerate(rows)}
    places = [place for place, slot in enumerate(wanted) if slot in index_of]
    tensors = tensors_of(column, [index_of[wanted[place]] for place in places])
    for place, tensor in zip(places, tensors, strict=True):
        if column.encoding == "scaled_mask":
            found[place][field] = _product(tensor, masks[place], field)
        else:
            found[place][field] = tensor.clone() if shared else tensor


def _product(scalar: Tensor, mask: Tensor | None, field: str) -> Tensor:
    if mask is None:
        raise CodecError(f"{field} is stored as a multiple of an action mask, and there is no mask")
    return scalar * mask.to(scalar.dtype)


def annotation_scalars(blob: bytes | bytearray, field: str) -> npt.NDArray[Any] | None:
    """Return the scalars ``[rows]`` of a field whose every row is ``scalar * action_mask``.

    None where that is not so (some row is None, or differs from token to token), or where NumPy
    does not have the dtype: then `decode_annotations`.

    Raises:
        CodecError: a damaged blob.
    """
    segment: Segment = decode_segment(blob)
    columns = segment.columns.get(field, [])
    if len(columns) != 1 or columns[0].rows is not None:
        return None
    column = columns[0]
    usable = column.encoding == "scaled_mask" and column.dtype.startswith("float")
    return column.elements if usable else None
