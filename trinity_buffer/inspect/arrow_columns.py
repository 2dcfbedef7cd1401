"""The columns of the table of what is stored: their types, and their values as Arrow holds them.

Nobody has checked what stands in ``info``, or which characters a text has: no value of them ends
an export.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trinity_buffer.inspect.writable import writable

TEXTS = ("prompt_text", "response_text")
_INFO = "info."


def info_column(key: str) -> str:
    """Return the name of the column that holds a key of ``info``."""
    return writable(f"{_INFO}{key}")


def array_of(arrow: Any, values: Sequence[Any], kind: Any) -> Any:
    """Return values, or arrays of numbers, as an array of ``kind``; null in place of any other."""
    if not arrow.types.is_list(kind):
        return _plain(arrow, values, kind)
    there = [one for one in values if one is not None]
    flat = arrow.array(np.concatenate(there)) if there else arrow.array([], kind.value_type)
    ends = np.zeros(len(values) + 1, np.int32)
    np.cumsum([0 if one is None else len(one) for one in values], out=ends[1:])
    absent = arrow.array([one is None for one in values])
    return arrow.ListArray.from_arrays(
        arrow.array(ends), flat.cast(kind.value_type), type=kind, mask=absent
    )


def _plain(arrow: Any, values: Sequence[Any], kind: Any) -> Any:
    try:
        return arrow.array(values, kind)
    except (ValueError, TypeError):  # of Arrow, and of a text that UTF-8 cannot write
        fitting = _text if arrow.types.is_string(kind) else _number
        return arrow.array([fitting(one) for one in values], kind)


def _text(value: Any) -> str | None:
    return writable(value) if isinstance(value, str) else None


def _number(value: Any) -> float | None:
    """Return a number as a float, None if none is equal to it."""
    if isinstance(value, float):
        return value
    try:
        return float(value) if isinstance(value, int) and float(value) == value else None
    except OverflowError:
        return None


def schema_of(arrow: Any, columns: Mapping[str, Sequence[Any]]) -> Any:
    """Return the columns that every table has, and those of ``info`` that the first page has."""
    text, number, real = arrow.string(), arrow.int64(), arrow.float64()
    texts: tuple[str, ...] = (
        "uid",
        "batch",
        "task",
        "suffix",
        "actor",
        "kind",
        "finish_reason",
        "refused",
    )
    texts += (*TEXTS, "messages", "info", "set", "state", "reason", "trainer", "damaged")
    numbers: tuple[str, ...] = (
        "run",
        "step",
        "position",
        "policy_version",
        "prompt_length",
        "length",
    )
    numbers += ("trained_tokens", "trained_step")
    fields = [(name, text) for name in texts] + [(name, number) for name in numbers]
    fields += [(name, real) for name in ("recorded_at", "reward", "advantage")]
    fields += [("tokens", arrow.list_(number)), ("action_mask", arrow.list_(arrow.bool_()))]
    fields += [(name, arrow.list_(arrow.float32())) for name in ("logprobs", "advantages")]
    for name, values in columns.items():
        if name.startswith(_INFO):
            known = [value for value in values if value is not None]
            numeric = all(isinstance(value, int | float) for value in known)
            fields.append((name, real if numeric else text))
    return arrow.schema(fields)
