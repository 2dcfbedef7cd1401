"""Pickles of plain data, read without running anything that is in them."""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any

from trinity_buffer.errors import InvalidExperienceError

_MARK = object()
_NUMBERS = {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"}
_TEXTS = {"UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
_BYTES = {"SHORT_BINBYTES", "BINBYTES", "BINBYTES8"}
_VALUES = _NUMBERS | _TEXTS | _BYTES
_MADE: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "MARK": lambda: _MARK,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def plain(data: bytes) -> Any:
    """Return what a pickle of dicts, lists, tuples, texts, numbers and None holds.

    Raises:
        InvalidExperienceError: it holds something else, such as a class to call, or is cut off.
    """
    stack: list[Any] = []
    memo: list[Any] = []
    try:
        for op, arg, _ in pickletools.genops(data):
            _step(op.name, arg, stack, memo)
    except (ValueError, IndexError, TypeError) as error:
        raise InvalidExperienceError(f"a pickle that cannot be read: {error}") from None
    return stack.pop()


def _step(name: str, arg: Any, stack: list[Any], memo: list[Any]) -> None:
    if name in _VALUES:
        stack.append(arg)
    elif name in _MADE:
        stack.append(_MADE[name]())
    elif name == "MEMOIZE":
        memo.append(stack[-1])
    elif name in ("BINGET", "LONG_BINGET"):
        stack.append(memo[arg])
    else:
        _gather(name, stack)


def _gather(name: str, stack: list[Any]) -> None:
    """Put what is on top of the stack into what lies below it."""
    match name:
        case "PROTO" | "FRAME" | "STOP":
            pass
        case "APPEND":
            value = stack.pop()
            stack[-1].append(value)
        case "SETITEM":
            value, key = stack.pop(), stack.pop()
            stack[-1][key] = value
        case "APPENDS":
            values = _marked(stack)
            stack[-1].extend(values)
        case "SETITEMS":
            values = _marked(stack)
            stack[-1].update(zip(values[::2], values[1::2], strict=True))
        case "TUPLE":
            stack.append(tuple(_marked(stack)))
        case "TUPLE1" | "TUPLE2" | "TUPLE3":
            stack[-_TUPLES[name] :] = [tuple(stack[-_TUPLES[name] :])]
        case _:
            raise ValueError(f"{name} is no plain data")


def _marked(stack: list[Any]) -> list[Any]:
    at = max(place for place, value in enumerate(stack) if value is _MARK)
    values = stack[at + 1 :]
    del stack[at:]
    return values
