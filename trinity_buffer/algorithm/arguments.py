"""The named parts of an algorithm, and their arguments: what a constructor accepts.

Names are for configurations; in Python, pass the object.

A default is written once, in the signature. `declared_arguments` reads it from there; nothing
repeats it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import wraps
from importlib import import_module
from importlib.metadata import entry_points
from numbers import Integral, Real
from typing import (
    Any,
    ClassVar,
    Generic,
    Literal,
    TypeVar,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from trinity_buffer.errors import InvalidArgumentError, UnknownNameError
from trinity_buffer.identity import closest
from trinity_buffer.user_code import describe_error, own_line

Made = TypeVar("Made")
T = TypeVar("T")
Registered = TypeVar("Registered", bound=type)

REQUIRED = inspect.Parameter.empty
"""Stands for the default of an argument that has none."""


def declared_arguments(cls: type) -> dict[str, inspect.Parameter]:
    """Return ``{name: parameter}`` of all that the constructor of ``cls`` takes.

    `REQUIRED` is the default of one that has none. A signature with ``**kwargs`` hands these on to
    its base class, whose arguments therefore count too; the most derived default wins.
    """
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


Rule = tuple[Callable[[Any], bool], str]
"""What holds of an argument, and in words what it must do."""

POSITIVE: Rule = (lambda value: value > 0, "be positive")
NOT_NEGATIVE: Rule = (lambda value: value >= 0, "not be negative")
SHARE: Rule = (lambda value: 0 <= value <= 1, "lie between 0 and 1")
UP_TO_1: Rule = (lambda value: 0 < value <= 1, "be in (0, 1]")


def checked(default: Any, rule: Rule, **options: Any) -> Any:
    """Return a dataclass field of a `Configured` whose value must keep ``rule``.

    None is accepted where it is the default.
    """
    return field(default=default, metadata={"rule": rule}, **options)


@dataclass(eq=False)
class Configured:
    """A part that is configured by the arguments of its constructor.

    As a dataclass it refuses those that break the rules of its fields, see `checked`.

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

    def __post_init__(self) -> None:
        """Refuse options that cannot be right.

        Raises:
            InvalidArgumentError: names one.
        """
        for option in fields(self):
            value = getattr(self, option.name)
            is_unset = value is None and option.default is None
            if "rule" in option.metadata and not is_unset:
                is_valid, words = option.metadata["rule"]
                require(is_valid(value), option.name, value, words)

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """Return the arguments for a configuration: the constructor's defaults, then `tuned`."""
        declared = {
            name: parameter.default
            for name, parameter in declared_arguments(cls).items()
            if parameter.default is not REQUIRED and name not in cls.runtime_args
        }
        args = declared | dict(cls.tuned)
        return {k: v for k, v in args.items() if v is not None} if cls.none_is_unset else args


_CALLED = {"trainer": "consumer"}
"""Key of the configuration -> the argument of another name that says the same."""


def did_you_mean(name: str, accepted: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest of ``accepted``, or an empty text."""
    meant = closest(_CALLED.get(name, name), accepted)
    return "" if meant is None else f"; did you mean {meant!r}?"


def refuse_unknown(owner: str, arguments: Iterable[str], accepted: Iterable[str]) -> None:
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
    for argument, parameter in (declared_arguments(cls) if isinstance(cls, type) else {}).items():
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
        part = cls(*parts, **arguments)
    except InvalidArgumentError:
        raise
    except (TypeError, ValueError) as error:
        listed = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise InvalidArgumentError(f"{name}({listed}): {error}") from error
    if parts and not hasattr(part, "writer"):  # of a strategy
        raise InvalidArgumentError(
            f"{name} has no writer: call super().__init__(writer) in its __init__"
        )
    return part


@dataclass_transform(eq_default=False, field_specifiers=(field,))
def configured(cls: type[T]) -> type[T]:
    """Make a dataclass of a part, whose constructor names an argument that it does not take.

    With an option ``on_unknown="ignore"`` it swallows such an argument, as the reference does. What
    a ``Literal`` lists is what the option accepts.
    """
    dataclass(eq=False)(cls)
    init, taken = cls.__init__, declared_arguments(cls)
    choices = {n: get_args(t) for n, t in get_type_hints(cls).items() if get_origin(t) is Literal}

    @wraps(init)
    def init_checked(self: T, *parts: Any, **given: Any) -> None:
        # By the class that is made: a subclass with a constructor of its own hands on the rest.
        accepted = declared_arguments(type(self)).keys() - {"writer"}
        if "on_unknown" not in taken or given.get("on_unknown") != "ignore":
            # Of a configuration the writer is no option, of a call it may be a keyword.
            options = [name for name in given if name != "writer" or name not in taken]
            refuse_unknown(type(self).__name__, options, accepted)
        init(self, *parts, **{name: value for name, value in given.items() if name in taken})
        for name in choices.keys() & taken.keys():
            one_of(name, getattr(self, name), choices[name])

    cls.__init__ = init_checked  # type: ignore[method-assign, assignment]  # with the same keywords
    return cls


def one_of(name: str, value: Any, accepted: Iterable[Any]) -> None:
    """Raise unless ``value`` is one of ``accepted``.

    Raises:
        InvalidArgumentError: names the argument, its value and what is accepted.
    """
    choices = list(accepted)
    # True is in (0, 1), and no number.
    if value not in choices or isinstance(value, bool) not in map(_KINDS["bool"], choices):
        listed = ", ".join(repr(choice) for choice in choices)
        raise InvalidArgumentError(f"{name} must be one of {listed}, not {value!r}")


def require(is_valid: bool, name: str, value: Any, rule: str) -> None:
    """Raise unless an argument is as it must be.

    Raises:
        InvalidArgumentError: names the argument, the rule and the value.
    """
    if not is_valid:
        raise InvalidArgumentError(f"{name} must {rule}, it is {value!r}")


class Registry(Generic[T]):
    """Names of one kind of class, filed by decorator or entry point (``trinity_buffer.<kind>``)."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._classes: dict[str, T] = {}

    def register_module(self, name: str) -> Callable[[Registered], Registered]:
        """Return a decorator that files a class under ``name``.

        The same class again, as when a notebook's cell runs twice, takes its own place; and so does
        a user's version of a class of this package, if it has the same name.

        Raises:
            InvalidArgumentError: the name belongs to another class.
        """

        def register(cls: Registered) -> Registered:
            known: Any = self._classes.get(name)
            # By name and module: a cell that runs twice makes another class object.
            is_version = cls.__qualname__ == getattr(known, "__qualname__", None) and (
                known.__module__ == cls.__module__ or known.__module__.startswith("trinity_buffer.")
            )
            if known is not None and not is_version:
                raise InvalidArgumentError(
                    f"{self.kind} {name!r} is taken by {known!r}; choose another name"
                )
            self._classes[name] = cls  # type: ignore[assignment]  # a class of kind T by contract
            return cls

        return register

    def get(self, name: str) -> T:
        """Return the class of ``name``; installed packages are asked the first time it is missing.

        Args:
            name: as it was registered, or where a class is: ``module.Class`` or ``module:Class``.

        Raises:
            UnknownNameError: lists the names there are, and the one probably meant; or says in a
                sentence why its module cannot be imported, and in which line of it.
        """
        if not isinstance(name, str):
            raise UnknownNameError(
                f"{name!r} is no name of a {self.kind} (there are: {', '.join(self.names())})"
            )
        if name in self._classes:
            return self._classes[name]
        path = name
        try:
            if is_path(name):
                module, _, attribute = name.replace(":", ".").rpartition(".")
                imported: T = getattr(import_module(module), attribute)
                return imported
            # Asked last: reading the metadata of all installed packages takes milliseconds.
            for entry in entry_points(group=self._group, name=name):
                path = entry.value
                self._classes[name] = entry.load()
        except Exception as error:
            # A package that fails to import must not look like a name that is missing.
            known = isinstance(error, (ImportError, AttributeError))
            reason = str(error) if known else describe_error(error)
            line = own_line(error)
            place = "" if line is None else f" ({line})"
            raise UnknownNameError(f"no {self.kind} at {path!r}: {reason}{place}") from error
        if name in self._classes:
            return self._classes[name]
        names = self.names()
        meant = did_you_mean(name, names) or "; one of your own is named as module:Class"
        raise UnknownNameError(f"no {self.kind} {name!r}{meant} (there are: {', '.join(names)})")

    def name_of(self, cls: type) -> str:
        """Return the name under which ``cls`` is filed; the class's own if it is not."""
        if filed := [name for name, known in self._classes.items() if known is cls]:
            return min(filed)
        # Asked last, as in `get`.
        return next((name for name in self.names() if self.get(name) is cls), cls.__name__)

    def names(self) -> tuple[str, ...]:
        """Return the names that `get` knows, those of installed packages included, sorted."""
        installed = {entry.name for entry in entry_points(group=self._group)}
        return tuple(sorted(installed | set(self._classes)))

    @property
    def _group(self) -> str:
        return f"trinity_buffer.{self.kind}"


def is_path(name: str) -> bool:
    """Return whether a name says where a class is, as ``module.Class`` or ``module:Class``."""
    return "." in name or ":" in name
