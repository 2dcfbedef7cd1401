"""The door: what may come in, and one sentence for what may not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trinity_buffer.errors import InvalidArgumentError, InvalidExperienceError
from trinity_buffer.experience import Experience, ExperienceType
from trinity_buffer.identity import problem_of_key, problem_of_name
from trinity_buffer.pipeline.tensor_columns import DTYPE_NAMES

MAX_BYTES = 64 << 20
"""Of the tensors and texts of one experience: more would not fit one part of a segment."""

MAX_INT32, MAX_INT64 = (1 << 31) - 1, (1 << 63) - 1
INTEGERS = frozenset(
    {
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
    }
)
FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
MASKS = FLOATS | INTEGERS | {torch.bool}
PER_TOKEN = ("logprobs", "token_level_reward", "teacher_logprobs", "advantages", "returns")


@dataclass(frozen=True, slots=True)
class Schema:
    """What experiences of one schema need.

    Attributes:
        kinds: the types of experience that belong to it.
        tokens: the fields of token ids that must be there.
        optional: what may be missing; the strategy or algorithm that needs it rejects with
            ``invalid``.
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
        InvalidExperienceError: it cannot; the message names it, the field and what is right.
        InvalidArgumentError: there is no such schema.
    """
    rules = SCHEMAS.get(schema)
    if rules is None:
        raise InvalidArgumentError(f"schema={schema!r}: accepted are {', '.join(SCHEMAS)}")
    _check_eid(experience)
    _check_kind(experience, schema, rules)
    for field in rules.tokens:
        _check_tokens(experience, field)
    response = None if experience.experience_type == "dpo" else _check_response(experience)
    _check_per_token(experience, response)
    _check_reward(experience)
    _check_experts(experience)
    _check_info(experience)
    _check_size(experience, max_bytes)


def _refuse(experience: Experience, field: str, what: str) -> InvalidExperienceError:
    error = InvalidExperienceError(f"experience {experience.eid.uid}: {field} {what}")
    error.field = field
    return error


def _check_eid(experience: Experience) -> None:
    eid = experience.eid
    for field, number in (("eid.run", eid.run), ("eid.step", eid.step)):
        if type(number) is not int or not 0 <= number <= MAX_INT32:
            raise _refuse(experience, field, f"is {number!r}, it must be an int, 0 or more")
    for field, key in (("eid.batch", eid.batch), ("eid.task", eid.task)):
        problem = problem_of_key(key)
        if problem is not None:
            raise _refuse(experience, field, problem)
    _check_name(experience, "eid.suffix", eid.suffix)
    for field, part in (("eid.batch", eid.batch), ("eid.suffix", eid.suffix)):
        if isinstance(part, str) and "/" in part:
            raise _refuse(experience, field, f"is {part!r}: it must not contain '/'")


def _check_name(experience: Experience, field: str, name: object) -> None:
    if type(name) is not str:
        raise _refuse(experience, field, f"is a {type(name).__name__}, it must be str")
    problem = problem_of_name(name)
    if problem is not None:
        raise _refuse(experience, field, problem)


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
    # NumPy: twice as fast as torch on a thousand elements.
    if tokens.dtype.is_signed and tokens.numpy(force=True).min() < 0:
        raise _refuse(experience, field, "holds negative numbers: these are no token ids")


def _check_vector(
    experience: Experience,
    field: str,
    value: Any,
    dtypes: frozenset[torch.dtype],
    what: str,
) -> None:
    if not isinstance(value, Tensor):
        raise _refuse(experience, field, f"is a {type(value).__name__}, it must be a tensor")
    if value.ndim != 1 or value.layout != torch.strided:
        raise _refuse(experience, field, f"has the shape {list(value.shape)}, it must be dense 1-D")
    if value.dtype not in dtypes:
        raise _refuse(experience, field, f"is {value.dtype}, it must hold {what}")


def _all_finite(tensor: Tensor) -> bool:
    # NaN and Inf survive in a sum of squares, which takes a tenth of the time of looking at each;
    # it may overflow without them, hence the second look.
    numbers = tensor.detach()
    return math.isfinite(numbers.dot(numbers).item()) or bool(numbers.isfinite().all())


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
    if mask.is_floating_point() and not _all_finite(mask):
        raise _refuse(experience, "action_mask", "holds NaN or infinite weights")
    return response


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
            raise _refuse(experience, field, "holds NaN or Inf, it must be finite")


def _check_reward(experience: Experience) -> None:
    reward = experience.reward
    if reward is None:
        return
    if not isinstance(reward, int | float):
        raise _refuse(
            experience, "reward", f"is a {type(reward).__name__}, it must be a number or None"
        )
    if not (abs(reward) <= MAX_INT64 if isinstance(reward, int) else math.isfinite(reward)):
        raise _refuse(experience, "reward", f"is {reward!r:.40}, it must be finite")


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
    inputs: dict[Any, Any] = experience.multi_modal_inputs or {}
    for name, value in inputs.items():
        if type(name) is not str or not isinstance(value, Tensor) or value.dtype not in DTYPE_NAMES:
            raise _refuse(
                experience, f"multi_modal_inputs[{name!r}]", "must be a tensor under a text"
            )


def _check_info(experience: Experience) -> None:
    for field in ("info", "metrics"):
        if not isinstance(getattr(experience, field), dict):
            raise _refuse(experience, field, "must be a dict")
    version = experience.info.get("model_version")
    if version is not None and (type(version) is not int or abs(version) > MAX_INT64):
        raise _refuse(experience, "info['model_version']", f"is {version!r:.40}, it must be an int")
    reason = experience.info.get("finish_reason") or experience.truncate_status
    if reason is not None:
        _check_name(experience, "info['finish_reason']", reason)


def _check_size(experience: Experience, max_bytes: int) -> None:
    size = 0
    for value in (*experience.__dict__.values(), *(experience.multi_modal_inputs or {}).values()):
        kind = type(value)
        if kind is Tensor:
            size += value.nbytes
        elif kind is str:
            size += len(value)
    if size > max_bytes:
        raise _refuse(
            experience, "its tensors and texts", f"are {size} bytes, the limit is {max_bytes}"
        )
