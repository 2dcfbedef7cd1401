"""Arguments of the named parts: what a constructor accepts, and the refusal of the rest.

A default is written once: as a field of a class that is `configured`, or in the signature of a
constructor. `declared_arguments` reads it from there; nothing repeats it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import lru_cache, wraps
from types import NoneType, SimpleNamespace, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
import numpy as np
from msgspec import Meta
from typing_extensions import override

from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.identity import closest
from trinity_buffer.options import accepted as described
from trinity_buffer.options import excerpt

OnUnknown = Literal["error", "ignore"]
Positive = Annotated[float, Meta(gt=0, description="a number above 0")]
NotNegative = Annotated[float, Meta(ge=0, description="a number, at least 0")]
PartOfOne = Annotated[float, Meta(gt=0, le=1, description="a number above 0, at most 1")]
Made = TypeVar("Made")
Part = TypeVar("Part", bound="type[Configured]")

_PLAIN = (float, int, bool, str, NoneType)
REQUIRED = inspect.Parameter.empty
"""Stands for the default of an argument that has none."""


def declared_arguments(cls: type) -> dict[str, Any]:
    """Return ``{name: default}`` of all that the constructor of ``cls`` takes.

    `REQUIRED` stands where there is no default. A signature with ``**kwargs`` hands these on to
    its base class, whose arguments therefore count too; the most derived default wins.
    """
    accepted: dict[str, Any] = {}
    for base in cls.__mro__:
        # Only classes that write a constructor: an inherited one is met further up.
        if base is object or "__init__" not in vars(base):  # whose signature is a text to parse
            continue
        parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        accepted = {p.name: p.default for p in named} | accepted
        # Without **kwargs nothing is handed on, so the bases' arguments do not count.
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return accepted


class Configured:
    """A part that is configured by the arguments of its constructor.

    Class attributes:
        runtime_args: arguments that a run supplies, not a configuration.
        tuned: defaults for configurations where they differ from the constructor's.
        reference_args: arguments with which the class computes what the reference does.
        none_is_unset: None stands for "not given", which no configuration has to say.
    """

    runtime_args: ClassVar[tuple[str, ...]] = ()
    tuned: ClassVar[Mapping[str, Any]] = {}
    reference_args: ClassVar[Mapping[str, Any]] = {}
    none_is_unset: ClassVar[bool] = False

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """Return the arguments for a configuration: the constructor's defaults, then `tuned`."""
        declared = {
            name: default
            for name, default in declared_arguments(cls).items()
            if default is not REQUIRED and name not in cls.runtime_args
        }
        args = declared | dict(cls.tuned)
        return {k: v for k, v in args.items() if v is not None} if cls.none_is_unset else args

    @override
    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value, _ in self._arguments())
        return f"{type(self).__name__}({values})"

    def __post_init__(self) -> None:
        """Refuse arguments that cannot be right; for a class whose fields are its arguments.

        Raises:
            InvalidArgumentError: one is out of the bounds that the type of its field says.
        """
        for name, value, kind in self._arguments():
            require(value, kind, f"{type(self).__name__}: {name}")

    def _arguments(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield name, value and type of the arguments whose types say all of what they may be."""
        cls: type = type(self)
        for name, kind in _types(cls).items():
            if name in vars(self):
                yield name, vars(self)[name], kind


@dataclass_transform(eq_default=False, field_specifiers=(field,))
def configured(cls: Part) -> Part:
    """Give a class a constructor of its fields, which refuses unknown arguments by name.

    With ``on_unknown="ignore"`` it passes over them, as the reference does.
    """
    dataclass(eq=False, repr=False)(cls)  # 40 methods fewer to compile when it is imported
    names, init = {f.name for f in fields(cls)}, cls.__init__  # type: ignore[arg-type]

    @wraps(init)
    def init_known(self: Configured, *parts: Any, **arguments: Any) -> None:
        unknown = arguments.keys() - names
        if unknown and arguments.get("on_unknown") != "ignore":
            # Subclasses with constructors of their own hand on what they do not know.
            known = declared_arguments(type(self)).keys() | names
            refuse_unknown(type(self).__name__, arguments, known - {"writer"})
        init(self, *parts, **{n: value for n, value in arguments.items() if n not in unknown})

    cls.__init__ = init_known  # type: ignore[method-assign, assignment]  # with the same fields
    return cls


@lru_cache  # not all for ever: each composed strategy is a class of its own
def _types(cls: type) -> dict[str, Any]:
    """Return those types of arguments that say in full which values are accepted."""
    types: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        names = vars(sys.modules[base.__module__])
        init = None if "__dataclass_fields__" in vars(base) else vars(base).get("__init__")
        kinds = inspect.get_annotations(base) | getattr(init, "__annotations__", {})
        for name, kind in kinds.items():
            types[name] = Any
            # One by one: a user's module may know the names of some for type checkers alone.
            with suppress(NameError, AttributeError, TypeError, SyntaxError):
                annotated = SimpleNamespace(__annotations__={name: kind})
                types |= get_type_hints(annotated, names, include_extras=True)
    return {name: kind for name, kind in types.items() if _is_plain(kind)}


def _is_plain(kind: Any) -> bool:
    members = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return all(m in _PLAIN or get_origin(m) in (Annotated, Literal) for m in members)


_CALLED = {"trainer": "consumer"}
"""Key of the configuration -> the argument of another name that says the same."""


def did_you_mean(name: str, accepted: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest of ``accepted``, or an empty text."""
    meant = closest(_CALLED.get(name, name), accepted)
    return "" if meant is None else f"; did you mean {meant!r}?"


def refuse_unknown(owner: str, arguments: Mapping[str, Any], accepted: Iterable[str]) -> None:
    """Raise unless every name in ``arguments`` is in ``accepted``.

    Raises:
        InvalidArgumentError: names the first that is not, what was probably meant, and what is
            accepted.
    """
    names = sorted(accepted)
    for name in arguments:
        if name not in names:
            raise InvalidArgumentError(
                f"{owner} takes no argument {name!r}{did_you_mean(name, names)} "
                f"(accepted: {', '.join(names) or 'none'})"
            )


def made(cls: Callable[..., Made], *parts: Any, **arguments: Any) -> Made:
    """Return ``cls(*parts, **arguments)``.

    Raises:
        InvalidArgumentError: an argument is of another kind than the constructor says, or one with
            which it cannot be made.
    """
    name = getattr(cls, "__name__", str(cls))
    types = _types(cls) if isinstance(cls, type) else {}
    # A text in place of a number would otherwise be met in the middle of the first step.
    for argument in filter(types.__contains__, arguments):
        require(arguments[argument], types[argument], f"{name}: {argument}")
    try:
        return cls(*parts, **arguments)
    except InvalidArgumentError:
        raise
    except (TypeError, ValueError) as error:
        listed = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise InvalidArgumentError(f"{name}({listed}): {error}") from error


def require(value: Any, kind: Any, what: str) -> None:
    """Raise unless ``value`` is of a ``kind``, and within its bounds.

    Raises:
        InvalidArgumentError: names ``what`` has the value, and what it must be.
    """
    try:
        # Searches over options give NumPy's numbers.
        msgspec.convert(value.item() if isinstance(value, np.generic) else value, kind)
    except msgspec.ValidationError as error:
        raise InvalidArgumentError(
            f"{what}={excerpt(value)}: it must be {described(kind)}"
        ) from error
