"""The name of an experience, and the families of its fields. Needs neither torch nor SQL."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from typing_extensions import override

from trinity_buffer.errors import InvalidArgumentError

Key = int | str
"""A batch or task id. ``7`` and ``"7"`` are one key; the type is kept."""

FAMILIES: dict[str, tuple[str, ...]] = {
    "light": (
        *("action_mask", "token_level_reward", "advantages", "returns", "info", "metrics"),
        *("truncate_status", "custom_fields"),
    ),
    "tokens": ("tokens", "logprobs", "teacher_logprobs", "chosen", "rejected"),
    "text": (
        *("response_text", "prompt_text", "messages", "tools"),
        *("chosen_messages", "rejected_messages"),
    ),
    "heavy": ("multi_modal_inputs", "routed_experts"),
}
"""Which fields are stored together; a reader loads only the families that it names."""

SCHEMAS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("experience", "sft", "cpt"), ("tokens",)),
    "dpo": ("tokens", "chosen", "rejected"),
}
"""Schema -> the fields of token ids that its experiences must have.

``experience``: rollouts; ``sft``: demonstrations; ``cpt``: plain text; ``dpo``: pairs.
"""

TURNS = ".turns"
"""Suffix of the experiment in which a recorder keeps the turns of another experiment."""

MAX_NAME = 255
"""Characters of a text in an EID."""

_assign = object.__setattr__
_MAX_INT64 = (1 << 63) - 1


@dataclass(init=False, unsafe_hash=True)
class EID:
    """Address of one experience: batch, task in it, run, and step (turn) of the run.

    ``suffix`` tells deliberate repetitions apart: ``""`` for the first attempt, ``"a1"`` for a
    second one. It is never random: writing the same attempt twice must be writing it once.

    The fields may be assigned until an experience of this name is written.
    """

    __slots__ = ("_written", "batch", "run", "step", "suffix", "task")

    batch: Key
    task: Key
    run: int
    step: int
    suffix: str
    _written: ClassVar[bool]  # a slot, and no field

    def __init__(
        self, batch: Key = "", task: Key = "", run: int = 0, step: int = 0, suffix: str = ""
    ) -> None:
        _assign(self, "_written", False)  # noqa: FBT003 - a slot and its value
        _assign(self, "batch", batch)
        _assign(self, "task", task)
        _assign(self, "run", run)
        _assign(self, "step", step)
        _assign(self, "suffix", suffix)

    @override
    def __setattr__(self, name: str, value: object) -> None:
        """Assign a field.

        Raises:
            AttributeError: the name is in a store, or there is no such field.
        """
        if self._written:
            raise AttributeError(f"{self} is written: its {name} cannot be changed to {value!r}")
        _assign(self, name, value)

    @property
    def uid(self) -> str:
        """``batch/task/run/step/suffix``: unique in an experiment."""
        return f"{self.batch}/{self.task}/{self.run}/{self.step}/{self.suffix}"

    @property
    def sid(self) -> str:
        """``batch/task/step``: the same step of all runs of a task."""
        return f"{self.batch}/{self.task}/{self.step}"

    @property
    def rid(self) -> str:
        """``batch/task/run``: all steps of a run."""
        return f"{self.batch}/{self.task}/{self.run}"

    @property
    def tid(self) -> str:
        """``batch/task``: all runs of a task, which is a group."""
        return f"{self.batch}/{self.task}"

    def to_dict(self) -> dict[str, Any]:
        """Return the five fields."""
        return asdict(self)

    @override
    def __reduce__(self) -> tuple[type[EID], tuple[Key, Key, int, int, str]]:
        """Copy and send the fields: a copy is not written."""
        return EID, (self.batch, self.task, self.run, self.step, self.suffix)

    @override
    def __str__(self) -> str:
        return self.uid


def freeze(eids: Iterable[EID]) -> None:
    """Make ``eids`` immutable, as experiences of these names are stored."""
    for eid in eids:
        _assign(eid, "_written", True)  # noqa: FBT003 - a slot and its value


def parse_uid(uid: str) -> EID:
    """Return the address that a uid writes; ``suffix`` and its slash may be left out.

    A task may contain slashes, a batch may not.

    Raises:
        InvalidArgumentError: not ``batch/task/run/step/suffix``.
    """
    batch, _, rest = uid.partition("/")
    parts = rest.rsplit("/", 3)
    if len(parts) == 3 and parts[2].isdecimal():
        parts.append("")
    if len(parts) != 4 or not (parts[1].isdecimal() and parts[2].isdecimal()):
        raise InvalidArgumentError(
            f"{uid!r} is not a uid; a uid is batch/task/run/step/suffix, such as 'e0-7/3/1/0/'"
        )
    task, run, step, suffix = parts
    return EID(batch, task, int(run), int(step), suffix)


def order_of(key: Key) -> tuple[int, int, str]:
    """Return a sort key in which numbers sort as numbers, before texts."""
    return (0, key, "") if isinstance(key, int) else (1, 0, key)


def problem_of_key(key: object) -> str | None:
    """Return why ``key`` cannot be a batch or task id, as the end of a sentence; None if it can."""
    if type(key) is int:
        return None if abs(key) <= _MAX_INT64 else "is an int of more than 64 bits"
    if type(key) is not str:
        return f"is a {type(key).__name__}, it must be int or str"
    return problem_of_name(key)


def problem_of_name(name: object) -> str | None:
    """Return why ``name`` cannot be a name or part of an EID, as the end of a sentence, or None.

    Names go into lists of one uid per line and onto terminals: no control character, line break or
    change of writing direction may be in one.
    """
    if isinstance(name, str) and name.isprintable() and len(name) <= MAX_NAME:
        return None
    problem = problem_of_text(name)
    if problem is not None or not isinstance(name, str):
        return problem
    control = _CONTROLS.search(name)
    return None if control is None else f"is {name!r}: control characters have no place in a name"


def problem_of_text(text: object) -> str | None:
    """Return why ``text`` cannot be a short text in a database, as the end of a sentence, or None.

    Neither database stores NUL or surrogates.
    """
    if not isinstance(text, str):
        return f"is a {type(text).__name__}, it must be str"
    if len(text) > MAX_NAME:
        return f"has {len(text)} characters, the longest is {MAX_NAME}"
    if not text.isprintable() and _UNSTORABLE.search(text):
        return f"is {text!r}: NUL and surrogates are no text"
    return None


def storable(text: str) -> str:
    """Return ``text`` with U+FFFD in place of each character that no database stores."""
    return _UNSTORABLE.sub("\ufffd", text)


def require_name(what: str, name: object) -> None:
    """Raise unless ``name`` is a valid name; the error begins with ``what``.

    Raises:
        InvalidArgumentError: it cannot.
    """
    problem = "is empty" if name == "" else problem_of_name(name)
    if problem is not None:
        raise InvalidArgumentError(f"{what} {problem}")


_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def closest(name: str, names: Iterable[str]) -> str | None:
    """Return which of ``names`` was probably meant by ``name``; None if none is similar."""
    similar, letters = difflib.get_close_matches(name, list(names), n=3), sorted(name)

    def likeness(other: str) -> tuple[float, bool]:
        # Of two that are as similar, the one of the same letters: "gpro" is "grpo", not "gspo".
        return difflib.SequenceMatcher(None, other, name).ratio(), sorted(other) == letters

    return max(similar, key=likeness, default=None)
