"""A strategy by its name or its class: what it is called, and an instance of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trinity_buffer.algorithm import ADD_STRATEGY
from trinity_buffer.algorithm.add_strategy import AddStrategy
from trinity_buffer.algorithm.arguments import made
from trinity_buffer.errors import UnknownNameError
from trinity_buffer.writer import StagedWriter


def name_of(strategy: str | type[AddStrategy]) -> str:
    """Return the registered name of a strategy, or that of its class."""
    if isinstance(strategy, str):
        return strategy
    known = {ADD_STRATEGY.get(name): name for name in ADD_STRATEGY.names()}
    return known.get(strategy, strategy.__name__)


def make_strategy(
    strategy: str | type[AddStrategy], writer: StagedWriter, args: Mapping[str, Any]
) -> AddStrategy:
    """Return a strategy that writes to ``writer``.

    Raises:
        UnknownNameError: there is none of this name, or it is none.
    """
    kind: object = ADD_STRATEGY.get(strategy) if isinstance(strategy, str) else strategy
    if not (isinstance(kind, type) and issubclass(kind, AddStrategy)):
        raise UnknownNameError(
            f"{strategy!r} is not an AddStrategy; known are {', '.join(ADD_STRATEGY.names())}"
        )
    return made(kind, writer, **args)
