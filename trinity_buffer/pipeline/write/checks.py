"""Validation of experiences before they are written.

Checking each experience takes longer than writing it. So whole columns are checked first: if they
pass, every experience is valid. Only if a column fails is each experience checked, to name the
invalid one and its field.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import sub
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity_buffer.codec import DTYPES, Column, ObjectPacker
from trinity_buffer.codec.arrays import MAX_DIMENSIONS
from trinity_buffer.errors import InvalidArgumentError, InvalidExperienceError
from trinity_buffer.experience import ZERO_OR_ONE, CustomField, Experience, ExperienceType
from trinity_buffer.identity import EID, problem_of_key, problem_of_name, problem_of_text
from trinity_buffer.pipeline.encoding import Fields
from trinity_buffer.pipeline.tensors import DTYPE_NAMES, PresentTensors, raw_tensor
from trinity_buffer.sampling import SEGMENTS, problem_of_segments

MAX_BYTES = 64 << 20
"""Upper bound of one experience's bytes: more would not fit one part of a segment."""

MAX_INT32, MAX_INT64 = (1 << 31) - 1, (1 << 63) - 1
MAX_FLOAT32 = torch.finfo(torch.float32).max
"""Largest finite number in float32, the dtype of micro-batches."""
INTEGERS = frozenset(
    {
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
    }
)
FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
MASKS = FLOATS | INTEGERS | {torch.bool}
PER_TOKEN = ("logprobs", "token_level_reward", "teacher_logprobs", "advantages", "returns")
TEXTS = ("response_text", "prompt_text", "truncate_status")
LISTS = ("messages", "tools", "chosen_messages", "rejected_messages")
NOBODY = EID()
"""The default address, of an experience without one."""

_TENSORS = ("tokens", "action_mask", *PER_TOKEN, "chosen", "rejected", "routed_experts")
_FORMS: dict[str, type] = {
    **dict.fromkeys(TEXTS, str),
    **dict.fromkeys(LISTS, list),
    **dict.fromkeys(("info", "metrics", "multi_modal_inputs"), dict),
    "custom_fields": list,
}
_ALWAYS = frozenset({"info", "metrics", "custom_fields"})
"""Fields whose empty value is an empty container, never None."""


@dataclass(frozen=True, slots=True)
class Schema:
    """The requirements of one schema.

    Attributes:
        kinds: the types of experience that belong to it.
        tokens: the required fields of token ids.
        optional: fields that may be missing; a strategy or algorithm that needs one rejects the row
            as ``invalid``.
    """

    kinds: tuple[ExperienceType, ...]
    tokens: tuple[str, ...] = ("tokens",)
    optional: tuple[str, ...] = ("reward", "logprobs", "token_level_reward", "teacher_logprobs")


_TURNS: tuple[ExperienceType, ...] = ("single_turn", "multi_turn")

SCHEMAS: dict[str, Schema] = {
    "experience": Schema(_TURNS),
    "sft": Schema(_TURNS),
    "cpt": Schema(_TURNS),
    "dpo": Schema(("dpo",), ("tokens", "chosen", "rejected")),
}
"""``experience``: rollouts; ``sft``: demonstrations; ``cpt``: plain text; ``dpo``: pairs."""


def validate(
    experience: Experience, schema: str = "experience", *, max_bytes: int = MAX_BYTES
) -> None:
    """Check that ``experience`` can be stored and trained under ``schema``.

    Raises:
        InvalidExperienceError: it cannot; the message names it, the field and the accepted values.
        InvalidArgumentError: unknown schema.
    """
    rules = SCHEMAS.get(schema)
    if rules is None:
        raise InvalidArgumentError(f"schema={schema!r}: accepted are {', '.join(SCHEMAS)}")
    check_address(experience)
    _check_whole(experience)
    _check_kind(experience, schema, rules)
    for field in rules.tokens:
        _check_tokens(experience, field)
    response = None if experience.experience_type == "dpo" else _check_response(experience)
    _check_per_token(experience, response)
    _check_experts(experience)
    size = check_storable(experience)
    if size > max_bytes:
        raise _refuse(experience, "size", f"is {size} bytes, the limit is {max_bytes}")


def check_storable(experience: Experience) -> int:
    """Check that the stored form of ``experience`` can be read back; return its size in bytes.

    Raises:
        InvalidExperienceError: a reader could not decode it.
    """
    if type(experience.prompt_length) is not int:
        raise _refuse(experience, "prompt_length", f"is {experience.prompt_length!r}, no int")
    _check_reward(experience)
    _check_whole(experience)
    size = sum(_stored_bytes(experience, field) for field in _TENSORS)
    for field, form in _FORMS.items():
        value = getattr(experience, field)
        if not isinstance(value, form) and (value is not None or field in _ALWAYS):
            raise _refuse(
                experience, field, f"is a {type(value).__name__}, it must be a {form.__name__}"
            )
    _check_info(experience)
    for custom in experience.custom_fields:
        if not is_custom_field(custom):
            raise _refuse(experience, "custom_fields", f"has {custom!r:.80}, it is no CustomField")
    return size + _modal_bytes(experience) + _object_bytes(experience)


def is_custom_field(value: object) -> bool:
    """Return whether ``value`` is a `CustomField` that can be stored."""
    if not isinstance(value, CustomField):
        return False
    names = {type(value.source_field), type(value.destination_field)}
    return names == {str} and value.data_type in DTYPE_NAMES


def _check_whole(experience: Experience) -> None:
    """Check that no tensor is nested, as those raise when asked for their shape."""
    values = {field: getattr(experience, field) for field in _TENSORS}
    inputs = experience.multi_modal_inputs
    for name, value in inputs.items() if isinstance(inputs, dict) else ():
        values[f"multi_modal_inputs[{name!r}]"] = value
    for field, value in values.items():
        if isinstance(value, Tensor) and value.is_nested:
            raise _refuse(experience, field, "is a nested tensor: make an Experience of each row")


def _stored_bytes(experience: Experience, field: str) -> int:
    tensor = getattr(experience, field)
    if tensor is None and field != "tokens":
        return 0
    if not isinstance(tensor, Tensor):
        raise _refuse(experience, field, f"is a {type(tensor).__name__}, it must be a tensor")
    _check_dense(experience, field, tensor)
    return int(tensor.nbytes)


def _check_dense(experience: Experience, field: str, tensor: Tensor) -> None:
    """Check that ``tensor`` has dense memory of a dtype that can be stored."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in DTYPE_NAMES:
        raise _refuse(
            experience,
            field,
            f"is {tensor.dtype}, {tensor.layout} on {tensor.device}: make it a dense tensor of one "
            f"of {', '.join(DTYPE_NAMES.values())}",
        )
    if tensor.ndim > MAX_DIMENSIONS:
        what = f"has {tensor.ndim} dimensions, the most are {MAX_DIMENSIONS}"
        raise _refuse(experience, field, what)


def _modal_bytes(experience: Experience) -> int:
    size = 0
    inputs: dict[Any, Any] = experience.multi_modal_inputs or {}
    for name, value in inputs.items():
        field = f"multi_modal_inputs[{name!r}]"
        if type(name) is not str or not isinstance(value, Tensor):
            raise _refuse(experience, field, "must be a tensor under a text")
        _check_dense(experience, field, value)
        size += value.nbytes
    return size


def _object_bytes(experience: Experience) -> int:
    packer = ObjectPacker(raw_tensor)
    size = 0
    for field in (*TEXTS, *LISTS, "info", "metrics"):
        value = getattr(experience, field)
        if not value:
            continue
        try:
            size += len(packer.pack(value, field))
        except InvalidArgumentError as error:
            refused = InvalidExperienceError(f"experience {experience.eid.uid}: {error}")
            refused.field = field
            raise refused from error
    return size


def _refuse(experience: Experience, field: str, what: str) -> InvalidExperienceError:
    error = InvalidExperienceError(f"experience {experience.eid.uid}: {field} {what}")
    error.field = field
    return error


def check_address(experience: Experience) -> None:
    """Check that ``experience`` has a valid address.

    Raises:
        InvalidExperienceError: it has not.
    """
    eid = experience.eid
    if eid == NOBODY:
        raise _refuse(experience, "eid", "was never given: say batch, task, run and step")
    for field, number in (("eid.run", eid.run), ("eid.step", eid.step)):
        if type(number) is not int or not 0 <= number <= MAX_INT32:
            raise _refuse(experience, field, f"is {number!r}, it must be an int, 0 or more")
    for field, problem in (
        ("eid.batch", problem_of_key(eid.batch)),
        ("eid.task", problem_of_key(eid.task)),
        ("eid.suffix", problem_of_name(eid.suffix)),
    ):
        if problem is not None:
            raise _refuse(experience, field, problem)
    for field, part in (("eid.batch", eid.batch), ("eid.suffix", eid.suffix)):
        if isinstance(part, str) and "/" in part:
            raise _refuse(experience, field, f"is {part!r}: it must not contain '/'")


def _check_kind(experience: Experience, schema: str, rules: Schema) -> None:
    if experience.experience_type in rules.kinds:
        return
    if schema == "dpo":
        missing = [field for field in rules.tokens if getattr(experience, field) is None]
        field, what = ("action_mask", "is given") if not missing else (missing[0], "is None")
        raise _refuse(
            experience, field, f"{what}: the schema dpo needs chosen and rejected, and no mask"
        )
    raise _refuse(
        experience,
        "chosen and rejected",
        f"are given without an action_mask: a pair belongs in an experiment of the schema dpo, "
        f"this one is {schema!r}",
    )


def _check_tokens(experience: Experience, field: str) -> None:
    tokens = getattr(experience, field)
    _check_vector(experience, field, tokens, INTEGERS, "integer token ids")
    if not tokens.numel():
        raise _refuse(experience, field, "has no elements, it needs at least one token")
    # NumPy is twice as fast as torch on a thousand elements.
    if tokens.dtype.is_signed and tokens.numpy(force=True).min() < 0:
        raise _refuse(experience, field, "holds negative numbers: these are no token ids")


def _check_vector(
    experience: Experience, field: str, value: Any, dtypes: frozenset[torch.dtype], what: str
) -> None:
    if not isinstance(value, Tensor):
        raise _refuse(experience, field, f"is a {type(value).__name__}, it must be a tensor")
    if value.ndim != 1 or value.layout != torch.strided:
        raise _refuse(experience, field, f"has the shape {list(value.shape)}, it must be dense 1-D")
    if value.dtype not in dtypes:
        raise _refuse(experience, field, f"is {value.dtype}, it must hold {what}")
    _check_dense(experience, field, value)


def _all_finite(tensor: Tensor) -> bool:
    # NaN and Inf survive in a sum of squares, which takes a tenth of the time of isfinite(). Finite
    # values may overflow it, so a failure is checked again exactly.
    numbers = tensor.detach()
    passes = numbers.dot(numbers).item() <= MAX_FLOAT32
    return passes or bool(numbers.float().isfinite().all())


def _check_response(experience: Experience) -> int:
    """Check prompt length and mask; return the length of the response."""
    size, prompt = experience.tokens.numel(), experience.prompt_length
    truncated = experience.truncate_status == "prompt_truncated"
    if type(prompt) is not int or not 1 <= prompt <= size:
        raise _refuse(
            experience, "prompt_length", f"is {prompt!r}, it must be an int from 1 to {size - 1}"
        )
    if prompt == size and not truncated:
        raise _refuse(
            experience,
            "tokens",
            f"holds {size} tokens of prompt and no response: give at least one",
        )
    mask: Any = experience.action_mask
    response = size - prompt
    _check_vector(experience, "action_mask", mask, MASKS, "bool, integers or floats")
    if mask.numel() != response:
        raise _refuse(
            experience,
            "action_mask",
            f"has {mask.numel()} elements, the response has {response} "
            f"({size} tokens - prompt_length {prompt})",
        )
    other = _neither_0_nor_1(mask)
    if other is not None:
        raise _refuse(
            experience,
            "action_mask",
            f"holds {mask[other].item()} at token {other} of the response, {ZERO_OR_ONE}",
        )
    return response


def _neither_0_nor_1(mask: Tensor) -> int | None:
    """Return the first place where a mask is neither 0 nor 1, or None."""
    if mask.dtype == torch.bool:
        return None
    floats = mask.detach().float() if mask.dtype == torch.bfloat16 else mask.detach()
    numbers = floats.numpy(force=True)
    others = (numbers != 0) & (numbers != 1)
    return int(others.argmax()) if others.any() else None


def _check_per_token(experience: Experience, response: int | None) -> None:
    for field in PER_TOKEN:
        value = getattr(experience, field)
        if value is None:
            continue
        _check_vector(experience, field, value, FLOATS, "floats")
        if response is not None and value.numel() != response:
            raise _refuse(
                experience,
                field,
                f"has {value.numel()} elements, the response has {response}: one per token of it",
            )
        if not _all_finite(value):
            problem = "holds NaN or Inf, it must be finite"
            if value.isfinite().all():
                problem = f"holds a number above {MAX_FLOAT32:.2g}, which is infinite in float32"
            raise _refuse(experience, field, problem)


def _check_reward(experience: Experience) -> None:
    reward = experience.reward
    if reward is None:
        return
    if not isinstance(reward, int | float):
        raise _refuse(
            experience, "reward", f"is a {type(reward).__name__}, it must be a number or None"
        )
    if not abs(reward) <= (MAX_INT64 if isinstance(reward, int) else MAX_FLOAT32):
        large = type(reward) is float and math.isfinite(reward)
        where = " in float32" if large else ""
        raise _refuse(experience, "reward", f"is {reward!r:.40}, it must be finite{where}")


def _check_experts(experience: Experience) -> None:
    routed: Any = experience.routed_experts
    size = experience.tokens.numel()
    if routed is not None:
        if not isinstance(routed, Tensor) or routed.dtype not in INTEGERS:
            raise _refuse(experience, "routed_experts", "must be a tensor of integers")
        if routed.ndim == 0 or routed.shape[0] not in (size - 1, size):
            raise _refuse(
                experience,
                "routed_experts",
                f"has the shape {list(routed.shape)}, its first dimension must be {size - 1} or "
                f"{size}: one row per token",
            )


def _check_info(experience: Experience) -> None:
    version = experience.info.get("model_version")
    if version is not None and (type(version) is not int or abs(version) > MAX_INT64):
        raise _refuse(experience, "info['model_version']", f"is {version!r:.40}, it must be an int")
    size, prompt = experience.tokens.numel(), experience.prompt_length
    segments = experience.info.get(SEGMENTS)
    problem = None if segments is None else problem_of_segments(segments, prompt, size)
    if problem is not None:
        raise _refuse(experience, f"info[{SEGMENTS!r}]", problem)
    reason = experience.info.get("finish_reason") or experience.truncate_status
    problem = None if reason is None else problem_of_text(reason)
    if problem is not None:
        raise _refuse(experience, "info['finish_reason']", problem)


_INT, _FLOAT, _TEXT, _DICT = (frozenset({kind}) for kind in (int, float, str, dict))
_LIST, _EID, _TENSOR, _NONE = (frozenset({kind}) for kind in (list, EID, Tensor, type(None)))
_NOBODYS = ("routed_experts", "multi_modal_inputs", "chosen", "rejected")
"""Fields whose experiences are always checked one by one."""

ROUNDING = 0.01
"""How far rounding may lift the logarithm of a probability above 0, in any precision."""


def forms_pass(fields: Fields, schema: str) -> bool:
    """Return whether types, shapes and addresses of all experiences are valid.

    False means that one may be invalid, or has a form that is only checked one by one: a pair, a
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
    """Return the addresses as the store compares them: ``7`` and ``"7"`` are equal."""
    batches, tasks, *others = fields.addresses
    return set(zip(map(str, batches), map(str, tasks), *others, strict=True))


def numbers_pass(columns: Mapping[str, Sequence[Column]], sizes: Iterable[int]) -> bool:
    """Return whether the numbers of all experiences are valid, given that `forms_pass`.

    Args:
        columns: field -> encoded columns.
        sizes: bytes of everything encoded.
    """
    if sum(sizes) > MAX_BYTES:  # then a single experience may exceed the limit
        return False
    return (
        all(map(_none_is_negative, columns.get("tokens", ())))
        and all(map(_all_are_0_or_1, columns.get("action_mask", ())))
        and all(
            map(
                _all_are_finite,
                [column for field in PER_TOKEN for column in columns.get(field, ())],
            )
        )
    )


def first_above_zero(column: Column) -> tuple[int, float] | None:
    """Return the first row with a log-probability well above 0, and the largest of all, or None.

    Quarantined rows may hold NaN, which does not count as above 0.
    """
    numbers = column.elements
    if column.dtype == "bfloat16":  # NumPy lacks bfloat16, the upper half of a float32
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
    """Return the length of each response, or None if prompts or tokens may be invalid."""
    prompts = fields["prompt_length"]
    sizes = _sizes(fields, "tokens", INTEGERS) if fields.kinds("prompt_length") == _INT else None
    if sizes is None or min(prompts) < 1:
        return None
    responses = list(map(sub, sizes, prompts))
    return responses if min(responses) > 0 else None


def _sizes(fields: Fields, name: str, dtypes: Collection[torch.dtype]) -> Sequence[int] | None:
    """Return the sizes of dense vectors of ``dtypes``, or None if a value is anything else."""
    if fields.kinds(name) != _TENSOR:
        return None
    return _sizes_of(fields.tensors(name), dtypes)


def _sizes_of(tensors: PresentTensors, dtypes: Collection[torch.dtype]) -> Sequence[int] | None:
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
        # NaN compares false with everything, so min() and max() would miss values beside it.
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
