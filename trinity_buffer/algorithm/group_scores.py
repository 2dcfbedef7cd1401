"""Arithmetic on the rewards of one group: baselines, deviations, scores; numbers in and out.

Strategies (a list of experiences) and trainer-side advantages (a batch of tensors) both call these,
so that the two doors cannot disagree. Everything is float64: the rewards of a group are few, and a
float32 mean of equal rewards is not equal to them.

The unit of statistics is the run. Where the rows of each run have equal rewards, functions get one
number for a run; where they have rewards of their own, one for each row, with ``weights``: 1
divided by the number of rows of its run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

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
    found = [numbers.setdefault(name, len(numbers)) for name in names]
    return None if len(numbers) == len(found) else np.array(found, np.int64)


def first_rows(runs: Runs) -> Runs:
    """Return the first row of each run."""
    first = np.zeros(int(runs.max()) + 1, np.int64)
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
        found = np.var(rewards, axis=-1, ddof=ddof)
    else:
        centred = rewards - means(rewards, weights)[..., np.newaxis]
        found = (weights * centred * centred).sum(axis=-1) / (size - ddof)
    negligible = std_floor * np.abs(rewards).max(axis=-1)
    return np.where(found <= negligible * negligible, 0.0, found)


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
    exponents = rewards / tau if weights is None else rewards / tau + np.log(weights)
    return np.asarray(tau * (np.logaddexp.reduce(exponents, axis=-1) - np.log(size)))


def check_baseline(kind: str, tau: float) -> None:
    """Return if ``kind`` and ``tau`` are a baseline.

    Raises:
        InvalidArgumentError: an unknown kind, or a temperature that is not positive.
    """
    one_of("opmd_baseline", kind, ("mean", "logavgexp"))
    if not tau > 0:
        raise InvalidArgumentError(f"tau must be positive, not {tau!r}")


def check_scale(epsilon: float, ddof: int, std_floor: float, single_member: str) -> None:
    """Return if the four choices of a deviation are sound.

    Raises:
        InvalidArgumentError: names the one that is not.
    """
    if not epsilon >= 0:
        raise InvalidArgumentError(f"epsilon must not be negative, it is {epsilon!r}")
    if not std_floor >= 0:
        raise InvalidArgumentError(f"std_floor must not be negative, it is {std_floor!r}")
    one_of("ddof", ddof, (0, 1))
    one_of("single_member", single_member, ("raw", "zero"))


def check_over(over: str) -> Over:
    """Return ``over``.

    Raises:
        InvalidArgumentError: it is neither ``"runs"`` nor ``"rows"``.
    """
    one_of("over", over, ("runs", "rows"))
    return "runs" if over == "runs" else "rows"


def likelihood_ranks(likelihoods: Sequence[float]) -> Rewards:
    """Return each rank / n, the most likely member highest, the earlier of equals lower."""
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
