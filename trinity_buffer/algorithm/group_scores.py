"""Arithmetic on the rewards of one group: baselines, deviations, scores; numbers in and out.

Strategies (a list of experiences) and trainer-side advantages (a batch of tensors) both call these,
so that the two doors cannot disagree. Everything is float64: the rewards of a group are few, and a
float32 mean of equal rewards is not equal to them.

The unit of statistics is the run. Where the rows of each run have equal rewards, functions get one
number for a run; where they have rewards of their own, one for each row, with ``weights``: 1
divided by the number of rows of its run.

What strategies make of rewards alone: many groups of one size at a time, numbers in and out.

Most strategies look at nothing but rewards and give each experience one number. Such a class says
so by writing ``score_groups``; the consumer then hands it whole pages of groups and makes no
`Experience` at all. What `AddStrategy.add` does with experiences must come to the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from trinity_buffer.algorithm.arguments import one_of
from trinity_buffer.errors import InvalidArgumentError

Rewards = NDArray[np.float64]
Runs = NDArray[np.int64]
"""Number of the run of each row of a group, from 0 on."""
Over = Literal["runs", "rows"]
"""What counts once in the statistics of a group: a run, or each of its rows."""
SingleMember = Literal["raw", "zero"]

RELATIVE_FLOOR = 1e-7
"""Deviations below this share of the largest reward count as 0: seven rewards of 0.1 are equal.

About float32's resolution (1.2e-7), since rewards often come out of a float32 model.
"""


def as_rewards(rewards: Sequence[float] | Rewards) -> Rewards:
    """Return ``rewards`` as float64, shape ``(G,)``."""
    return np.asarray(rewards, dtype=np.float64)


def by_run(rewards: Rewards, runs: Runs | None) -> tuple[Rewards, Rewards | None]:
    """Return the rewards of one group as statistics take them, and their weights.

    Args:
        rewards: of the rows, ``(G,)``.
        runs: of each row, ``(G,)``; None: each row is one.
    """
    if runs is None:
        return rewards, None
    first = first_rows(runs)
    # The usual case. A mean over runs alone is exact; a weighted one has other last bits.
    if bool((rewards == rewards[first][runs]).all()):
        return rewards[first], None
    return rewards, 1.0 / np.bincount(runs)[runs]


def run_means(rewards: Rewards, runs: Runs | None) -> Rewards:
    """Return the reward of each run of one group: the mean of its rows', exactly if all agree."""
    values, weights = by_run(rewards, runs)
    if weights is None or runs is None:
        return values
    return np.bincount(runs, rewards) / np.bincount(runs)


def numbered(names: Sequence[object]) -> Runs | None:
    """Return the number of the run that each row names, by first appearance; None: all differ."""
    numbers: dict[object, int] = {}
    of_rows = [numbers.setdefault(name, len(numbers)) for name in names]
    return None if len(numbers) == len(of_rows) else np.array(of_rows, np.int64)


def _numbered_groups(runs: Runs) -> Runs | None:
    """Return the `numbered` runs of each group ``[k, G]``; None: all of each group differ."""
    numbers = [numbered(of_group) for of_group in runs.tolist()]
    if all(of_group is None for of_group in numbers):
        return None
    own = np.arange(runs.shape[1])
    return np.array([own if of_group is None else of_group for of_group in numbers])


def first_rows(runs: Runs) -> Runs:
    """Return the first row of each run."""
    first = np.zeros(int(runs.max()) + 1, np.int64)
    # Written backwards: of several rows of a run, the first one wins.
    first[runs[::-1]] = np.arange(len(runs))[::-1]
    return first


def size_of(rewards: Rewards, weights: Rewards | None = None) -> int:
    """Return how many runs each group of ``rewards`` ``(..., G)`` has: all of them as many."""
    if weights is None:
        return int(rewards.shape[-1])
    return round(float(weights.reshape(-1, rewards.shape[-1])[0].sum()))


def means(rewards: Rewards, weights: Rewards | None = None) -> Rewards:
    """Return the mean over the runs of each group of ``rewards`` ``(..., G)``, shape ``(...)``."""
    if weights is None:
        return np.asarray(rewards.mean(axis=-1))
    return np.asarray((weights * rewards).sum(axis=-1) / size_of(rewards, weights))


def variance(
    rewards: Sequence[float] | Rewards,
    weights: Rewards | None = None,
    *,
    ddof: int = 0,
    std_floor: float = RELATIVE_FLOOR,
) -> float:
    """Return the variance with divisor ``n - ddof``.

    It is 0 if its root is at most ``std_floor`` times the largest absolute reward.
    A group that is no larger than ``ddof`` has variance 0.
    """
    return float(variances(as_rewards(rewards), weights, ddof=ddof, std_floor=std_floor))


def variances(
    rewards: Rewards,
    weights: Rewards | None = None,
    *,
    ddof: int = 0,
    std_floor: float = RELATIVE_FLOOR,
) -> Rewards:
    """Return the `variance` of each group of ``rewards`` ``(..., G)``, shape ``(...)``."""
    size = size_of(rewards, weights)
    if size <= max(ddof, 0):
        return np.zeros(rewards.shape[:-1])
    if weights is None:
        spread = np.var(rewards, axis=-1, ddof=ddof)
    else:
        centred = rewards - means(rewards, weights)[..., np.newaxis]
        spread = (weights * centred * centred).sum(axis=-1) / (size - ddof)
    # Relative to the rewards: an absolute floor would be wrong for rewards of 1e-3 and of 1e3.
    negligible = std_floor * np.abs(rewards).max(axis=-1)
    return np.where(spread <= negligible * negligible, 0.0, spread)


def deviation(
    rewards: Sequence[float] | Rewards,
    weights: Rewards | None = None,
    *,
    ddof: int = 1,
    std_floor: float = RELATIVE_FLOOR,
) -> float:
    """Return the root of `variance`: of the sample (``ddof=1``) or the population (``ddof=0``)."""
    return float(np.sqrt(variance(rewards, weights, ddof=ddof, std_floor=std_floor)))


def scaled(centred: Rewards, std: float | Rewards, epsilon: float) -> Rewards:
    """Return ``centred / (std + epsilon)``, zeros where ``std`` is 0.

    Rounding leaves differences of 1e-17 between equal rewards; with ``epsilon=0`` they would become
    scores of 1.
    """
    return divided(centred, np.where(np.equal(std, 0.0), 0.0, std + epsilon))


def divided(centred: Rewards, divisor: float | Rewards) -> Rewards:
    """Return ``centred / divisor``, zeros where that is 0."""
    # Divided only where it is defined: np.where would still compute 0 / 0, and warn.
    nonzero = np.not_equal(divisor, 0.0)
    return np.divide(centred, divisor, out=np.zeros_like(centred), where=nonzero)


def moments(
    rewards: Sequence[float] | Rewards,
    weights: Rewards | None = None,
    *,
    ddof: int = 1,
    std_floor: float = RELATIVE_FLOOR,
) -> tuple[float, float]:
    """Return the mean and deviation for GRPO: 0 and 1 for a group of one, as the reference does."""
    mean, std = group_moments(as_rewards(rewards), weights, ddof=ddof, std_floor=std_floor)
    return float(mean), float(std)


def group_moments(
    rewards: Rewards,
    weights: Rewards | None = None,
    *,
    ddof: int = 1,
    std_floor: float = RELATIVE_FLOOR,
) -> tuple[Rewards, Rewards]:
    """Return the `moments` of each group of ``rewards`` ``(..., G)``, two of shape ``(...)``."""
    if size_of(rewards, weights) == 1:
        return np.zeros(rewards.shape[:-1]), np.ones(rewards.shape[:-1])
    spread = variances(rewards, weights, ddof=ddof, std_floor=std_floor)
    return means(rewards, weights), np.sqrt(spread)


def normalized_scores(
    rewards: Sequence[float] | Rewards,
    weights: Rewards | None = None,
    *,
    epsilon: float,
    ddof: int = 1,
    std_floor: float = RELATIVE_FLOOR,
    single_member: SingleMember = "raw",
) -> Rewards:
    """Return ``(r - mean) / (std + epsilon)``, shape ``(G,)`` (arXiv:2402.03300, section 4.1.2).

    Args:
        rewards: rewards of one group, shape ``(G,)``.
        weights: of its rows, where runs have several with rewards of their own.
        epsilon: added to the deviation.
        ddof: 1 divides by ``n - 1`` (the reference), 0 by ``n``.
        std_floor: relative size below which the deviation is 0, and so are the scores.
        single_member: a group of one has nothing to be compared with: ``"raw"`` scores its reward
            (mean 0, std 1, as the reference does), ``"zero"`` scores nothing.
    """
    values = as_rewards(rewards)
    mean, std = moments(values, weights, ddof=ddof, std_floor=std_floor)
    size = size_of(values, weights)
    return scores_around(values, mean, std, epsilon, single_member, size=size)


def scores_around(
    values: Rewards,
    mean: float | Rewards,
    std: float | Rewards,
    epsilon: float,
    single_member: SingleMember = "raw",
    *,
    size: int | None = None,
) -> Rewards:
    """Return `normalized_scores` where mean and deviation are known.

    Args:
        values: rewards of the rows.
        mean, std, epsilon, single_member: as there.
        size: how many runs these rows are; None: each is one.
    """
    if (values.shape[-1] if size is None else size) == 1 and single_member == "zero":
        return np.zeros_like(values)
    return scaled(values - mean, std, epsilon)


def baseline(
    rewards: Sequence[float] | Rewards,
    kind: str = "mean",
    tau: float = 1.0,
    weights: Rewards | None = None,
) -> float:
    """Return what OPMD compares a group with: its mean, or ``tau log(mean(exp(r / tau)))``.

    See arXiv:2501.12599. 0 for a group of one, as the reference does.

    Raises:
        InvalidArgumentError: another ``kind``.
    """
    return float(baselines(as_rewards(rewards), kind, tau, weights))


def baselines(
    rewards: Rewards, kind: str = "mean", tau: float = 1.0, weights: Rewards | None = None
) -> Rewards:
    """Return the `baseline` of each group of ``rewards`` ``(..., G)``, shape ``(...)``."""
    size = size_of(rewards, weights)
    if size == 1:
        return np.zeros(rewards.shape[:-1])
    check_baseline(kind, tau)
    if kind == "mean":
        return means(rewards, weights)
    # Weights enter as logarithms: they are added inside the sum of exponentials.
    exponents = rewards / tau if weights is None else rewards / tau + np.log(weights)
    # logaddexp is stable where exp(r / tau) would overflow.
    return np.asarray(tau * (np.logaddexp.reduce(exponents, axis=-1) - np.log(size)))


def check_baseline(kind: str, tau: float) -> None:
    """Raise unless ``kind`` and ``tau`` are a baseline.

    Raises:
        InvalidArgumentError: an unknown kind, or a temperature that is not positive.
    """
    one_of("opmd_baseline", kind, ("mean", "logavgexp"))
    if not tau > 0:
        raise InvalidArgumentError(f"tau must be positive, not {tau!r}")


def check_scale(epsilon: float, ddof: int, std_floor: float, single_member: str) -> None:
    """Raise unless the four options of a deviation are valid.

    Raises:
        InvalidArgumentError: names the one that is not.
    """
    if not epsilon >= 0:
        raise InvalidArgumentError(f"epsilon must not be negative, it is {epsilon!r}")
    if not std_floor >= 0:
        raise InvalidArgumentError(f"std_floor must not be negative, it is {std_floor!r}")
    one_of("ddof", ddof, (0, 1))
    one_of("single_member", single_member, ("raw", "zero"))


class DeviationOptions:
    """The options of a deviation, for a class that takes them beside arguments of its own.

    Args:
        epsilon: added to the deviation.
        ddof: 1 for the sample deviation, 0 for the population's.
        std_floor: deviations below this share of the largest reward are 0, and so are the scores.
        single_member: ``"raw"`` scores the reward of a group of one, ``"zero"`` scores nothing.
    """

    def __init__(
        self,
        *args: Any,
        epsilon: float = 1e-6,
        ddof: int = 1,
        std_floor: float = RELATIVE_FLOOR,
        single_member: SingleMember = "raw",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        check_scale(epsilon, ddof, std_floor, single_member)
        self.epsilon = epsilon
        self.ddof = ddof
        self.std_floor = std_floor
        self.single_member: SingleMember = single_member


def check_over(over: str) -> Over:
    """Return ``over``.

    Raises:
        InvalidArgumentError: it is neither ``"runs"`` nor ``"rows"``.
    """
    one_of("over", over, ("runs", "rows"))
    return "runs" if over == "runs" else "rows"


def likelihood_ranks(likelihoods: Sequence[float]) -> Rewards:
    """Return each rank / n, the most likely member highest, the earlier of equals lower."""
    # Stable, so that equal likelihoods rank alike on every machine.
    order = np.argsort(np.asarray(likelihoods, dtype=np.float64), kind="stable")
    ranks = np.empty(len(order), dtype=np.float64)
    ranks[order] = np.arange(len(order))
    return ranks / max(len(order), 1)


def rank_penalized(
    rewards: Sequence[float] | Rewards, likelihoods: Sequence[float], penalty: float
) -> Rewards:
    """Return ``r (1 - penalty x rank)``: likely answers earn less (arXiv:2506.02355, section 4).

    The factor also shrinks negative rewards, so that for these likelihood is a bonus.
    """
    return as_rewards(rewards) * (1.0 - likelihood_ranks(likelihoods) * penalty)


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


def _asked(score: Callable[..., ScoredGroups], rewards: Rewards) -> ScoredGroups:
    """Return what a ``score_groups`` makes of ``rewards`` ``[k, G]``, if it can be that.

    Raises:
        InvalidArgumentError: it is not a `ScoredGroups` of their shape.
    """
    answer: object = score(rewards)
    if not isinstance(answer, ScoredGroups):
        raise InvalidArgumentError(
            f"`score_groups` returned {type(answer).__name__}, it must return `ScoredGroups`, as "
            "in `ScoredGroups(scores=rewards)`"
        )
    _require_shape("scores", answer.scores, rewards.shape)
    _require_shape("kept", answer.kept, rewards.shape)
    for name, values in answer.metrics.items():
        _require_shape(f"metric {name!r}", values, rewards.shape[:1])
    return answer


def _require_shape(what: str, values: Any, shape: tuple[int, ...]) -> None:
    if values is not None and np.shape(values) != shape:
        raise InvalidArgumentError(
            f"`score_groups` returned {what} of shape {list(np.shape(values))}: it must have "
            f"{list(shape)}, as the rewards of so many groups (of so many experiences each)"
        )


def scorer_of(scorer: object, needs: Collection[str]) -> RewardScorer | None:
    """Return what the ``score_groups`` of a strategy or an advantage function makes of rows.

    None if it does not tell all.

    Args:
        one: an instance of a class that may write it.
        needs: the fields without which an experience cannot be scored.
    """
    score: Callable[..., ScoredGroups] | None = getattr(scorer, "score_groups", None)
    enough = {"reward"} <= set(needs) <= {"reward", "action_mask"}
    if score is None or not enough or not says_all(type(scorer), "score_groups"):
        return None
    return over_runs(score, getattr(scorer, "over", "rows"))


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
            return _asked(score, rewards)
        parts = list(_scored_by_run(score, rewards, runs))
        return parts[0][1] if len(parts) == 1 else _merged(parts, rewards.shape)

    return scored


def scored_by_size(
    score: RewardScorer, rewards: Rewards, sizes: Runs, runs: Runs | None = None
) -> ScoredGroups:
    """Return what becomes of groups of any sizes, all groups of one size scored at a time.

    Args:
        score: gets rewards ``[k, G]``.
        rewards: of the rows of all groups, one group behind the other, ``[n]``.
        sizes: how many rows each group has, ``[k]``.
        runs: of each row a number that only the rows of one run of a group share, ``[n]``; None:
            each row is one.

    Returns:
        Scores, kept and reasons ``[n]``; metrics ``[k]``, NaN of a group without rows.
    """
    starts = np.cumsum(sizes) - sizes
    scores: Rewards | None = None
    stays = np.ones(len(rewards), np.bool_)
    reasons = np.full(len(rewards), "filtered", object)
    metrics: dict[str, Rewards] = {}
    # Not np.unique, whose first call imports numpy.ma: 8 ms of the first group.
    for size in np.flatnonzero(np.bincount(sizes[sizes > 0])).tolist():
        which = np.flatnonzero(sizes == size)
        rows = starts[which, np.newaxis] + np.arange(size)
        scored = score(rewards[rows], None if runs is None else _numbered_groups(runs[rows]))
        if scored.scores is not None:
            scores = np.zeros(len(rewards)) if scores is None else scores
            scores[rows] = scored.scores
        if scored.kept is not None:
            stays[rows] = scored.kept
        if scored.reasons is not None:
            reasons[rows] = scored.reasons
        for name, values in scored.metrics.items():
            metrics.setdefault(name, np.full(len(sizes), np.nan))[which] = values
    return ScoredGroups(scores=scores, kept=stays, reasons=reasons, metrics=metrics)


def _scored_by_run(
    score: Callable[..., ScoredGroups], rewards: Rewards, runs: Runs
) -> Iterator[tuple[Runs, ScoredGroups]]:
    """Yield numbers of groups, and what becomes of their rows: groups of one form at a time."""
    groups, size = rewards.shape
    counts = runs.max(axis=1) + 1
    # One bincount over all groups needs numbers that no two groups share.
    flat = runs + np.arange(groups)[:, np.newaxis] * size
    first = np.zeros(groups * size)
    # Backwards again: the first row of a run is what the others are compared with.
    first[flat.ravel()[::-1]] = rewards.ravel()[::-1]
    own = (rewards != first[flat]).any(axis=1)
    rows_of_run = np.bincount(flat.ravel(), minlength=groups * size)
    # A score_groups of a user's own may take no weights.
    weighs = "weights" in inspect.signature(score).parameters
    for number in np.flatnonzero(np.bincount(counts)).tolist():
        for have_own in (False, True):
            at = np.flatnonzero((counts == number) & (own == have_own))
            if not len(at):
                continue
            if have_own and weighs:
                weights = 1.0 / rows_of_run[flat[at]]
                yield at, _asked(partial(score, weights=weights), rewards[at])
                continue
            if have_own:
                sums = np.bincount(flat.ravel(), rewards.ravel(), minlength=groups * size)
                of_runs = sums / np.maximum(rows_of_run, 1)
            else:
                of_runs = first
            places = (at * size)[:, np.newaxis] + np.arange(number)
            yield at, _of_rows(_asked(score, of_runs[places]), runs[at], number)


def _of_rows(of_runs: ScoredGroups, runs: Runs, number: int) -> ScoredGroups:
    """Return what was said of so many runs of each group, said of their rows."""

    def spread(values: Any) -> Any:
        if values is None:
            return None
        return np.take_along_axis(np.broadcast_to(values, (len(runs), number)), runs, axis=1)

    return replace(
        of_runs,
        scores=spread(of_runs.scores),
        kept=spread(of_runs.kept),
        reasons=spread(of_runs.reasons),
    )


def _merged(parts: Collection[tuple[Runs, ScoredGroups]], shape: tuple[int, ...]) -> ScoredGroups:
    """Return what was said of several parts of some groups ``[k, G]`` as one answer."""
    scores = stays = reasons = None
    metrics: dict[str, Rewards] = {}
    for at, part in parts:
        if part.scores is not None:
            scores = np.zeros(shape) if scores is None else scores
            scores[at] = part.scores
        if part.kept is not None:
            stays = np.ones(shape, np.bool_) if stays is None else stays
            stays[at] = part.kept
        if part.reasons is not None:
            reasons = np.full(shape, "filtered", object) if reasons is None else reasons
            reasons[at] = part.reasons
        for name, values in part.metrics.items():
            metrics.setdefault(name, np.full(shape[0], np.nan))[at] = values
    return ScoredGroups(scores=scores, kept=stays, reasons=reasons, metrics=metrics)


def says_all(cls: type, method: str) -> bool:
    """Return whether ``method`` still tells all that ``cls`` does.

    It does where ``cls`` writes it, or inherits it and changes nothing but the constructor: a class
    that changes something else may decide otherwise, unless it writes ``method`` anew.
    """
    for base in cls.__mro__:
        if method in vars(base):
            return True
        own = (name for name in vars(base) if name not in _CHANGE_NOTHING)
        # Dunders are written by dataclasses and typing, not by authors.
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
        scored, named = score(rewards, runs), {}
        for name, values in scored.metrics.items():
            named[f"group_advantages/{name}/mean"] = values + 0.0  # a sum has no negative zero
            named[f"group_advantages/{name}/max"] = values
            named[f"group_advantages/{name}/min"] = values
        return replace(scored, reasons=np.array(reason, object), metrics=named)

    return added
