"""The checks of `validation` on whole columns: a yes holds for each experience, a no for none yet.

Looking at each experience takes longer than writing it. So whatever can be told of all at once is
told of all at once; only where that fails is each looked at, to name the one and its field.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import sub
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity_buffer.codec import DTYPES, Column
from trinity_buffer.identity import EID, problem_of_key, problem_of_name, problem_of_text
from trinity_buffer.pipeline.fields import Fields
from trinity_buffer.pipeline.tensor_columns import GivenTensors
from trinity_buffer.pipeline.writing.validation import (
    FLOATS,
    INTEGERS,
    LISTS,
    MASKS,
    MAX_BYTES,
    MAX_FLOAT32,
    MAX_INT32,
    MAX_INT64,
    NOBODY,
    PER_TOKEN,
    SCHEMAS,
    TEXTS,
    is_custom_field,
)
from trinity_buffer.sampling import problem_of_segments

_INT, _FLOAT, _TEXT, _DICT = (frozenset({kind}) for kind in (int, float, str, dict))
_LIST, _EID, _TENSOR, _NONE = (frozenset({kind}) for kind in (list, EID, Tensor, type(None)))
_NOBODYS = ("routed_experts", "multi_modal_inputs", "chosen", "rejected")
"""Fields of experiences that are looked at one by one."""

ROUNDING = 0.01
"""So far above 0 may the logarithm of a probability come, in whatever precision."""


def forms_pass(fields: Fields, schema: str) -> bool:
    """Return whether types, shapes and addresses are right in all of some experiences.

    False says that one of them may be wrong, or of a form that is looked at one by one: a pair, a
    subclass of a tensor, an experience with pictures or with experts.
    """
    rules = SCHEMAS.get(schema)
    if rules is None or not len(fields):
        return False
    kinds = set(fields["experience_type"])
    if "dpo" in kinds or not kinds.issubset(rules.kinds):
        return False
    if not all(fields.kinds(name) == _NONE for name in _NOBODYS):
        return False
    responses = _responses(fields)
    return (
        responses is not None
        and _addresses_pass(fields)
        and _sizes(fields, "action_mask", MASKS) == responses
        and all(_sizes_where_given(fields, name, FLOATS, responses) for name in PER_TOKEN)
        and _rewards_pass(fields)
        and fields.kinds("metrics") == _DICT
        and all(fields.kinds(name) <= _TEXT | _NONE for name in TEXTS)
        and all(fields.kinds(name) <= _LIST | _NONE for name in LISTS)
        and fields.kinds("custom_fields") == _LIST
        and all(map(is_custom_field, chain.from_iterable(fields["custom_fields"])))
        and _infos_pass(fields)
    )


def addresses(fields: Fields) -> set[tuple[Any, ...]]:
    """Return the addresses as the store compares them: ``7`` and ``"7"`` are one key."""
    batches, tasks, *others = fields.addresses
    return set(zip(map(str, batches), map(str, tasks), *others, strict=True))


def numbers_pass(columns: Mapping[str, Sequence[Column]], sizes: Iterable[int]) -> bool:
    """Return whether the numbers of experiences whose forms pass are right in all of them.

    Args:
        columns: field -> columns, as they were encoded.
        sizes: bytes of all that was encoded.
    """
    if sum(sizes) > MAX_BYTES:  # more than one of them may have
        return False
    return (
        all(map(_none_is_negative, columns.get("tokens", ())))
        and all(map(_all_are_0_or_1, columns.get("action_mask", ())))
        and all(
            map(_all_are_finite, [one for field in PER_TOKEN for one in columns.get(field, ())])
        )
    )


def first_above_zero(column: Column) -> tuple[int, float] | None:
    """Return the first row of log-probabilities with one well above 0, and the largest of all.

    None if there is none. What was quarantined may hold NaN, which is not above anything.
    """
    numbers = column.elements
    if column.dtype == "bfloat16":  # the upper half of a float32, of which NumPy knows no type
        numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
    elif column.dtype not in ("float16", "float32", "float64"):
        return None
    above = np.flatnonzero(numbers > ROUNDING)
    if not len(above):
        return None
    index = int(np.searchsorted(column.offsets, above[0], side="right")) - 1
    row = index if column.rows is None else int(column.rows[index])
    return row, float(numbers[above].max())


def _responses(fields: Fields) -> list[int] | None:
    """Return how many tokens each response has, or None if prompts or tokens may be wrong."""
    prompts = fields["prompt_length"]
    sizes = _sizes(fields, "tokens", INTEGERS) if fields.kinds("prompt_length") == _INT else None
    if sizes is None or min(prompts) < 1:
        return None
    responses = list(map(sub, sizes, prompts))
    return responses if min(responses) > 0 else None


def _sizes(fields: Fields, name: str, dtypes: Collection[torch.dtype]) -> Sequence[int] | None:
    """Return the sizes of dense vectors of ``dtypes``, or None if one is something else."""
    if fields.kinds(name) != _TENSOR:
        return None
    return _sizes_of(fields.tensors(name), dtypes)


def _sizes_of(tensors: GivenTensors, dtypes: Collection[torch.dtype]) -> Sequence[int] | None:
    for dtype, ndim, device, layout in set(tensors.kinds):
        if dtype not in dtypes or ndim != 1 or layout != torch.strided or device.type == "meta":
            return None
    return tensors.sizes


def _sizes_where_given(
    fields: Fields, name: str, dtypes: Collection[torch.dtype], wanted: Sequence[int]
) -> bool:
    if fields.kinds(name) == _NONE:
        return True
    if not fields.kinds(name) <= _TENSOR | _NONE:
        return False
    tensors = fields.tensors(name)
    rows = range(len(wanted)) if tensors.rows is None else tensors.rows
    return _sizes_of(tensors, dtypes) == [wanted[row] for row in rows]


def _addresses_pass(fields: Fields) -> bool:
    if fields.kinds("eid") != _EID:
        return False
    batches, tasks, runs, steps, suffixes = fields.addresses
    if not _are(_INT, runs) or not _are(_INT, steps) or not _are(_TEXT, suffixes):
        return False
    if not _are(_INT | _TEXT, batches) or not _are(_INT | _TEXT, tasks):
        return False
    keys, names = set(batches), set(suffixes)
    return (
        min(runs) >= 0
        and min(steps) >= 0
        and max(max(runs), max(steps)) <= MAX_INT32
        and _no_problem(problem_of_key, keys | set(tasks))
        and _no_problem(problem_of_name, names)
        and not any("/" in name for name in keys | names if type(name) is str)
        and ("" not in keys or NOBODY not in fields["eid"])
    )


def _are(kinds: Collection[type], values: Iterable[object]) -> bool:
    return set(map(type, values)).issubset(kinds)


def _no_problem(problem_of: Callable[[Any], str | None], values: Iterable[object]) -> bool:
    return all(problem_of(value) is None for value in values)


def _rewards_pass(fields: Fields) -> bool:
    if fields.kinds("reward") == _FLOAT:
        rewards = fields["reward"]
        # All are compared only where none is NaN, which is neither more nor less.
        return (
            all(map(math.isfinite, rewards))
            and -MAX_FLOAT32 <= min(rewards) <= max(rewards) <= MAX_FLOAT32
        )
    return all(map(_reward_passes, fields["reward"]))


def _reward_passes(reward: object) -> bool:
    if type(reward) is float:
        return abs(reward) <= MAX_FLOAT32
    return reward is None or (type(reward) is int and abs(reward) <= MAX_INT64)


def _infos_pass(fields: Fields) -> bool:
    if fields.kinds("info") != _DICT:
        return False
    versions, reasons = fields.versions, fields.reasons
    if not _are(_INT | _NONE, versions) or not _are(_TEXT | _NONE, reasons):
        return False
    if any(segments is not None for segments in fields.segments):
        sizes = fields.tensors("tokens").sizes
        rows = zip(fields.segments, fields["prompt_length"], sizes, strict=True)
        if any(s is not None and problem_of_segments(s, *sizes) for s, *sizes in rows):
            return False
    return all(
        version is None or abs(version) <= MAX_INT64 for version in set(versions)
    ) and _no_problem(problem_of_text, set(reasons) - {None})


def _none_is_negative(column: Column) -> bool:
    return DTYPES[column.dtype].kind != "i" or int(column.elements.min(initial=0)) >= 0


def _all_are_0_or_1(column: Column) -> bool:
    if column.dtype == "bool":
        return True
    numbers = column.elements
    return column.dtype != "bfloat16" and bool(((numbers == 0) | (numbers == 1)).all())


def _all_are_finite(column: Column) -> bool:
    if column.dtype in ("float32", "float64"):
        numbers = column.elements  # NaN and Inf survive in a sum of squares
        with np.errstate(all="ignore"):
            return bool(np.dot(numbers, numbers) <= MAX_FLOAT32)
    return not column.dtype.startswith(("float", "bfloat"))
