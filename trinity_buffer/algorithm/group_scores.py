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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from trinity_buffer.algorithm import arguments
from trinity_buffer.errors import InvalidArgumentError

Rewards = NDArray[np.float64]
Runs = NDArray[np.int64]
"""Number of the run of each row of a group, from 0 on."""
Over = Literal["runs", "rows"]
"""What counts once in the statistics of a group: a run, or each of its rows."""
SingleMember = Literal["raw", "zero"]
Unit = Literal["group", "batch"]

RELATIVE_FLOOR = 1e-7
"""Deviations below this share of the largest reward count as 0: seven rewards of 0.1 are equal.

About float32's resolution (1.2e-7), since rewards often come out of a float32 model.
"""


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


def first_rows(runs: Runs) -> Runs:
    """Return the first row of each run."""
    first = np.zeros(int(runs.max()) + 1, np.int64)
    # Written backwards: of several rows of a run, the first one wins.
    first[runs[::-1]] = np.arange(len(runs))[::-1]
    return first


class Statistics(NamedTuple):
    """Of groups ``(..., G)`` of one size: how many runs each has, means and variances ``(...)``."""

    size: int
    mean: Rewards
    variance: Rewards


def statistics(
    rewards: Sequence[float] | Rewards,
    weights: Rewards | None = None,
    *,
    ddof: int = 0,
    std_floor: float = RELATIVE_FLOOR,
) -> Statistics:
    """Return the statistics of each group of ``rewards`` ``(..., G)``, all of one size.

    The variance has the divisor ``n - ddof``. It is 0 if its root is at most ``std_floor`` times
    the largest absolute reward, and of a group that is no larger than ``ddof``.
    """
    values = np.asarray(rewards, np.float64)
    if weights is None:
        size, mean = values.shape[-1], np.asarray(values.mean(axis=-1))
    else:
        size = round(float(weights.reshape(-1, values.shape[-1])[0].sum()))
        mean = np.asarray((weights * values).sum(axis=-1) / size)
    if size <= max(ddof, 0):
        return Statistics(size, mean, np.zeros_like(mean))
    if weights is None:
        spread = np.var(values, axis=-1, ddof=ddof)
    else:
        centred = values - mean[..., np.newaxis]
        spread = (weights * centred * centred).sum(axis=-1) / (size - ddof)
    # Relative to the rewards: an absolute floor would be wrong for rewards of 1e-3 and of 1e3.
    negligible = std_floor * np.abs(values).max(axis=-1)
    return Statistics(size, mean, np.where(spread <= negligible * negligible, 0.0, spread))


def scaled(centred: Rewards, std: float | Rewards, epsilon: float) -> Rewards:
    """Return ``centred / (std + epsilon)``, zeros where ``std`` is 0.

    Rounding leaves differences of 1e-17 between equal rewards; with ``epsilon=0`` they would become
    scores of 1.
    """
    divisor = np.where(np.equal(std, 0.0), 0.0, std + epsilon)
    # Divided only where it is defined: np.where would still compute 0 / 0, and warn.
    return np.divide(centred, divisor, out=np.zeros_like(centred), where=divisor != 0.0)


def baseline(
    rewards: Sequence[float] | Rewards, kind: str, tau: float = 1.0, weights: Rewards | None = None
) -> Rewards:
    """Return OPMD's baseline of each group of ``rewards`` ``(..., G)``, shape ``(...)``.

    That is the mean, or ``tau log(mean(exp(r / tau)))`` (arXiv:2501.12599). 0 for a group of one,
    as the reference does.

    Raises:
        InvalidArgumentError: another ``kind``.
    """
    values = np.asarray(rewards, np.float64)
    size, mean, _ = statistics(values, weights)
    if size == 1:
        return np.zeros_like(mean)
    check_baseline(kind, tau)
    if kind == "mean":
        return mean
    # Weights enter as logarithms: they are added inside the sum of exponentials.
    exponents = values / tau if weights is None else values / tau + np.log(weights)
    # logaddexp is stable where exp(r / tau) would overflow.
    return np.asarray(tau * (np.logaddexp.reduce(exponents, axis=-1) - np.log(size)))


def check_baseline(kind: str, tau: float) -> None:
    """Raise unless ``kind`` and ``tau`` are a baseline.

    Raises:
        InvalidArgumentError: an unknown kind, or a temperature that is not positive.
    """
    arguments.one_of("opmd_baseline", kind, ("mean", "logavgexp"))
    arguments.require(tau > 0, "tau", tau, "be positive")


class Deviation(arguments.Configured):
    """Scores by the deviation of a group, for a class that says which.

    Attributes:
        epsilon, ddof, std_floor, single_member: see `DeviationOptions`.
    """

    epsilon: float
    ddof: int
    std_floor: float
    single_member: SingleMember = "raw"

    def moments(
        self, rewards: Sequence[float] | Rewards, weights: Rewards | None = None
    ) -> tuple[Rewards, Rewards]:
        """Return mean and deviation of each group of ``rewards`` ``(..., G)``, of shape ``(...)``.

        They are 0 and 1 for groups of one, as in the reference.
        """
        size, mean, variance = statistics(
            rewards, weights, ddof=self.ddof, std_floor=self.std_floor
        )
        if size == 1:
            return np.zeros_like(mean), np.ones_like(mean)
        return mean, np.sqrt(variance)

    def normalized(
        self, rewards: Rewards, mean: Rewards, std: Rewards, weights: Rewards | None = None
    ) -> Rewards:
        """Return ``(r - mean) / (std + epsilon)`` (arXiv:2402.03300, section 4.1.2)."""
        if self.single_member == "zero" and statistics(rewards, weights).size == 1:
            return np.zeros_like(rewards)
        return scaled(rewards - mean[..., np.newaxis], std[..., np.newaxis], self.epsilon)


@arguments.configured
class DeviationOptions(Deviation):
    """The options of a deviation, for a class that takes them beside arguments of its own.

    Args:
        epsilon: added to the deviation.
        ddof: 1 for the sample deviation, 0 for the population's.
        std_floor: deviations below this share of the largest reward are 0, and so are the scores.
        single_member: ``"raw"`` scores the reward of a group of one, ``"zero"`` scores nothing.
    """

    epsilon: float = arguments.checked(1e-6, arguments.NOT_NEGATIVE)
    _: KW_ONLY
    ddof: Literal[0, 1] = 1
    std_floor: float = arguments.checked(RELATIVE_FLOOR, arguments.NOT_NEGATIVE)
    single_member: SingleMember = "raw"


class NormalizedScores(DeviationOptions):
    """GRPO's scores of groups, for a class that may leave some of them out."""

    def score_groups(self, rewards: Rewards, weights: Rewards | None = None) -> ScoredGroups:
        """Return the normalized scores of groups ``[k, G]``."""
        mean, std = self.moments(rewards, weights)
        scores = self.normalized(rewards, mean, std, weights)
        return ScoredGroups(scores=scores, metrics={"reward_mean": mean, "reward_std": std})


@arguments.configured
class CountsOver:
    """The choice of what counts, for a class that takes it beside arguments of its own.

    Args:
        over: what counts once in the statistics of a group: ``"rows"``, as in the reference, or
            their ``"runs"``, which is the default of a run.
    """

    over: Over = field(default="rows", kw_only=True)


def likelihood_ranks(likelihoods: Sequence[float] | Rewards) -> Rewards:
    """Return each rank / n, the most likely member highest, the earlier of equals lower."""
    # Stable, so that equal likelihoods rank alike on every machine.
    order = np.argsort(np.asarray(likelihoods, np.float64), kind="stable")
    ranks = np.empty(len(order), dtype=np.float64)
    ranks[order] = np.arange(len(order))
    return ranks / max(len(order), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroups:
    """What becomes of ``k`` groups of ``G`` experiences each, or of ``n`` rows of ``k`` groups.

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

    def verdicts(self, rows: int) -> tuple[NDArray[np.bool_], NDArray[Any]]:
        """Return which of so many rows are kept, and why the others are rejected."""
        stays = np.ones(rows, np.bool_) if self.kept is None else self.kept
        return stays, np.broadcast_to("filtered" if self.reasons is None else self.reasons, rows)


class RewardScorer(Protocol):
    """From the finite rewards of whole groups to what becomes of their rows."""

    def __call__(self, rewards: Rewards, sizes: Runs, runs: Runs | None = None, /) -> ScoredGroups:
        """Return scores, kept and reasons ``[n]``; metrics ``[k]``, NaN of a group without rows.

        Args:
            rewards: of the rows of all groups, one group behind the other, ``[n]``.
            sizes: how many rows each group has, ``[k]``.
            runs: of each row a number that only the rows of one run of a group share, ``[n]``;
                None: each row is one.
        """


def _asked(score: Callable[..., ScoredGroups], rewards: Rewards) -> ScoredGroups:
    """Return the checked answer of ``score_groups`` for ``rewards`` ``[k, G]``.

    Raises:
        InvalidArgumentError: it is not a `ScoredGroups` of their shape.
    """
    answer: object = score(rewards)
    if not isinstance(answer, ScoredGroups):
        raise InvalidArgumentError(
            f"`score_groups` returned {type(answer).__name__}, it must return `ScoredGroups`, as "
            "in `ScoredGroups(scores=rewards)`"
        )
    shapes = {
        "scores": (answer.scores, rewards.shape),
        "kept": (answer.kept, rewards.shape),
        **{f"metric {name!r}": (of, rewards.shape[:1]) for name, of in answer.metrics.items()},
    }
    for what, (values, shape) in shapes.items():
        if values is not None and np.shape(values) != shape:
            raise InvalidArgumentError(
                f"`score_groups` returned {what} of shape {list(np.shape(values))}: it must have "
                f"{list(shape)}, as the rewards of so many groups (of so many experiences each)"
            )
    return answer


def scored_rows(
    score: Callable[..., ScoredGroups],
    over: Over,
    rewards: Rewards,
    sizes: Runs,
    runs: Runs | None = None,
    /,
) -> ScoredGroups:
    """Return the scores of groups of any sizes, those of one form in one call of ``score``.

    Over runs, where the rows of each run of a group have equal rewards, ``score`` is given one for
    the run, and what it says holds for all rows. Where they have rewards of their own, it is given
    all rows and their ``weights`` ``[k, G]``, 1 divided by the number of rows of the run; a
    ``score`` that takes no weights is given the mean of each run.

    Args:
        score: a ``score_groups``, which gets rewards ``[k, G]``.
        over: ``"rows"``: each row counts for a run.
        rewards, sizes, runs: as a `RewardScorer` gets them.
    """
    values, weights, columns = rewards, None, np.arange(len(rewards))
    stands, num_columns, num_runs = columns, sizes, sizes
    if runs is not None and over == "runs":
        group = np.repeat(np.arange(len(sizes)), sizes)
        runs = numbered(list(zip(group.tolist(), runs.tolist(), strict=True)))
        if runs is not None:
            first, rows_of_run = first_rows(runs), np.bincount(runs)
            # The first row of a run stands for all, unless they have rewards of their own.
            stands = first[runs]
            own = np.bincount(group, rewards != rewards[stands])[group] > 0
            # A score_groups of a user's own may take no weights.
            if "weights" in inspect.signature(score).parameters:
                stands, weights = np.where(own, columns, stands), 1.0 / rows_of_run[runs]
            else:
                of_runs = np.bincount(runs, rewards) / rows_of_run
                values = np.where(own, of_runs[runs], rewards)
            num_runs = np.bincount(group[first], minlength=len(sizes))
            columns = np.flatnonzero(stands == columns)
            num_columns = np.bincount(group[columns], minlength=len(sizes))
    starts = np.cumsum(num_columns) - num_columns
    of_rows, metrics = dict[str, Any](), dict[str, Rewards]()
    for number, of_runs in {*zip(num_columns.tolist(), num_runs.tolist(), strict=True)} - {(0, 0)}:
        which = np.flatnonzero((num_columns == number) & (num_runs == of_runs))
        at = columns[starts[which, np.newaxis] + np.arange(number)]
        ask = score
        if weights is not None and number > of_runs:
            ask = partial(score, weights=weights[at])
        scored = _asked(ask, values[at])
        for name, default in (("scores", 0.0), ("kept", True), ("reasons", "filtered")):
            answer = getattr(scored, name)
            if answer is not None:
                kind = object if name == "reasons" else type(default)
                of_rows.setdefault(name, np.full(len(rewards), default, kind))[at] = answer
        for name, numbers in scored.metrics.items():
            metrics.setdefault(name, np.full(len(sizes), np.nan))[which] = numbers
    if len(columns) < len(rewards):
        of_rows = {name: answer[stands] for name, answer in of_rows.items()}
    return ScoredGroups(**of_rows, metrics=metrics)


_CHANGE_NOTHING = frozenset({"reference_args", "_abc_impl"})


class WholeUnits:
    """What the consumer reads of a class that works on whole units of experiences.

    Class attributes:
        unit: what one call must see whole.
        families: the column families that are read from the store; the fields of the others are
            empty.
        needs: fields without which an experience cannot be used.
        over: what counts once in the statistics of a group: ``"runs"``, or each of their
            ``"rows"``. Of an instance that takes it as an argument, that.
        deciding: methods that decide too: a class that overrides one of them does not decide by
            ``score_groups`` alone.
    """

    unit: ClassVar[Unit] = "group"
    families: ClassVar[tuple[str, ...]] = ("light",)
    needs: ClassVar[tuple[str, ...]] = ("reward", "action_mask")
    over: Over = "rows"
    deciding: ClassVar[tuple[str, ...]] = ()

    def needs_of(self, exps: Sequence[Any]) -> Sequence[str]:
        """Return the fields without which a member of the group ``exps`` cannot be scored."""
        return self.needs

    @classmethod
    def unit_for(cls, **arguments: Any) -> Unit:
        """Return the unit that an instance with these constructor arguments needs."""
        return cls.unit

    @classmethod
    def families_for(cls, **arguments: Any) -> tuple[str, ...]:
        """Return the column families that an instance with these constructor arguments reads."""
        return cls.families

    def from_rewards(self) -> RewardScorer | None:
        """Return the scorer that needs rewards alone; None: the strategy needs experiences.

        It is the method ``score_groups`` of a class that looks at nothing else. A subclass that
        changes anything but the constructor may decide otherwise, and has to write its own.
        """
        score: Callable[..., ScoredGroups] | None = getattr(self, "score_groups", None)
        own = type(self)
        heirs = takewhile(lambda cls: "score_groups" not in vars(cls), own.__mro__)
        changed = {name for cls in heirs for name in vars(cls)} - _CHANGE_NOTHING
        base = next(cls for cls in own.__mro__ if "deciding" in vars(cls))
        overridden = (getattr(own, name) is not getattr(base, name) for name in self.deciding)
        # Dunders are written by dataclasses and typing, not by authors.
        dunders = (name.startswith("__") and name.endswith("__") for name in changed)
        inherited = all(dunders) and not any(overridden)
        enough = {"reward"} <= set(self.needs) <= {"reward", "action_mask"}
        if score is None or not (inherited and enough):
            return None
        return partial(scored_rows, score, self.over)


def as_added(
    score: RewardScorer, reason: str, rewards: Rewards, sizes: Runs, runs: Runs | None = None, /
) -> ScoredGroups:
    """Return the answer of ``score``, its metrics named as `gather_metrics` does.

    What is not kept is rejected for ``reason``.
    """
    scored, named = score(rewards, sizes, runs), {}
    for name, values in scored.metrics.items():
        named[f"group_advantages/{name}/mean"] = values + 0.0  # a sum has no negative zero
        named[f"group_advantages/{name}/max"] = values
        named[f"group_advantages/{name}/min"] = values
    return replace(scored, reasons=np.array(reason, object), metrics=named)
