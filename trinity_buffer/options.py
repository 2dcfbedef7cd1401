"""Options: each is declared once, with its type, its bounds, its default and its meaning.

A class that reads options of a run, such as `GroupingRules`, is a base of the run's configuration
(`trinity_buffer.pipeline.config`), or is made of such a base, as `StreamOptions` is.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta

from trinity_buffer.errors import InvalidArgumentError

LARGEST = 3.4028234663852886e38
"""The largest 32-bit float: policies are computed in that type, and NaN is within no bounds."""

Natural = Annotated[int, Meta(ge=0, description="an integer, at least 0")]
Count = Annotated[int, Meta(ge=1, description="an integer, at least 1")]
Runs = Annotated[int, Meta(ge=1, le=1 << 20, description="an integer, from 1 to 1048576")]
Number = Annotated[float, Meta(ge=-LARGEST, le=LARGEST, description="a number below 3.4e+38")]
Above0 = Annotated[float, Meta(gt=0, le=LARGEST, description="a number above 0")]
AtLeast0 = Annotated[float, Meta(ge=0, le=LARGEST, description="a number, at least 0")]
Share = Annotated[float, Meta(ge=0, le=1, description="a number from 0 to 1")]
Rate = Annotated[float, Meta(gt=0, le=1e20, description="a number above 0, at most 1e+20")]
Beta = Annotated[float, Meta(ge=0, lt=1, description="a number from 0 to below 1")]
Seconds = Annotated[
    # Thirty years: practically for ever, yet it can be added to a clock without overflow.
    float, Meta(gt=0, le=1e9, description="a number of seconds above 0, at most 1e+09")
]
_DEVICE = r"^(cpu(:0)?|cuda(:[0-9]+)?)\Z"
Device = Annotated[
    str, Meta(pattern=_DEVICE, description="cpu, cuda, or one GPU of this machine, such as cuda:1")
]
Layout = Literal["padded", "packed"]

_WORDS: dict[Any, str] = {bool: "true or false", int: "an integer", float: "a number"}
_WORDS |= {str: "a text", Path: "a pathlib.Path", NoneType: "None"}


RENAMED: Mapping[str, str] = {
    "deadline_s": "group_timeout_s",
    "dialect": "server_type",
    "exploring": "explorer",
    "incomplete": "on_incomplete_group",
    "lowest_rate": "min_lr_ratio",
    "max_waiting_groups": "max_queued_groups",
    "problems": "num_eval_samples",
    "record_facts": "record_row_metrics",
    "record_tokens": "record_token_metrics",
}
"""Name of an option in older versions -> its name. Files and stores may have either."""

_WITH_RENAMED = frozenset({"explorer", "exploring", "evaluation", "optimizer"})
"""Sections that are read by these names too; others hold what is the user's."""


def renamed(
    values: Mapping[str, Any],
    *,
    warn: bool = True,
    source: tuple[str, str] | None = None,
    stacklevel: int = 3,
) -> dict[str, Any]:
    """Return ``values`` with each option under its name of today; warn of older ones.

    Args:
        values: options by name.
        warn: False for what is recorded. It may have both names, where an older version went on
            with the run: it left the name of today as it was, so its own value is the later one.
        source: name and text of what the user wrote; None: the code that called the caller.
        stacklevel: of that code.

    Raises:
        InvalidArgumentError: an option is there under both names.
    """
    result: dict[str, Any] = {}
    for written, value in sorted(values.items(), key=lambda item: item[0] in RENAMED):
        name = RENAMED.get(written, written)
        if name != written and warn:
            if name in values:
                raise InvalidArgumentError(f"{written} is called {name} now: leave {written} out")
            message = f"{written} is called {name} now, and will be refused some day"
            if source is None:
                warnings.warn(message, FutureWarning, stacklevel=stacklevel)
            else:
                file, text = source
                key = rf"^[^#\n]*\b{written}\b[\"']?[ \t]*[=:.\]]"
                first = re.search(key, text, re.MULTILINE)  # line that has it as a key
                line = 1 + text.count("\n", 0, 0 if first is None else first.start())
                warnings.warn_explicit(message, FutureWarning, file, line, registry=_WARNED)
        result[name] = value
        if name in _WITH_RENAMED and isinstance(value, Mapping):
            result[name] = renamed(value, warn=warn, source=source, stacklevel=stacklevel + 1)
    return result


_WARNED: dict[Any, Any] = {}
"""Of which lines of the user's files Python has warned; it warns of each once."""


def renamed_key(key: str) -> str:
    """Return a key such as ``optimizer.betas`` under its name of today; warn of an older one."""
    first, dot, rest = key.partition(".")
    written = {first: {rest: None} if dot else None}
    ((name, inner),) = renamed(written, source=(f"--set {key}", key)).items()
    return f"{name}.{next(iter(inner))}" if inner else name


class Options:
    """Options that are checked when they are made, by the types of their fields."""

    configured: ClassVar[tuple[str, ...]] = ()
    """Those that `of` reads from a configuration; none: all."""

    def __post_init__(self) -> None:
        values_of(type(self), vars(self))

    @classmethod
    def of(cls, config: Mapping[str, Any], **overrides: Any) -> Self:
        """Return the options in the ``config`` of an experiment, replaced by ``overrides``.

        Raises:
            TypeError: ``overrides`` names an unknown option.
            InvalidArgumentError: an impossible value.
        """
        names = cls.configured or tuple(option_types(cls))
        configured = {name: config[name] for name in names if config.get(name) is not None}
        return cls(**{**configured, **overrides})


O = TypeVar("O", bound=Options)  # noqa: E741


def takes_old_names(kind: type[O]) -> type[O]:
    """Let the constructor of a class take options by the names that they had, and warn."""
    init = kind.__init__

    @wraps(init)
    def init_renamed(self: O, **written: Any) -> None:
        options = renamed(written)
        if unknown := sorted(options.keys() - option_types(kind)):
            raise InvalidArgumentError(
                f"{kind.__name__} takes no argument {unknown[0]!r} (accepted: "
                f"{', '.join(sorted(option_types(kind)))})"
            )
        init(self, **options)

    kind.__init__ = init_renamed  # type: ignore[method-assign, assignment]  # with the same keywords
    return kind


_TYPES: dict[type[Options], dict[str, Any]] = {}


def option_types(kind: type[Options]) -> dict[str, Any]:
    """Return the type of each option of a class, bounds included."""
    if kind not in _TYPES:  # resolving type hints takes longer than checking the values
        hints = get_type_hints(kind, include_extras=True)
        del hints["configured"]
        _TYPES[kind] = hints
    return _TYPES[kind]


def values_of(
    kind: type[Options], values: Mapping[str, Any], *, strict: bool = True, prefix: str = ""
) -> dict[str, Any]:
    """Return ``values`` as options of a class take them; see `value_of`.

    Of a section's table these are its own options. What holds of several options together is
    checked when they are made.

    Args:
        prefix: what the name of an option begins with in messages.

    Raises:
        InvalidArgumentError: names each that is not what the option of this name must be.
    """
    taken, problems = {}, []
    for name, value in values.items():
        section = section_of(option_types(kind)[name])
        try:
            if section is not None and isinstance(value, Mapping):
                taken[name] = values_of(section, value, strict=strict, prefix=f"{name}.")
            else:
                taken[name] = value_of(kind, name, value, strict=strict)
        except InvalidArgumentError as error:
            problems.append(str(error) if section else f"{prefix}{error}")
    if problems:
        raise InvalidArgumentError("; ".join(problems))
    return taken


def value_of(kind: type[Options], name: str, value: Any, *, strict: bool = True) -> Any:
    """Return ``value`` as the type of the option: a list as a tuple, an integer as a float.

    Not ``strict``: a number may be written as a text, as YAML reads ``3e-4``.

    Raises:
        InvalidArgumentError: it is not what the option must be.
    """
    wanted = option_types(kind)[name]
    try:
        return msgspec.convert(value, wanted, strict=strict)
    except msgspec.ValidationError as error:
        what = f"{name}={excerpt(value)}: it must be {accepted(wanted)}"
        raise InvalidArgumentError(what) from error


def accepted(kind: Any) -> str:
    """Describe the values of a type."""
    members = get_args(kind)
    if get_origin(kind) is Annotated:
        return str(members[1].description)
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, members))
    if get_origin(kind) in (Union, UnionType):
        return ", or ".join(map(accepted, members))
    if get_origin(kind) is tuple and ... not in members:
        return f"{len(members)} values, each {accepted(members[0])}"
    if section_of(kind) is not None or get_origin(kind) is dict:
        return "a table"
    return _WORDS.get(kind, f"a {kind}")


def excerpt(value: Any) -> str:
    """Return a value as messages show it."""
    try:
        return f"{value!r:.100}"
    except ValueError:  # Python refuses to print such a number
        return "a number of thousands of digits"


def section_of(kind: Any) -> type[Options] | None:
    """Return the options that a key holds, or may hold; None if it only holds plain values."""
    kinds = get_args(kind) or (kind,)
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, Options)), None)


@takes_old_names
@dataclass(frozen=True, kw_only=True)
class GroupingRules(Options):
    """How experiences become groups: keys of the configuration (docs/configuration.md)."""

    rollouts_per_group: Runs | None = None
    """runs per group of unplanned batches; plans state their own number. Without it, such a group
    waits for a seal, its deadline or `idle_s`"""
    group_timeout_s: Seconds | None = None
    """closes a group as it is this long after the plan of its batch, which is then sealed; without
    a plan, or where the `trainer` reads another set (before it has begun: other trainers do, or
    there is another set), after the group's first experience. null: never"""
    idle_s: Seconds | None = None
    """closes a group whose number of runs is not known this long after its last one; null: never"""
    on_incomplete_group: Literal["keep", "reject"] = "keep"
    """what to do with a group that lacks planned rollouts when it closes, or refused ones: pass the
    stored rows to the strategy, or record all of them as rejected (`incomplete_group`)"""


@dataclass(frozen=True, kw_only=True)
class StepSize(Options):
    """What a gradient step takes."""

    groups_per_step: Count = 1
    """groups per gradient step"""


@dataclass(frozen=True, kw_only=True)
class AdmissionOptions(StepSize):
    """Bounds within which explorers may plan; without them they plan ahead for ever."""

    trainer: Annotated[str, Meta(min_length=1, description="a text")] = "trainer"
    """name of the trainer consumer, which explorers wait for"""
    max_queued_groups: Count | None = None
    """explorers wait while so many await the trainer; null: none"""
    max_staleness: Natural | None = None
    """explorers wait for new weights beyond this, in policy versions, which are gradient steps;
    checked before a batch is planned, which then comes on top: rows are trained up to
    ⌈(`groups_per_batch` − 1) / `groups_per_step`⌉ versions older than this, and still older where
    groups that were planned later are finished earlier; null: no bound"""


@dataclass(frozen=True, kw_only=True)
class StepOptions(StepSize):
    """How a train stream forms its steps, where the configuration of the experiment may say so."""

    tokens_per_microbatch: Count | None = None
    """budget of computed tokens of a micro-batch (rows × width padded, tokens packed); null: a step
    is one micro-batch"""
    layout: Layout = "padded"
    """layout of a micro-batch: right-padded rows, or rows end to end"""
    lease_ttl_s: Seconds = 30.0
    """a trainer or strategy silent for this long may be replaced"""
