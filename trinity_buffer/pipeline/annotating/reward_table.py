"""Whole pages of groups, scored by their rewards: columns of events in, a number per row out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trinity_buffer.algorithm.reward_scores import RewardScorer, ScoredGroups, asked
from trinity_buffer.events import ExperiencesRecorded
from trinity_buffer.pipeline.annotating.grouping import Group
from trinity_buffer.rejections import invalid
from trinity_buffer.store.rows import MAX_ROWS_PER_EVENT, SLOT_BITS

Integers = NDArray[np.int64]
Numbers = NDArray[np.float64]

_NOT_FINITE = invalid("advantages", "returns")


@dataclass(frozen=True, slots=True)
class RewardTable:
    """What strategies see of some groups: rows in the order of groups, then of runs and steps.

    Attributes:
        addresses: of the experiences, ``[n]``.
        group: the number of each row's group, ascending, ``[n]``.
        rewards: NaN where there is none, ``[n]``.
        tokens: how many the action mask covers, ``[n]``.
        trained: how many it selects, ``[n]``.
    """

    addresses: Integers
    group: Integers
    rewards: Numbers
    tokens: Integers
    trained: Integers


@dataclass(frozen=True, slots=True)
class RowVerdicts:
    """What became of the rows of a table.

    Attributes:
        addresses: of those that are kept, in the order of the table.
        groups: number of the group of each.
        scores: of each, what its action mask is multiplied by; None: nothing was computed.
        reasons: address -> why it is rejected.
        metrics: of each group.
    """

    addresses: list[int]
    groups: list[int]
    scores: NDArray[np.float32] | None
    reasons: dict[int, str]
    metrics: list[dict[str, float]]


def table_of(
    groups: Sequence[Group],
    events: Mapping[int, ExperiencesRecorded],
    assigned: Mapping[int, float] | None = None,
) -> RewardTable:
    """Return the members of ``groups`` as a table.

    Args:
        groups: each with members.
        events: position -> what was recorded there, for all members.
        assigned: address -> reward, in place of the recorded ones.
    """
    sizes = [len(group.members) for group in groups]
    addresses = np.fromiter(chain.from_iterable(g.members for g in groups), np.int64, sum(sizes))
    group = np.repeat(np.arange(len(groups)), sizes)
    positions = np.array(sorted(events), np.int64)
    columns = [events[position].columns for position in positions.tolist()]
    starts = np.cumsum([0, *map(len, columns)])
    event = np.searchsorted(positions, addresses >> SLOT_BITS)
    rows = starts[event] + (addresses & (MAX_ROWS_PER_EVENT - 1))

    def column(name: str, dtype: Any) -> NDArray[Any]:
        some: Iterable[Any] = chain.from_iterable(getattr(each, name) for each in columns)
        found: NDArray[Any] = np.array(list(some), dtype)[rows]
        return found

    # Within a group batch and task read alike: what is left is whether they are numbers.
    by = [column("suffix", np.str_), column("step", np.int64), column("run", np.int64)]
    texts = [[isinstance(key, str) for key in column(name, object)] for name in ("task", "batch")]
    order = np.lexsort([*by, *map(np.array, texts), group])
    found = addresses[order]
    rewards = column("reward", np.float64)[order]
    if assigned is not None:
        given = [assigned.get(address, np.nan) for address in found.tolist()]
        rewards = np.array(given, np.float64)
    tokens, trained = (column(n, np.int64)[order] for n in ("response_length", "trained_tokens"))
    return RewardTable(found, group, rewards, tokens, trained)


def verdicts_of(table: RewardTable, num_groups: int, score: RewardScorer) -> RowVerdicts:
    """Return what ``score`` makes of all groups of a table: those of one size at a time.

    Rows without a finite reward are rejected as ``invalid`` before, rows without a finite score
    behind it.
    """
    usable = np.isfinite(table.rewards)
    reasons = dict.fromkeys(table.addresses[~usable].tolist(), invalid("reward"))
    at = np.flatnonzero(usable)
    sizes = np.bincount(table.group[at], minlength=num_groups)
    starts = np.cumsum(sizes) - sizes
    scores: Numbers | None = None
    kept = usable.copy()
    why = np.full(len(usable), "filtered", object)
    metrics: list[dict[str, float]] = [{} for _ in range(num_groups)]
    # Not np.unique, whose first call imports numpy.ma: 8 ms of the first group.
    for size in np.flatnonzero(np.bincount(sizes[sizes > 0])).tolist():
        which = np.flatnonzero(sizes == size)
        rows = at[starts[which, np.newaxis] + np.arange(size)]
        found = asked(score, table.rewards[rows])
        if found.scores is not None:
            scores = np.zeros(len(usable)) if scores is None else scores
            scores[rows] = found.scores
        if found.kept is not None:
            kept[rows] = found.kept
        if found.reasons is not None:
            why[rows] = found.reasons
        for number, said in zip(which.tolist(), _metrics_of(found, len(which)), strict=True):
            metrics[number] = said
    left = usable & ~kept
    reasons |= zip(table.addresses[left].tolist(), why[left].tolist(), strict=True)
    weights = None if scores is None else _weights(scores, table)
    if weights is not None:
        broken = kept & ~np.isfinite(weights)
        reasons |= dict.fromkeys(table.addresses[broken].tolist(), _NOT_FINITE)
        kept &= ~broken
        weights = weights[kept]
    addresses, groups = table.addresses[kept].tolist(), table.group[kept].tolist()
    return RowVerdicts(addresses, groups, weights, reasons, metrics)


def _weights(scores: Numbers, table: RewardTable) -> NDArray[np.float32]:
    """Return what each row's mask is multiplied by: of one that selects nothing a zero."""
    with np.errstate(over="ignore"):
        found = scores.astype(np.float32)
    nothing = (table.trained == 0) & np.isfinite(found)
    found[nothing] = np.copysign(np.float32(0), found[nothing])
    found[table.tokens == 0] = 0.0
    return found


def _metrics_of(found: ScoredGroups, number: int) -> list[dict[str, float]]:
    """Return the metrics of each of so many groups, without what is not finite."""
    columns = [np.asarray(values, np.float64) for values in found.metrics.values()]
    finite = all(bool(np.isfinite(values).all()) for values in columns)
    rows = zip(*(values.tolist() for values in columns), strict=True) if columns else [()] * number
    said = [dict(zip(found.metrics, row, strict=True)) for row in rows]
    if finite:
        return said
    return [{name: v for name, v in one.items() if np.isfinite(v)} for one in said]
