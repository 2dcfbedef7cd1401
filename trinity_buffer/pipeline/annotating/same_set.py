"""Whether a strategy is the one that an annotation set was made with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from trinity_buffer.algorithm.add_strategy import AddStrategy, CompositeAddStrategy
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.pipeline.annotating.grouping import GroupingRules
from trinity_buffer.pipeline.events import as_json


def is_same_set(
    recorded: Mapping[str, Any], given: Mapping[str, Any], strategy: AddStrategy
) -> bool:
    """Return whether two configurations mean the same; a default counts as if it were spelled out.

    Args:
        recorded: with which the set was made.
        given: with which ``strategy`` was made.
        strategy: that knows its defaults.
    """
    if _paths(recorded) != _paths(given):
        return False
    return _filled(recorded, strategy) == _filled(given, strategy)


def told_apart(
    recorded: Mapping[str, Any], given: Mapping[str, Any], strategy: AddStrategy
) -> tuple[str, str]:
    """Return what two configurations of sets have each that the other has not; as `is_same_set`."""
    if _paths(recorded) != _paths(given):
        before, after = ({"strategy": "+".join(_paths(one))} for one in (recorded, given))
    else:
        before, after = (_flat(_filled(one, strategy)) for one in (recorded, given))
    told = (
        [
            f"{key}={value!r}"
            for key, value in one.items()
            if key not in other or other[key] != value
        ]
        for one, other in ((before, after), (after, before))
    )
    first, second = (", ".join(one) or "none of it" for one in told)
    return first, second


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the filled configuration of a set with one key for each value."""
    found = {key: value for key, value in config.items() if key not in ("args", "grouping")}
    found |= config.get("grouping", {})
    names = config["strategy"]
    for name, args in zip(names, config["args"], strict=True):
        prefix = f"{name}." if len(names) > 1 else ""
        found |= {f"{prefix}{key}": value for key, value in args.items()}
    return found


def _paths(config: Mapping[str, Any]) -> list[str]:
    """Return the names of the strategies; ``module:Class`` means ``module.Class``."""
    return [name.replace(":", ".") for name in config["strategy"]]


def with_over(
    args: Mapping[str, Any], strategy: AddStrategy, recorded: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the arguments of a set with what counts once in its statistics, for each strategy.

    Runs do, unless the arguments say otherwise; and rows in a set that was made before one could
    say: its arithmetic stays.

    Args:
        args: as they were given.
        strategy: which was made with them.
        recorded: the configuration of the set, if there is one.
    """
    if isinstance(strategy, CompositeAddStrategy):
        return {
            name: found
            for name, stage, _ in strategy.stages
            if (found := _with_over(args.get(name, {}), stage, _args_of(recorded, name)))
        }
    return _with_over(args, strategy, None if recorded is None else recorded["args"])


def _args_of(recorded: Mapping[str, Any] | None, name: str) -> Mapping[str, Any] | None:
    if recorded is None or len(recorded["strategy"]) < 2:
        return None
    found: Mapping[str, Any] = recorded["args"].get(name, {})
    return found


def _with_over(
    args: Mapping[str, Any], strategy: AddStrategy, recorded: Mapping[str, Any] | None
) -> dict[str, Any]:
    if "over" in args or not strategy.takes_over():
        return dict(args)
    before = recorded is not None and "over" not in recorded
    return {**args, "over": "rows" if before else "runs"}


def _filled(config: Mapping[str, Any], strategy: AddStrategy) -> dict[str, Any]:
    """Return a configuration with all arguments of each strategy."""
    args = config["args"]
    listed = [(strategy, args)]
    if len(config["strategy"]) > 1:
        assert isinstance(strategy, CompositeAddStrategy)  # made of as many
        listed = [(stage, args.get(name, {})) for name, stage, _ in strategy.stages]
    filled = [_defaults(stage) | given for stage, given in listed]
    rules = asdict(GroupingRules()) | config.get("grouping", {})  # a set of before lacks new ones
    return {**config, "strategy": _paths(config), "args": filled, "grouping": rules}


def _defaults(strategy: AddStrategy) -> dict[str, Any]:
    """Return the defaults of a strategy that an argument from a configuration can be equal to."""
    found = {}
    defaults = type(strategy).default_args()
    if strategy.takes_over():  # what a set does that was made before one could say it
        defaults["over"] = "rows"
    for name, default in defaults.items():
        try:
            found[name] = as_json(name, default)
        except InvalidArgumentError:  # nothing that was recorded can be equal to it
            continue
    return found
