"""What strategies make of rewards alone: many groups of one size at a time, numbers in and out.

Most strategies look at nothing but rewards and give each experience one number. Such a class says
so by writing ``score_groups``; the consumer then hands it whole pages of groups and makes no
`Experience` at all. What `AddStrategy.add` does with experiences must come to the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trinity_buffer.algorithm.group_scores import Rewards
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


RewardScorer = Callable[[Rewards], ScoredGroups]
"""From rewards ``[k, G]``, all finite, to what becomes of the groups."""


def asked(score: RewardScorer, rewards: Rewards) -> ScoredGroups:
    """Return what ``score`` makes of ``rewards``, if it can be that.

    Raises:
        InvalidArgumentError: it is not a `ScoredGroups` of their shape.
    """
    found: object = score(rewards)
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
    """Return the ``score_groups`` of a strategy or an advantage function, if it tells all.

    Args:
        one: an instance of a class that may write it.
        needs: the fields without which an experience cannot be scored.
    """
    scorer: RewardScorer | None = getattr(one, "score_groups", None)
    enough = {"reward"} <= set(needs) <= {"reward", "action_mask"}
    return scorer if enough and says_all(type(one), "score_groups") else None


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

    def added(rewards: Rewards) -> ScoredGroups:
        found, named = asked(score, rewards), {}
        for name, values in found.metrics.items():
            named[f"group_advantages/{name}/mean"] = values + 0.0  # a sum has no negative zero
            named[f"group_advantages/{name}/max"] = values
            named[f"group_advantages/{name}/min"] = values
        return replace(found, reasons=np.array(reason, object), metrics=named)

    return added
