"""Scores whole pages of groups by their rewards: columns of events in, one number per row out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trinity_buffer.algorithm.group_scores import Over, RewardScorer, ScoredGroups, asked
from trinity_buffer.events import ExperiencesRecorded
from trinity_buffer.pipeline.annotate.grouping import Group
from trinity_buffer.store.rows import MAX_ROWS_PER_EVENT, SLOT_BITS
from trinity_buffer.writer import invalid

Integers = NDArray[np.int64]
Numbers = NDArray[np.float64]

_NOT_FINITE = invalid("advantages", "returns")


@dataclass(frozen=True, slots=True)
class RewardTable:
    """The columns that reward strategies read; rows are ordered by group, run and step.

    Attributes:
        addresses: of the experiences, ``[n]``.
        group: the number of each row's group, ascending, ``[n]``.
        rewards: NaN for a missing reward, ``[n]``.
        runs: the number of each row's run, equal for rows of one run of one group, ``[n]``.
        tokens: how many the action mask covers, ``[n]``.
        trained: how many it selects, ``[n]``.
    """

    addresses: Integers
    group: Integers
    rewards: Numbers
    runs: Integers
    tokens: Integers
    trained: Integers


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """The verdict on each row of a table.

    Attributes:
        addresses: addresses of the rows that stay, in the order of the table.
        groups: group number of each.
        scores: factor of each row's action mask; None: nothing was computed.
        reasons: address -> why it is rejected.
        metrics: metrics of each group.
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
        values: Iterable[Any] = chain.from_iterable(getattr(each, name) for each in columns)
        array: NDArray[Any] = np.array(list(values), dtype)[rows]
        return array

    # Batch and task of one group read alike as text; 7 and "7" still sort apart, as in `sort_key`.
    run = column("run", np.int64)
    by = [column("suffix", np.str_), column("step", np.int64), run]
    texts = [[isinstance(key, str) for key in column(name, object)] for name in ("task", "batch")]
    order = np.lexsort([*by, *map(np.array, texts), group])
    members = addresses[order]
    rewards = column("reward", np.float64)[order]
    if assigned is not None:
        values = [assigned.get(address, np.nan) for address in members.tolist()]
        rewards = np.array(values, np.float64)
    tokens, trained = (column(n, np.int64)[order] for n in ("response_length", "trained_tokens"))
    return RewardTable(members, group, rewards, run[order], tokens, trained)


def verdicts_of(
    table: RewardTable, num_groups: int, score: RewardScorer, over: Over = "rows"
) -> ScoredRows:
    """Score all groups of a table, those of one size at a time, and return the verdicts.

    Rows without a finite reward are rejected as ``invalid`` before scoring, rows without a finite
    score after it. Over runs, a row without a reward takes that of the last row of its run.
    """
    runs = _runs_of(table) if over == "runs" else None
    rewards = table.rewards if runs is None else _shared(table.rewards, runs)
    usable = np.isfinite(rewards)
    reasons = dict.fromkeys(table.addresses[~usable].tolist(), invalid("reward"))
    at = np.flatnonzero(usable)
    sizes = np.bincount(table.group[at], minlength=num_groups)
    starts = np.cumsum(sizes) - sizes
    scores: Numbers | None = None
    is_kept = usable.copy()
    why = np.full(len(usable), "filtered", object)
    metrics: list[dict[str, float]] = [{} for _ in range(num_groups)]
    # Not np.unique, whose first call imports numpy.ma: 8 ms of the first group.
    for size in np.flatnonzero(np.bincount(sizes[sizes > 0])).tolist():
        which = np.flatnonzero(sizes == size)
        rows = at[starts[which, np.newaxis] + np.arange(size)]
        scored = asked(score, rewards[rows], None if runs is None else _numbered(runs[rows]))
        if scored.scores is not None:
            scores = np.zeros(len(usable)) if scores is None else scores
            scores[rows] = scored.scores
        if scored.kept is not None:
            is_kept[rows] = scored.kept
        if scored.reasons is not None:
            why[rows] = scored.reasons
        for number, group_metrics in zip(
            which.tolist(), _metrics_of(scored, len(which)), strict=True
        ):
            metrics[number] = group_metrics
    left = usable & ~is_kept
    reasons |= zip(table.addresses[left].tolist(), why[left].tolist(), strict=True)
    weights = None if scores is None else _weights(scores, table)
    if weights is not None:
        broken = is_kept & ~np.isfinite(weights)
        reasons |= dict.fromkeys(table.addresses[broken].tolist(), _NOT_FINITE)
        is_kept &= ~broken
        weights = weights[is_kept]
    addresses, groups = table.addresses[is_kept].tolist(), table.group[is_kept].tolist()
    return ScoredRows(addresses, groups, weights, reasons, metrics)


def _runs_of(table: RewardTable) -> Integers | None:
    """Return the number of each row's run in the table; None if each row is one."""
    wide = int(table.runs.max(initial=0)) + 1
    keys = table.group * wide + table.runs
    order = np.argsort(keys, kind="stable")
    begins = np.diff(keys[order], prepend=-1) != 0
    if begins.all():
        return None
    numbers = np.empty_like(keys)
    numbers[order] = np.cumsum(begins) - 1
    return numbers


def _shared(rewards: Numbers, runs: Integers) -> Numbers:
    """Return the rewards; a row without one takes that of the last row of its run."""
    lacking = np.isnan(rewards)
    if not lacking.any():
        return rewards
    last = np.zeros(int(runs.max()) + 1)
    last[runs] = rewards  # NumPy keeps the last of repeated indices
    return np.where(lacking, last[runs], rewards)


def _numbered(runs: Integers) -> Integers | None:
    """Return runs ``[k, G]`` from 0 on in each group, by first appearance; None if all differ."""
    size = runs.shape[1]
    order = np.argsort(runs, axis=1, kind="stable")
    begins = np.diff(np.take_along_axis(runs, order, axis=1), axis=1, prepend=-1) != 0
    if begins.all():
        return None
    places = np.empty_like(runs)
    np.put_along_axis(places, order, np.cumsum(begins, axis=1) - 1, axis=1)
    if bool((np.diff(places, axis=1) >= 0).all()):
        return places
    first = np.full(runs.shape, size)
    np.minimum.at(first, (np.arange(len(runs))[:, np.newaxis], places), np.arange(size))
    rank = np.argsort(np.argsort(first, axis=1, kind="stable"), axis=1, kind="stable")
    numbers: Integers = np.take_along_axis(rank, places, axis=1)
    return numbers


def _weights(scores: Numbers, table: RewardTable) -> NDArray[np.float32]:
    """Return the factor of each row's mask; a signed zero if the mask selects nothing."""
    with np.errstate(over="ignore"):
        weights = scores.astype(np.float32)
    nothing = (table.trained == 0) & np.isfinite(weights)
    weights[nothing] = np.copysign(np.float32(0), weights[nothing])
    weights[table.tokens == 0] = 0.0
    return weights


def _metrics_of(scored: ScoredGroups, number: int) -> list[dict[str, float]]:
    """Return the finite metrics of each of ``number`` groups."""
    columns = [np.asarray(values, np.float64) for values in scored.metrics.values()]
    finite = all(bool(np.isfinite(values).all()) for values in columns)
    rows = zip(*(values.tolist() for values in columns), strict=True) if columns else [()] * number
    metrics = [dict(zip(scored.metrics, row, strict=True)) for row in rows]
    if finite:
        return metrics
    return [
        {name: v for name, v in group_metrics.items() if np.isfinite(v)}
        for group_metrics in metrics
    ]
