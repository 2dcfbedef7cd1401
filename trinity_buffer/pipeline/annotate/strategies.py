"""Resolves a strategy, given by name or class, to its name, its class and an instance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trinity_buffer.algorithm import ADD_STRATEGY
from trinity_buffer.algorithm.add_strategy import AddStrategy, AdvantageAddStrategy
from trinity_buffer.algorithm.advantage_fn import PipelineAdvantage
from trinity_buffer.algorithm.arguments import made
from trinity_buffer.errors import UnknownNameError
from trinity_buffer.writer import StagedWriter

StrategyClass = type[AddStrategy] | type[PipelineAdvantage]
"""A strategy, or advantages of lists of experiences, which are one."""

StrategyLike = str | StrategyClass | Sequence[str | StrategyClass]


def list_of(strategies: StrategyLike) -> list[str | StrategyClass]:
    """Return one strategy, or several, as a list."""
    if isinstance(strategies, (str, type)) or not isinstance(strategies, Iterable):
        return [strategies]
    return list(strategies)


def name_of(strategy: str | StrategyClass) -> str:
    """Return the registered name of a strategy, or that of its class.

    Raises:
        UnknownNameError: it is neither a name nor a strategy.
    """
    if isinstance(strategy, str):
        return strategy
    strategy_class(strategy)
    names = ADD_STRATEGY.names()
    known = next((name for name in names if ADD_STRATEGY.get(name) is strategy), None)
    return known or strategy.__name__


def make_strategy(
    strategy: str | StrategyClass, writer: StagedWriter, args: Mapping[str, Any]
) -> AddStrategy:
    """Return a strategy that writes to ``writer``; a `PipelineAdvantage` class becomes one.

    Raises:
        UnknownNameError: unknown name, or not a strategy.
    """
    return made(strategy_class(strategy), writer, **args)


def strategy_class(strategy: str | StrategyClass) -> type[AddStrategy]:
    """Return the class of a strategy.

    Raises:
        UnknownNameError: unknown name, or not a strategy.
    """
    kind: object = ADD_STRATEGY.get(strategy) if isinstance(strategy, str) else strategy
    if isinstance(kind, type) and issubclass(kind, PipelineAdvantage):
        return type(kind.__name__, (AdvantageAddStrategy,), {"advantage_fn": kind})
    if not (isinstance(kind, type) and issubclass(kind, AddStrategy)):
        hint = " (give its class)" if isinstance(kind, (AddStrategy, PipelineAdvantage)) else ""
        raise UnknownNameError(
            f"{strategy!r} is not an AddStrategy{hint}; known are {', '.join(ADD_STRATEGY.names())}"
        )
    return kind
