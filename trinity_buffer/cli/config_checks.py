"""What a value of the configuration must be, whatever its key is."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo, field_validator

from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.identity import problem_of_name


def _checked_name(name: str) -> str:
    problem = problem_of_name(name)
    if problem is not None:
        raise ValueError(f"the name {problem}")
    return name


Name = Annotated[str, AfterValidator(_checked_name)]
"""A text that can name something."""


def _checked_device(device: str) -> str:
    if not re.fullmatch("cpu(:0)?|cuda(:[0-9]+)?", device):
        raise ValueError("must be cpu, cuda, or one GPU of this machine, such as cuda:1")
    return device


Device = Annotated[str, AfterValidator(_checked_device)]
"""Where a trainer computes, as torch writes it."""


class Section(BaseModel):
    """Some keys of the configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def check_value(cls, value: Any, info: ValidationInfo) -> Any:
        """Return ``value``.

        Raises:
            ValueError: a truth value in place of a number, or a table that cannot be recorded.
        """
        annotation = cls.model_fields[str(info.field_name)].annotation
        kinds = {annotation, *get_args(annotation)}
        if isinstance(value, bool) and bool not in kinds and kinds & {int, float}:
            raise ValueError("Input should be a number")
        if get_origin(annotation) is dict and isinstance(value, Mapping):
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise ValueError(f"must hold texts and finite numbers alone ({error})") from error
        return value


LARGEST = 3.4028234663852886e38
"""The largest float of 32 bits, in which a policy is computed."""


def require_computable(value: Any, key: str = "") -> None:
    """Return if every number in ``value`` can be computed with, and every text can name something.

    Raises:
        InvalidArgumentError: names the key, the value and the bound.
    """
    if isinstance(value, Mapping):
        for name, inner in value.items():
            require_computable(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for place, inner in enumerate(value):
            require_computable(inner, f"{key}[{place}]")
    elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise InvalidArgumentError(
            f"{key}={said(value)}: an integer has at most 64 bits, from {-(1 << 63)} to "
            f"{(1 << 63) - 1}"
        )
    elif isinstance(value, float) and abs(value) > LARGEST:
        raise InvalidArgumentError(
            f"{key}={value}: the largest number that can be computed with is {LARGEST:.4e}"
        )
    elif isinstance(value, str) and "\0" in value:
        raise InvalidArgumentError(f"{key}={said(value)}: NUL has no place in a text")


def said(value: Any) -> str:
    """Return the beginning of a value, as people read it."""
    try:
        return f"{value!r:.100}"
    except ValueError:  # Python writes no such number
        return "a number of thousands of digits"


def refuse_unknown(
    values: Mapping[str, Any], config: type[BaseModel], where: str, beside: Sequence[str] = ()
) -> None:
    """Return if every key of ``values``, and of the sections in it, is one of ``config``.

    Args:
        beside: keys that may stand there too, and are none of the configuration.

    Raises:
        InvalidArgumentError: names the key, after ``where``, and what was probably meant; or it is
            a section and holds a single value.
    """
    for key, value in values.items():
        if key in beside:
            continue
        if key not in config.model_fields:
            raise InvalidArgumentError(f"{where}{_no_key(key, '', config, config, beside)}")
        annotation = config.model_fields[key].annotation
        inner = section_of(annotation)
        if inner is not None and isinstance(value, Mapping):
            unknown = [name for name in value if name not in inner.model_fields]
            for name in unknown[:1]:
                raise InvalidArgumentError(f"{where}{_no_key(name, f'{key}.', inner, config)}")
        elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
            names = _all(annotation.model_fields)
            raise InvalidArgumentError(f"{where}{key}={said(value)}: must be a table of {names}")


def _no_key(
    key: object,
    prefix: str,
    section: type[BaseModel],
    config: type[BaseModel],
    beside: Sequence[str] = (),
) -> str:
    """Return that a key is none of a section, and which one was probably meant.

    One of this very name in another place goes before one of a similar name in this place.
    """
    here = [*section.model_fields, *beside]
    meant = [path for path in _paths(config) if path.rpartition(".")[2] == key]
    meant += [prefix + name for name in difflib.get_close_matches(str(key), here, n=1)]
    told = f"did you mean {meant[0]!r}?" if meant else f"there are: {_all(here)}"
    return f"there is no key {prefix + str(key)!r}; {told}"


def _paths(config: type[BaseModel]) -> list[str]:
    """Return the keys of a configuration, those of its sections as ``section.key``."""
    found = list(config.model_fields)
    for name, field in config.model_fields.items():
        inner = section_of(field.annotation)
        found += [] if inner is None else [f"{name}.{key}" for key in inner.model_fields]
    return found


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section that a key holds, or may hold; None: plain values alone."""
    kinds = get_args(annotation) or (annotation,)
    found = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
    return found[0] if found else None


def _all(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
