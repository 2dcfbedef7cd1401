"""What a rollout produced: one trainable unit, and how such units are grouped.

What is given for a field of an experience, and what is kept of it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from trinity_buffer import errors
from trinity_buffer.identity import EID, FAMILIES, Key, order_of

ZERO_OR_ONE = "it must be 1 where a token is trained and 0 elsewhere"
"""What is said of a mask that holds something else."""


def refused(eid: EID, field: str, what: str) -> errors.InvalidExperienceError:
    """Return the error that says what is wrong with a field."""
    error = errors.InvalidExperienceError(f"experience {eid.uid}: {field} {what}")
    error.field = field
    return error


def number_of(eid: EID, name: str, value: Any) -> Any:
    """Return ``value``; of a tensor or a NumPy scalar, the number of Python's.

    Raises:
        InvalidExperienceError: a tensor of more than one number, or of none.
    """
    if not isinstance(value, (Tensor, np.generic)):
        return value
    if isinstance(value, Tensor) and value.numel() != 1:
        raise refused(eid, name, f"has the shape {list(value.shape)}, it must be one number")
    return value.item()


def tensor_of(eid: EID, name: str, value: Any, dtype: torch.dtype | None) -> Any:
    """Return ``value`` as a tensor, a list as one of ``dtype``; None stays None.

    Raises:
        InvalidExperienceError: it cannot be one; or token ids, which are int32, are no integers; or
            a mask, which is bool, holds something else than 0 and 1.
    """
    if value is None or isinstance(value, Tensor):
        return value
    try:
        if isinstance(value, np.ndarray):
            return torch.from_numpy(value)
        if dtype is torch.bool:
            _check_mask(eid, name, value)
        ids = _token_ids(eid, name, value) if dtype is torch.int32 else None
        return torch.tensor(value, dtype=dtype) if ids is None else ids
    except errors.InvalidExperienceError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        how = "give a list of numbers, all rows of one length, or a tensor"
        raise refused(eid, name, f"cannot be made a tensor ({error}); {how}") from error


def _check_mask(eid: EID, name: str, value: Any) -> None:
    """Raise unless a list holds nothing but 0 and 1, of which torch would make True as well."""
    try:
        others = set(value) - {0, 1}
    except TypeError:  # lists in it, or no list at all: the next look says what is wrong
        return
    if others:
        raise refused(eid, name, f"holds {others.pop()!r:.40}, {ZERO_OR_ONE}")


def _token_ids(eid: EID, name: str, value: Any) -> Tensor | None:
    """Return a list of token ids as a tensor; None: torch says what is wrong with it."""
    made = np.array(value)  # twice as fast as torch, and it cuts no number off
    if made.size and made.dtype.kind in "bfc":
        raise refused(eid, name, f"is {made.dtype}, it must hold integer token ids")
    if made.size and made.dtype.kind not in "iu":
        return None
    ids = made.astype(np.int32)
    return torch.from_numpy(ids) if np.array_equal(ids, made) else None


__all__ = [
    "EID",
    "FAMILIES",
    "CustomField",
    "Experience",
    "ExperienceType",
    "Key",
    "group_by",
    "order_of",
    "split_dpo_experience",
]

ExperienceType = Literal["single_turn", "multi_turn", "dpo"]
TensorLike: TypeAlias = "Tensor | np.ndarray[Any, Any] | Sequence[Any]"
Messages: TypeAlias = "list[dict[str, Any]]"

_COMPUTED = ("advantages", "returns", "token_level_reward")
_FAMILY_OF = {field: family for family, fields in FAMILIES.items() for field in fields}


@dataclass(frozen=True, slots=True)
class CustomField:
    """An entry of ``info`` that a trainer may want as a column of its batch.

    It is stored, and `read` returns it. A train stream does not hand it out: no micro-batch has the
    column.

    Attributes:
        source_field: key in ``info``.
        destination_field: key that the column is to have.
        data_type: dtype that it is to have.
    """

    source_field: str
    destination_field: str
    data_type: torch.dtype


class Experience:
    """One trainable unit: tokens, log-probs, masks, reward. Addressed by its `EID`.

    L is the number of all tokens, P = ``prompt_length``, R = L - P the length of the response.
    Lists become tensors; a tensor is kept as it is, dtype included. Mutable: strategies assign
    ``advantages`` and ``returns``.

    Its kind follows from what is given: ``action_mask`` makes it ``multi_turn``, ``chosen`` and
    ``rejected`` make it ``dpo``; otherwise it is ``single_turn`` and every response token is
    trained.

    One that was read from a store may hold only some `FAMILIES` of fields. Reading another field
    raises AttributeError, ArchivedSegmentError if ``compact`` took it away for good (``archived``
    says why), or DamagedSegmentError if its bytes are broken (``damaged`` says why).
    ``prompt_length``, `length` and `response_length` are always known.

    Args:
        eid: address; a mapping of its five fields is accepted.
        tokens: ``[L]`` int32 unless a tensor, prompt and response; the prompt alone for ``dpo``.
        prompt_length: P, 1 <= P < L; ``dpo``: always L.
        logprobs: ``[R]`` float32, what the explorer's policy gave to the response tokens.
        reward: of the whole experience; an int stays an int.
        token_level_reward: ``[R]`` float32.
        advantages: ``[R]`` float32.
        returns: ``[R]`` float32.
        truncate_status: ``"prompt_truncated"``, ``"response_truncated"`` or None.
        info: what strategies and readers may need; ``model_version`` is the policy version.
        metrics: numbers for people; not part of the content.
        response_text: the response, decoded.
        prompt_text: the prompt, decoded.
        action_mask: ``[R]`` bool unless a tensor, which holds 0 and 1: which tokens are trained.
        messages: the conversation.
        tools: the tools that were offered.
        chosen_messages: the preferred conversation.
        rejected_messages: the other one.
        chosen: ``[Rc]`` int32, the preferred response.
        rejected: ``[Rr]`` int32, the other one.
        multi_modal_inputs: name -> tensor, such as pixel values; of a micro-batch the attribute of
            this name.
        teacher_logprobs: ``[R]`` float32, for distillation.
        routed_experts: ``[L - 1, layers, topk]`` uint8, the routing of an MoE model; stored and
            read, but in no micro-batch.
        custom_fields: entries of ``info`` that are meant as columns; stored and read, but in no
            micro-batch.

    Raises:
        InvalidExperienceError: a single-turn experience without a prompt or without a response, or
            a field that cannot become a tensor or has the wrong type.
    """

    # Beside these it has what `__init__` takes as it is, under the names of the arguments.
    eid: EID
    reward: float | None
    experience_type: ExperienceType
    address: int | None = None
    archived: str | None = None
    damaged: str | None = None
    tokens: Tensor
    logprobs: Tensor | None
    token_level_reward: Tensor | None
    advantages: Tensor | None
    returns: Tensor | None
    action_mask: Tensor | None
    teacher_logprobs: Tensor | None
    chosen: Tensor | None
    rejected: Tensor | None
    routed_experts: Tensor | None
    multi_modal_inputs: dict[str, Tensor] | None

    def __init__(  # noqa: PLR0913 (the reference's signature; all by keyword)
        self,
        *,
        eid: EID | Mapping[str, Any] | None = None,
        tokens: TensorLike,
        prompt_length: int = 1,
        logprobs: TensorLike | None = None,
        reward: float | None = None,
        token_level_reward: TensorLike | None = None,
        advantages: TensorLike | None = None,
        returns: TensorLike | None = None,
        truncate_status: str | None = None,
        info: dict[str, Any] | None = None,
        metrics: dict[str, Any] | None = None,
        response_text: str | None = None,
        prompt_text: str | None = None,
        action_mask: TensorLike | None = None,
        messages: Messages | None = None,
        tools: Messages | None = None,
        chosen_messages: Messages | None = None,
        rejected_messages: Messages | None = None,
        chosen: TensorLike | None = None,
        rejected: TensorLike | None = None,
        multi_modal_inputs: Mapping[str, TensorLike] | None = None,
        teacher_logprobs: TensorLike | None = None,
        routed_experts: TensorLike | None = None,
        custom_fields: Sequence[CustomField] | None = None,
    ) -> None:
        if not (eid is None or isinstance(eid, EID | Mapping)):
            raise errors.InvalidArgumentError(
                f"Experience(eid={eid!r:.80}): it must be an EID, such as "
                "EID(batch='b0', task='t', run=0), or a mapping of its fields"
            )
        self.eid = eid = eid if isinstance(eid, EID) else EID(**(eid or {}))
        self.prompt_length, self.truncate_status = prompt_length, truncate_status
        self.reward = reward if type(reward) is float else number_of(eid, "reward", reward)
        self.info, self.metrics = info or {}, metrics or {}
        self.response_text, self.prompt_text = response_text, prompt_text
        self.messages, self.tools = messages, tools
        self.chosen_messages, self.rejected_messages = chosen_messages, rejected_messages
        self.custom_fields = list(custom_fields or ())
        for name, value, dtype in (
            ("tokens", tokens, torch.int32),
            ("logprobs", logprobs, torch.float32),
            ("token_level_reward", token_level_reward, torch.float32),
            ("advantages", advantages, torch.float32),
            ("returns", returns, torch.float32),
            ("action_mask", action_mask, torch.bool),
            ("chosen", chosen, torch.int32),
            ("rejected", rejected, torch.int32),
            ("teacher_logprobs", teacher_logprobs, torch.float32),
            ("routed_experts", routed_experts, torch.uint8),
        ):
            # Explorers build thousands a second, nearly always of tensors: no call for those.
            is_kept = value is None or isinstance(value, Tensor)
            self.__dict__[name] = value if is_kept else tensor_of(eid, name, value, dtype)
        self.multi_modal_inputs = None
        if multi_modal_inputs is not None:
            self.multi_modal_inputs = {
                name: tensor_of(eid, f"multi_modal_inputs[{name!r}]", value, None)
                for name, value in multi_modal_inputs.items()
            }
        self._settle_type()

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Experience:
        """Return an experience that holds exactly ``state``: attributes by name, none checked.

        For decoders. ``state`` becomes the attributes of the experience and must hold ``eid``,
        ``prompt_length``, ``reward``, ``experience_type`` and ``address``. Where families are left
        out it must also hold what is always known: ``_length``, ``_response_length``,
        ``_policy_version`` and ``_finish_reason``.
        """
        made = cls.__new__(cls)
        made.__dict__ = state
        return made

    @property
    def length(self) -> int:
        """Number of tokens, L; known even where the tokens were not loaded."""
        tokens = self.__dict__.get("tokens")
        return int(self.__dict__["_length"]) if tokens is None else int(tokens.numel())

    @property
    def response_length(self) -> int:
        """Length of the action mask, R; for ``dpo`` that of the longer response."""
        known = self.__dict__
        pair = known["experience_type"] == "dpo"
        names = ("chosen", "rejected") if pair else ("action_mask",)
        sizes = [field.numel() for field in map(known.get, names) if field is not None]
        return max(sizes) if sizes else int(known.get("_response_length", 0))

    @property
    def policy_version(self) -> int | None:
        """Version of the weights that generated it: ``info["model_version"]``."""
        known, info = self.__dict__, self.__dict__.get("info")
        version = known.get("_policy_version") if info is None else info.get("model_version")
        return None if version is None else int(version)

    @policy_version.setter
    def policy_version(self, version: int | None) -> None:
        self.info["model_version"] = version

    @property
    def finish_reason(self) -> str | None:
        """Why generation ended: ``info["finish_reason"]``, else ``truncate_status``."""
        if "info" not in self.__dict__:
            reason = self.__dict__.get("_finish_reason")
        else:
            reason = self.info.get("finish_reason") or self.truncate_status
        return None if reason is None else str(reason)

    def own_numbers(self) -> None:
        """Copy what a strategy computed (advantages, returns) into memory of its own."""
        for name in _COMPUTED:
            value = self.__dict__.get(name)
            if isinstance(value, Tensor):
                self.__dict__[name] = value.detach().clone()

    def to_dict(self) -> dict[str, Any]:
        """Return a summary for people, ready for JSON and without tensors."""
        shown = ("reward", "truncate_status", "info", "metrics", *FAMILIES["text"])
        known = {name: self.__dict__[name] for name in shown if self.__dict__.get(name) is not None}
        lengths = {name: getattr(self, name) for name in ("prompt_length", "response_length")}
        return {"eid": self.eid.to_dict(), "type": self.experience_type, **lengths, **known}

    def __getattr__(self, name: str) -> Any:
        family = _FAMILY_OF.get(name)
        if family is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if self.archived is not None:
            raise errors.ArchivedSegmentError(f"{name} of {self.eid}: {self.archived}")
        if self.damaged is not None:
            raise errors.DamagedSegmentError(f"{name} of {self.eid}: {self.damaged}")
        loaded = tuple(f for f, fields in FAMILIES.items() if fields[0] in self.__dict__)
        raise AttributeError(
            f"{name} of {self.__dict__.get('eid')} was not loaded: the reader declares "
            f"families={loaded}, {name} needs {family!r} among them"
        )

    @override
    def __repr__(self) -> str:
        return (
            f"Experience({self.eid.uid!r}, {self.experience_type}, reward={self.reward}, "
            f"prompt_length={self.prompt_length}, length={self.length})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Experience:
        # A tensor that was read from a store is a view of its whole segment, and torch's own
        # deepcopy copies all of what a view looks at: a thousand times too much.
        made = Experience.from_state({})
        memo[id(self)] = made
        for name, value in self.__dict__.items():
            made.__dict__[name] = _deep_copied(value, memo)
        return made

    def _settle_type(self) -> None:
        if self.tokens is None:
            raise refused(self.eid, "tokens", "is None: give a list of token ids, or a tensor")
        if not hasattr(self.prompt_length, "__index__"):
            raise refused(
                self.eid, "prompt_length", f"is {self.prompt_length!r}, it must be an int"
            )
        if self.tokens.ndim != 1:
            shape = f"has the shape {list(self.tokens.shape)}"
            how = "make an Experience of each row, it must have one dimension"
            raise refused(self.eid, "tokens", f"{shape}: {how}")
        if self.action_mask is not None:
            self.experience_type = "multi_turn"
        elif self.chosen is not None and self.rejected is not None:
            self.experience_type = "dpo"
            self.prompt_length = self.tokens.numel()
        else:
            self.experience_type = "single_turn"
            size = self.tokens.numel()
            if 1 <= self.prompt_length < size and self.truncate_status != "prompt_truncated":
                self.action_mask = torch.ones(size - self.prompt_length, dtype=torch.bool)
            else:
                self.action_mask = self._empty_mask(size)

    def _empty_mask(self, size: int) -> Tensor:
        """Return the mask of an experience whose prompt was cut: no token of it is trained."""
        if self.truncate_status == "prompt_truncated":
            logprobs = self.logprobs
            masked = max(0, size - self.prompt_length) if logprobs is None else len(logprobs)
            return torch.zeros(masked, dtype=torch.bool)
        prompt, needs = self.prompt_length, "a single-turn experience needs at least one"
        if prompt < 1:
            raise refused(self.eid, "prompt_length", f"is {prompt}, {needs} prompt token")
        what = f"has {size} elements and prompt_length is {prompt}: {needs} response token"
        raise refused(self.eid, "tokens", what)


def group_by(
    experiences: Iterable[Experience], id_type: Literal["task", "run", "step"]
) -> dict[str, list[Experience]]:
    """Return the experiences by ``tid``, ``rid`` or ``sid``, in order of first appearance.

    Raises:
        ValueError: another ``id_type``.
    """
    attribute = {"task": "tid", "run": "rid", "step": "sid"}.get(id_type)
    if attribute is None:
        raise errors.InvalidArgumentError(
            f"Unknown id_type: {id_type!r}; accepted are 'task', 'run' and 'step'"
        )
    groups: dict[str, list[Experience]] = {}
    for experience in experiences:
        groups.setdefault(getattr(experience.eid, attribute), []).append(experience)
    return groups


def split_dpo_experience(experience: Experience) -> tuple[Experience, Experience]:
    """Return the chosen and the rejected half of a ``dpo`` experience, as single-turn experiences.

    The prompt and the reward are shared; suffixes end in ``c`` and ``r``, so that both have an
    address of their own.

    Raises:
        InvalidExperienceError: it is of another type.
    """
    if experience.chosen is None or experience.rejected is None:
        raise errors.InvalidExperienceError(
            f"experience {experience.eid.uid}: chosen or rejected is missing, it is not a pair"
        )
    return (
        _half(experience, "c", experience.chosen, experience.chosen_messages),
        _half(experience, "r", experience.rejected, experience.rejected_messages),
    )


def _half(pair: Experience, mark: str, response: Tensor, messages: Messages | None) -> Experience:
    return Experience(
        eid=replace(pair.eid, suffix=pair.eid.suffix + mark),
        tokens=torch.cat([pair.tokens, response]),
        prompt_length=len(pair.tokens),
        reward=pair.reward,
        info=dict(pair.info),
        metrics=dict(pair.metrics),
        prompt_text=pair.prompt_text,
        messages=messages,
    )


def _deep_copied(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _deep_copied(item, memo) for key, item in value.items()}
    return copy.deepcopy(value, memo)
