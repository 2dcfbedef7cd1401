"""Arguments of the named parts: what a constructor accepts, and the refusal of the rest.

A default is written once, in the signature. `declared_arguments` reads it from there; nothing
repeats it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import Any, ClassVar, TypeVar

from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.identity import closest

Made = TypeVar("Made")

REQUIRED = inspect.Parameter.empty
"""Stands for the default of an argument that has none."""


def declared_arguments(cls: type) -> dict[str, Any]:
    """Return ``{name: default}`` of all that the constructor of ``cls`` takes.

    `REQUIRED` stands where there is no default. A signature with ``**kwargs`` hands these on to
    its base class, whose arguments therefore count too; the most derived default wins.
    """
    return {name: parameter.default for name, parameter in _parameters(cls).items()}


def _parameters(cls: type) -> dict[str, inspect.Parameter]:
    """Return ``{name: parameter}`` of all that the constructor of ``cls`` takes."""
    accepted: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__:
        # Only classes that write a constructor: an inherited one is met further up.
        if base is object or "__init__" not in vars(base):  # whose signature is a text to parse
            continue
        parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        accepted = {p.name: p for p in named} | accepted
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


_KINDS: dict[str, Callable[[Any], bool]] = {
    "float": lambda value: isinstance(value, Real) and not isinstance(value, bool),
    "int": lambda value: isinstance(value, Integral) and not isinstance(value, bool),
    "bool": lambda value: isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "None": lambda value: value is None,
}
"""What a plain annotation accepts; others say nothing here."""


def made(cls: Callable[..., Made], *parts: Any, **arguments: Any) -> Made:
    """Return ``cls(*parts, **arguments)``.

    Raises:
        InvalidArgumentError: an argument is of another kind than the constructor says, or one with
            which it cannot be made.
    """
    name = getattr(cls, "__name__", str(cls))
    # A text in place of a number would otherwise be met in the middle of the first step.
    for argument, parameter in (_parameters(cls) if isinstance(cls, type) else {}).items():
        annotation = parameter.annotation
        text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
        kinds = text.split(" | ")
        if argument not in arguments or not set(kinds) <= _KINDS.keys():
            continue
        if not any(_KINDS[kind](arguments[argument]) for kind in kinds):
            raise InvalidArgumentError(
                f"{name}({argument}={arguments[argument]!r}): it must be of the type {text}"
            )
    try:
        return cls(*parts, **arguments)
    except InvalidArgumentError:
        raise
    except (TypeError, ValueError) as error:
        listed = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise InvalidArgumentError(f"{name}({listed}): {error}") from error


def one_of(name: str, value: Any, accepted: Iterable[Any]) -> None:
    """Raise unless ``value`` is one of ``accepted``.

    Raises:
        InvalidArgumentError: names the argument, its value and what is accepted.
    """
    choices = list(accepted)
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise InvalidArgumentError(f"{name} must be one of {listed}, not {value!r}")


def require(is_valid: bool, name: str, value: Any, rule: str) -> None:
    """Raise unless an argument is as it must be.

    Raises:
        InvalidArgumentError: names the argument, the rule and the value.
    """
    if not is_valid:
        raise InvalidArgumentError(f"{name} must {rule}, it is {value!r}")
