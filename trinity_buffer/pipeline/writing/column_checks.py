"""The checks of `validation` on whole columns: a yes holds for each experience, a no for none yet.

Looking at each experience takes longer than writing it. So whatever can be told of all at once is
told of all at once; only where that fails is each looked at, to name the one and its field.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, sub
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity_buffer.codec import DTYPES, Column
from trinity_buffer.experience import Experience
from trinity_buffer.identity import EID, problem_of_key, problem_of_name, problem_of_text
from trinity_buffer.pipeline.writing.validation import (
    FLOATS,
    INTEGERS,
    LISTS,
    MASKS,
    MAX_BYTES,
    MAX_INT32,
    MAX_INT64,
    NOBODY,
    PER_TOKEN,
    SCHEMAS,
    TEXTS,
    is_custom_field,
)

_INT, _TEXT, _DICT, _NONE = (frozenset({kind}) for kind in (int, str, dict, type(None)))
_LIST = frozenset({list})
_OF_EID = attrgetter("batch", "task", "run", "step", "suffix")
_OF_TENSOR = attrgetter("dtype", "ndim", "layout", "is_meta")
_FIELDS = attrgetter(
    *("eid", "experience_type", "tokens", "prompt_length", "action_mask", "reward"),
    *("info", "metrics", "routed_experts", "multi_modal_inputs", "custom_fields"),
    *("chosen", "rejected", *PER_TOKEN, *TEXTS, *LISTS),
)
_TEXTS = len(PER_TOKEN)
_LISTS = _TEXTS + len(TEXTS)
"""Where these columns begin, behind those that are one by one."""


def forms_pass(experiences: Sequence[Experience], schema: str) -> bool:
    """Return whether types, shapes and addresses are right in all of ``experiences``.

    False says that one of them may be wrong, or of a form that is looked at one by one: a pair, a
    subclass of a tensor, an experience with pictures or with experts.
    """
    rules = SCHEMAS.get(schema)
    if rules is None or not experiences:
        return False
    eids, kinds, tokens, prompts, masks, rewards, infos, metrics, experts, *others = zip(
        *map(_FIELDS, experiences), strict=True
    )
    modal, custom, chosen, rejected, *others = others
    per_token, texts, lists = others[:_TEXTS], others[_TEXTS:_LISTS], others[_LISTS:]
    if "dpo" in kinds or not set(kinds).issubset(rules.kinds):
        return False
    if not all(_are(_NONE, rare) for rare in (experts, modal, chosen, rejected)):
        return False
    if not _are(_INT, prompts):
        return False
    sizes = _sizes(tokens, INTEGERS)
    if sizes is None or min(prompts) < 1 or not all(map(int.__lt__, prompts, sizes)):
        return False
    responses = list(map(sub, sizes, prompts))
    return (
        _addresses_pass(eids)
        and _sizes(masks, MASKS) == responses
        and all(_sizes_where_given(column, FLOATS, responses) for column in per_token)
        and all(map(_reward_passes, rewards))
        and _are(_DICT, metrics)
        and all(_are(_TEXT | _NONE, column) for column in texts)
        and all(_are(_LIST | _NONE, column) for column in lists)
        and _are(_LIST, custom)
        and all(map(is_custom_field, chain.from_iterable(custom)))
        and _infos_pass(infos, texts[-1])
    )


def numbers_pass(columns: Mapping[str, Sequence[Column]], sizes: Iterable[int]) -> bool:
    """Return whether the numbers of experiences whose forms pass are right in all of them.

    Args:
        columns: field -> columns, as they were encoded.
        sizes: bytes of all that was encoded.
    """
    if sum(sizes) > MAX_BYTES:  # more than one of them may have
        return False
    finite = ("action_mask", *PER_TOKEN)
    return all(map(_none_is_negative, columns.get("tokens", ()))) and all(
        map(_all_are_finite, [column for field in finite for column in columns.get(field, ())])
    )


def _are(kinds: Collection[type], values: Iterable[object]) -> bool:
    return set(map(type, values)).issubset(kinds)


def _sizes(tensors: Sequence[Any], dtypes: Collection[torch.dtype]) -> list[int] | None:
    """Return the sizes of dense vectors of ``dtypes``, or None if one is something else."""
    if not _are({Tensor}, tensors):
        return None
    for dtype, ndim, layout, is_meta in set(map(_OF_TENSOR, tensors)):
        if dtype not in dtypes or ndim != 1 or layout != torch.strided or is_meta:
            return None
    return [tensor.numel() for tensor in tensors]


def _sizes_where_given(
    column: Sequence[Any], dtypes: Collection[torch.dtype], wanted: Sequence[int]
) -> bool:
    if _are(_NONE, column):
        return True
    given = [row for row, tensor in enumerate(column) if tensor is not None]
    found = _sizes([column[row] for row in given], dtypes)
    return found == [wanted[row] for row in given]


def _addresses_pass(eids: Sequence[Any]) -> bool:
    if not _are({EID}, eids):
        return False
    batches, tasks, runs, steps, suffixes = zip(*map(_OF_EID, eids), strict=True)
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
        and ("" not in keys or NOBODY not in eids)
    )


def _no_problem(problem_of: Callable[[Any], str | None], values: Iterable[object]) -> bool:
    return all(problem_of(value) is None for value in values)


def _reward_passes(reward: object) -> bool:
    if type(reward) is float:
        return math.isfinite(reward)
    return reward is None or (type(reward) is int and abs(reward) <= MAX_INT64)


def _infos_pass(infos: Sequence[Any], truncated: Sequence[Any]) -> bool:
    if not _are(_DICT, infos):
        return False
    versions = [info.get("model_version") for info in infos]
    reasons = [info.get("finish_reason") or how for info, how in zip(infos, truncated, strict=True)]
    if not _are(_INT | _NONE, versions) or not _are(_TEXT | _NONE, reasons):
        return False
    return all(
        version is None or abs(version) <= MAX_INT64 for version in set(versions)
    ) and _no_problem(problem_of_text, set(reasons) - {None})


def _none_is_negative(column: Column) -> bool:
    return DTYPES[column.dtype].kind != "i" or int(column.elements.min(initial=0)) >= 0


def _all_are_finite(column: Column) -> bool:
    if column.dtype in ("float32", "float64"):
        numbers = column.elements  # NaN and Inf survive in a sum of squares
        with np.errstate(all="ignore"):
            return math.isfinite(np.dot(numbers, numbers))
    return not column.dtype.startswith(("float", "bfloat"))
