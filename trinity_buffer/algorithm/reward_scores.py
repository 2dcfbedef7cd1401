"""What strategies make of rewards alone: many groups of one size at a time, numbers in and out.

Most strategies look at nothing but rewards and give each experience one number. Such a class says
so by writing ``score_groups``; the consumer then hands it whole pages of groups and makes no
`Experience` at all. What `AddStrategy.add` does with experiences must come to the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trinity_buffer.algorithm.group_scores import Over, Rewards, Runs
from trinity_buffer.errors import InvalidArgumentError

_CHANGE_NOTHING = frozenset({"__init__", "reference_args", "_abc_impl"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroups:
    """What becomes of ``k`` groups of ``G`` experiences each.

    Attributes:
        scores: the advantage of each, ``[k, G]``; None: a filter, which computes none.
        kept: which are kept, ``[k, G]``; None: all.
        reasons: why the others are rejected, texts of a shape that fits ``[k, G]``; None: as
            ``filtered``. Of a `RewardStrategy` it is always the class's ``left_out``.
        metrics: name -> one number per group, ``[k]``.
    """

    scores: Rewards | None = None
    kept: NDArray[np.bool_] | None = None
    reasons: NDArray[np.object_] | None = None
    metrics: Mapping[str, Rewards] = field(default_factory=dict)


class RewardScorer(Protocol):
    """From rewards ``[k, G]``, all finite, to what becomes of the groups."""

    def __call__(self, rewards: Rewards, runs: Runs | None = None, /) -> ScoredGroups:
        """Return it; ``runs`` ``[k, G]`` tells the run of each row, None: each row is one."""


def asked(
    score: Callable[..., ScoredGroups], rewards: Rewards, runs: Runs | None = None
) -> ScoredGroups:
    """Return what ``score`` makes of ``rewards``, if it can be that.

    Args:
        score: a `RewardScorer`, or a ``score_groups``, which is given no ``runs``.
        rewards: ``[k, G]``.
        runs: of each row, None: each row is one.

    Raises:
        InvalidArgumentError: it is not a `ScoredGroups` of their shape.
    """
    found: object = score(rewards) if runs is None else score(rewards, runs)
    if not isinstance(found, ScoredGroups):
        raise InvalidArgumentError(
            f"`score_groups` returned {type(found).__name__}, it must return `ScoredGroups`, as in "
            "`ScoredGroups(scores=rewards)`"
        )
    _require_shape("scores", found.scores, rewards.shape)
    _require_shape("kept", found.kept, rewards.shape)
    for name, values in found.metrics.items():
        _require_shape(f"metric {name!r}", values, rewards.shape[:1])
    return found


def _require_shape(what: str, values: Any, shape: tuple[int, ...]) -> None:
    if values is not None and np.shape(values) != shape:
        raise InvalidArgumentError(
            f"`score_groups` returned {what} of shape {list(np.shape(values))}: it must have "
            f"{list(shape)}, as the rewards of so many groups (of so many experiences each)"
        )


def scorer_of(one: object, needs: Collection[str]) -> RewardScorer | None:
    """Return what the ``score_groups`` of a strategy or an advantage function makes of rows.

    None if it does not tell all.

    Args:
        one: an instance of a class that may write it.
        needs: the fields without which an experience cannot be scored.
    """
    score: Callable[..., ScoredGroups] | None = getattr(one, "score_groups", None)
    enough = {"reward"} <= set(needs) <= {"reward", "action_mask"}
    if score is None or not enough or not says_all(type(one), "score_groups"):
        return None
    return over_runs(score, getattr(one, "over", "rows"))


def over_runs(score: Callable[..., ScoredGroups], over: Over = "runs") -> RewardScorer:
    """Return a scorer of rows that asks ``score`` once for each run.

    Where the rows of a run have equal rewards, ``score`` is given one for the run, and what it says
    holds for all rows. Where they have rewards of their own, it is given all rows and their
    ``weights`` ``[k, G]``, 1 divided by the number of rows of the run; a ``score`` that takes no
    weights is given the mean of each run.

    Args:
        score: gets rewards ``[k, G]``.
        over: ``"rows"``: each row counts for a run.
    """

    def scored(rewards: Rewards, runs: Runs | None = None, /) -> ScoredGroups:
        if runs is None or over == "rows":
            return asked(score, rewards)
        parts = list(_scored_by_run(score, rewards, runs))
        return parts[0][1] if len(parts) == 1 else _merged(parts, rewards.shape)

    return scored


def renumbered(runs: Runs) -> Runs | None:
    """Return the runs ``[k, G]`` of rows of which some were left out, from 0 on; None: all differ.

    Numbers ascend with the first row of each run, as they did.
    """
    groups, size = runs.shape
    there = np.zeros((groups, int(runs.max(initial=0)) + 1), np.int64)
    np.put_along_axis(there, runs, 1, axis=1)
    if bool((there.sum(axis=1) == size).all()):
        return None
    found: Runs = np.take_along_axis(there.cumsum(axis=1) - 1, runs, axis=1)
    return found


def _scored_by_run(
    score: Callable[..., ScoredGroups], rewards: Rewards, runs: Runs
) -> Iterator[tuple[Runs, ScoredGroups]]:
    """Yield numbers of groups, and what becomes of their rows: groups of one form at a time."""
    groups, size = rewards.shape
    counts = runs.max(axis=1) + 1
    flat = runs + np.arange(groups)[:, np.newaxis] * size
    first = np.zeros(groups * size)
    first[flat.ravel()[::-1]] = rewards.ravel()[::-1]
    own = (rewards != first[flat]).any(axis=1)
    rows_of_run = np.bincount(flat.ravel(), minlength=groups * size)
    weighs = "weights" in inspect.signature(score).parameters
    for number in np.flatnonzero(np.bincount(counts)).tolist():
        for have_own in (False, True):
            at = np.flatnonzero((counts == number) & (own == have_own))
            if not len(at):
                continue
            if have_own and weighs:
                weights = 1.0 / rows_of_run[flat[at]]
                yield at, asked(partial(score, weights=weights), rewards[at])
                continue
            if have_own:
                sums = np.bincount(flat.ravel(), rewards.ravel(), minlength=groups * size)
                of_runs = sums / np.maximum(rows_of_run, 1)
            else:
                of_runs = first
            places = (at * size)[:, np.newaxis] + np.arange(number)
            yield at, _of_rows(asked(score, of_runs[places]), runs[at], number)


def _of_rows(found: ScoredGroups, runs: Runs, number: int) -> ScoredGroups:
    """Return what was said of so many runs of each group, said of their rows."""

    def spread(values: Any) -> Any:
        if values is None:
            return None
        return np.take_along_axis(np.broadcast_to(values, (len(runs), number)), runs, axis=1)

    return replace(
        found,
        scores=spread(found.scores),
        kept=spread(found.kept),
        reasons=spread(found.reasons),
    )


def _merged(parts: Collection[tuple[Runs, ScoredGroups]], shape: tuple[int, ...]) -> ScoredGroups:
    """Return what was said of several parts of some groups ``[k, G]`` as one answer."""
    scores = kept = reasons = None
    metrics: dict[str, Rewards] = {}
    for at, found in parts:
        if found.scores is not None:
            scores = np.zeros(shape) if scores is None else scores
            scores[at] = found.scores
        if found.kept is not None:
            kept = np.ones(shape, np.bool_) if kept is None else kept
            kept[at] = found.kept
        if found.reasons is not None:
            reasons = np.full(shape, "filtered", object) if reasons is None else reasons
            reasons[at] = found.reasons
        for name, values in found.metrics.items():
            metrics.setdefault(name, np.full(shape[0], np.nan))[at] = values
    return ScoredGroups(scores=scores, kept=kept, reasons=reasons, metrics=metrics)


def says_all(cls: type, method: str) -> bool:
    """Return whether ``method`` still tells all that ``cls`` does.

    It does where ``cls`` writes it, or inherits it and changes nothing but the constructor: a class
    that changes something else may decide otherwise, unless it writes ``method`` anew.
    """
    for one in cls.__mro__:
        if method in vars(one):
            return True
        own = (name for name in vars(one) if name not in _CHANGE_NOTHING)
        if not all(name.startswith("__") and name.endswith("__") for name in own):
            return False
    return False


def inherits(cls: type, base: type, methods: Collection[str]) -> bool:
    """Return whether ``cls`` has all of ``methods`` from ``base``: none was overridden."""
    return all(getattr(cls, name) is getattr(base, name) for name in methods)


def as_added(score: RewardScorer, reason: str) -> RewardScorer:
    """Return ``score`` as the consumer needs it.

    Args:
        score: with the metrics of each group under their own names.
        reason: why what is not kept is rejected.

    Returns:
        The same with that reason, and with metrics as `gather_metrics` names those of one group.
    """

    def added(rewards: Rewards, runs: Runs | None = None, /) -> ScoredGroups:
        found, named = asked(score, rewards, runs), {}
        for name, values in found.metrics.items():
            named[f"group_advantages/{name}/mean"] = values + 0.0  # a sum has no negative zero
            named[f"group_advantages/{name}/max"] = values
            named[f"group_advantages/{name}/min"] = values
        return replace(found, reasons=np.array(reason, object), metrics=named)

    return added
