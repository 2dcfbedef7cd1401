"""Resolves a strategy, given by name or class, and compares the configurations of its sets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trinity_buffer.algorithm import ADD_STRATEGY
from trinity_buffer.algorithm.add_strategy import AddStrategy, AdvantageAddStrategy
from trinity_buffer.algorithm.advantage_fn import PipelineAdvantage
from trinity_buffer.errors import InvalidArgumentError, UnknownNameError
from trinity_buffer.options import GroupingRules, renamed
from trinity_buffer.pipeline.handle import as_json

StrategyClass = type[AddStrategy] | type[PipelineAdvantage]
"""A strategy, or advantages of lists of experiences, which are one."""

StrategyLike = str | StrategyClass | Sequence[str | StrategyClass]

Classes = Sequence[tuple[str, type[AddStrategy]]]
"""The strategies of a set, by name."""


def classes_of(strategies: StrategyLike) -> Classes:
    """Return the name and class of one strategy, or of several.

    A strategy has its registered name, or that of its class.

    Raises:
        UnknownNameError: neither a name nor a strategy.
    """
    if isinstance(strategies, (str, type)) or not isinstance(strategies, Iterable):
        strategies = [strategies]
    return [_class_of(strategy) for strategy in strategies]


def _class_of(strategy: str | StrategyClass) -> tuple[str, type[AddStrategy]]:
    kind: object = ADD_STRATEGY.get(strategy) if isinstance(strategy, str) else strategy
    if not (isinstance(kind, type) and issubclass(kind, (AddStrategy, PipelineAdvantage))):
        hint = " (give its class)" if isinstance(kind, (AddStrategy, PipelineAdvantage)) else ""
        raise UnknownNameError(
            f"{strategy!r} is not an AddStrategy{hint}; known are {', '.join(ADD_STRATEGY.names())}"
        )
    name = strategy if isinstance(strategy, str) else ADD_STRATEGY.name_of(kind)
    if issubclass(kind, PipelineAdvantage):
        return name, type(kind.__name__, (AdvantageAddStrategy,), {"advantage_fn": kind})
    return name, kind


def _args_of(args: Mapping[str, Any], classes: Classes, name: str) -> Mapping[str, Any]:
    """Return the arguments of one strategy among those of its set."""
    of_one: Mapping[str, Any] = args if len(classes) == 1 else args.get(name, {})
    return of_one


def with_over(
    args: Mapping[str, Any], classes: Classes, recorded: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the arguments of a set with ``over``, the unit of its statistics, filled in.

    By default each run counts once. A set made before ``over`` existed counts rows, so that its
    arithmetic stays the same.

    Args:
        args: the arguments from the caller.
        classes: of the set.
        recorded: the configuration of the set, if it exists.
    """
    filled = {name: dict(_args_of(args, classes, name)) for name, _ in classes}
    # A set of other strategies is refused, whatever it counts.
    before = None
    if recorded is not None and len(recorded["strategy"]) == len(classes):
        before = recorded["args"]
    for name, cls in classes:
        if cls.takes_over():
            rows = before is not None and "over" not in _args_of(before, classes, name)
            filled[name].setdefault("over", "rows" if rows else "runs")
    if len(classes) == 1:
        return filled[classes[0][0]]
    # Unknown names stay: `compose` refuses them.
    return {name: of_one for name, of_one in {**args, **filled}.items() if of_one}


def config_diff(
    classes: Classes, recorded: Mapping[str, Any], wanted: Mapping[str, Any]
) -> tuple[str, str] | None:
    """Return the settings that only the first and only the second configuration has, as text.

    None if they are equal, with the defaults of ``classes`` filled in.
    """
    # ``module:Class`` means ``module.Class``.
    before, after = (
        {"strategy": "+".join(config["strategy"]).replace(":", ".")}
        for config in (recorded, wanted)
    )
    if before == after:
        before, after = (_flat(classes, config) for config in (recorded, wanted))
    if before == after:
        return None
    first, second = (
        ", ".join(f"{k}={v!r}" for k, v in mine.items() if k not in other or other[k] != v)
        for mine, other in ((before, after), (after, before))
    )
    return first or "none of it", second or "none of it"


def _flat(classes: Classes, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with all defaults, and one key per value."""
    flat = {k: v for k, v in config.items() if k not in ("strategy", "args", "grouping")}
    # An old set lacks newer rules, and has those of its time by their older names.
    flat |= asdict(GroupingRules()) | renamed(config.get("grouping", {}), warn=False)
    for name, cls in classes:
        prefix = f"{name}." if len(classes) > 1 else ""
        defaults = cls.default_args()
        if cls.takes_over():  # what sets from before ``over`` do
            defaults["over"] = "rows"
        for key, value in defaults.items():
            try:
                flat[f"{prefix}{key}"] = as_json(key, value)
            except InvalidArgumentError:  # no JSON value equals it
                continue
        args = _args_of(config["args"], classes, name)
        flat |= {f"{prefix}{key}": value for key, value in args.items()}
    return flat
