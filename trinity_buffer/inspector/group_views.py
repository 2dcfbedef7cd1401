"""Groups: all runs of one task in one batch, with their rewards, advantages and fate."""

from __future__ import annotations

import heapq
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from trinity_buffer.errors import UnknownNameError
from trinity_buffer.identity import Key
from trinity_buffer.inspector.experience import EventWithSegment, events_with_segments, mean_of
from trinity_buffer.inspector.fates import Fate, fates
from trinity_buffer.inspector.source import Source, now
from trinity_buffer.limits import sizes
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.store import inspection, writer_queries
from trinity_buffer.store.rows import BatchRow, ExperienceRow, position_of, slot_of
from trinity_buffer.store.transaction import Transaction


@dataclass(frozen=True, slots=True)
class RunView:
    """One experience of a group.

    Attributes:
        advantage: mean over its tokens; of a value that is one number times the action mask, that
            number. None where there is no annotation.
        state: what became of it.
    """

    uid: str
    run: int
    step: int
    reward: float | None
    advantage: float | None
    policy_version: int | None
    length: int
    state: str


@dataclass(frozen=True, slots=True)
class GroupView:
    """One group.

    Attributes:
        rollouts: how many runs were planned; None: the batch was not.
        mean, deviation: of the rewards, each run taken once, without what came late or was refused
            at the door; the deviation is the sample's (n - 1).
        state: what became of its experiences, with how many where they differ.
        missing: planned runs that are not stored.
        newest: address of the experience that was recorded last, as an integer.
    """

    batch: Key
    task: Key
    rollouts: int | None
    mean: float | None
    deviation: float | None
    state: str
    missing: int
    runs: tuple[RunView, ...]
    newest: int = 0


class _Found(NamedTuple):
    """What one transaction saw: the set, keys of groups, their rows and batches, and fates."""

    chosen: str | None
    keys: list[tuple[str, str]]
    rows: list[ExperienceRow]
    batches: dict[str, BatchRow]
    fates: dict[int, list[Fate]]


class _Wanted(NamedTuple):
    """Which groups, and whose advantages of them; see `groups`."""

    annotation_set: str | None
    batch: Key | None
    named: Sequence[tuple[str, str]] | None


Order = Literal["newest", "abs-advantage", "reward", "deviation"]


async def groups(
    experiment: Experiment | Source,
    *,
    annotation_set: str | None = None,
    batch: Key | None = None,
    named: Sequence[tuple[str, str]] | None = None,
    order: Order = "newest",
    limit: int = 20,
    before: int | None = None,
) -> list[GroupView]:
    """Return the groups that come first in an order, the first one first.

    Args:
        annotation_set: whose advantages and decisions are shown; by default the first there is.
        batch: only groups of this batch.
        named: these groups, as (batch, task), and no others.
        order: the newest, or those with the greatest advantage (its size), mean reward or deviation
            of the rewards; of equal ones the newest, and last those without a value.
        limit: at most so many.
        before: only groups that were whole before this address: the last page's lowest ``newest``.

    Raises:
        UnknownNameError: no such annotation set.
        DamagedSegmentError: a checksum of the advantages does not hold.
    """
    source, wanted = now(experiment), _Wanted(annotation_set, batch, named)
    if order == "newest":
        return await _newest(source, wanted, limit, before)
    first: list[GroupView] = []
    while page := await _newest(source, wanted, sizes().groups_per_page, before):
        first = heapq.nlargest(limit, [*first, *page], key=lambda group: _rank(group, order))
        before = min(group.newest for group in page)
    return first


async def _newest(
    source: Source, wanted: _Wanted, limit: int, before: int | None
) -> list[GroupView]:
    def look(tx: Transaction) -> _Found:
        chosen = _chosen_set(tx, source, wanted.annotation_set)
        keys = _newest_keys(tx, source, wanted, limit, before)
        rows = inspection.members(tx, source.key, keys)
        batches = writer_queries.batches(tx, source.key, sorted({key for key, _ in keys}))
        return _Found(chosen, keys, rows, batches, fates(tx, source.key, rows))

    chosen, keys, rows, batches, found = await source.read(look)
    own = {
        a: next((f for f in some if f.annotation_set == chosen), None) for a, some in found.items()
    }
    noted = {
        position_of(fate.annotations[0].address): row.eid.uid
        for row in reversed(rows)  # of the rows of an event the first is named
        if (fate := own.get(row.address)) is not None and fate.annotations
    }
    events = await events_with_segments(source, noted, ["annotation"])
    members: dict[tuple[str, str], list[ExperienceRow]] = {key: [] for key in keys}
    for row in rows:
        members[str(row.eid.batch), str(row.eid.task)].append(row)
    return [_group(batches.get(key[0]), some, own, events) for key, some in members.items() if some]


def _newest_keys(
    tx: Transaction, source: Source, wanted: _Wanted, limit: int, before: int | None
) -> list[tuple[str, str]]:
    if wanted.batch is not None:
        return inspection.groups_of_batch(tx, source.key, str(wanted.batch), limit, before)
    if wanted.named is None:
        return inspection.newest_groups(tx, source.key, limit, before)
    newest = {  # of the rows of a group, which are ordered by address, the last one counts
        (str(row.eid.batch), str(row.eid.task)): row.address
        for row in inspection.members(tx, source.key, wanted.named)
    }
    keys = [key for key, address in newest.items() if before is None or address < before]
    return sorted(keys, key=newest.__getitem__, reverse=True)[:limit]


def _rank(group: GroupView, order: Order) -> float:
    if order == "abs-advantage":
        known = [abs(run.advantage) for run in group.runs if run.advantage is not None]
        return max(known, default=-1.0)
    value = group.mean if order == "reward" else group.deviation
    return float("-inf") if value is None else value


def _chosen_set(tx: Transaction, source: Source, wanted: str | None) -> str | None:
    consumers = writer_queries.consumers(tx, source.key)
    names = [row.name for row in consumers.values() if row.kind == "strategy"]
    if wanted is not None and wanted not in names:
        known = ", ".join(names) or "none"
        raise UnknownNameError(f"no annotation set {wanted!r} (there: {known})")
    return wanted or next(iter(names), None)


def _group(
    batch: BatchRow | None,
    rows: Sequence[ExperienceRow],
    fates_of: dict[int, Fate | None],
    events: dict[int, EventWithSegment],
) -> GroupView:
    runs: list[RunView] = []
    taken: list[RunView] = []  # those that strategies compare
    for row in sorted(rows, key=lambda row: (row.eid.run, row.eid.step, row.eid.suffix)):
        fate = fates_of[row.address]
        state = "recorded" if fate is None else str(fate)
        advantage = _advantage(fate, events)
        eid = row.eid
        run = RunView(
            eid.uid,
            eid.run,
            eid.step,
            row.reward,
            advantage,
            row.policy_version,
            row.length,
            state,
        )
        runs.append(run)
        if row.refused is None and not state.endswith(": late"):
            taken.append(run)
    mean, deviation = _moments(taken)
    rollouts = None if batch is None else batch.rollouts_per_group
    missing = 0
    if rollouts is not None:
        missing = len(set(range(rollouts)) - {run.run for run in runs})
    return GroupView(
        rows[0].eid.batch,
        rows[0].eid.task,
        rollouts,
        mean,
        deviation,
        _state([run.state for run in runs], missing),
        missing,
        tuple(runs),
        max(row.address for row in rows),
    )


def _moments(rows: Sequence[RunView]) -> tuple[float | None, float | None]:
    """Return mean and deviation of the rewards of a group, as its strategies take them.

    A row without a reward has that of the last row of its run, and each row of a run of ``k`` rows
    counts for ``1 / k``.
    """
    last = {row.run: row.reward for row in rows}
    runs: dict[int, list[float]] = {}
    for row in rows:
        reward = last[row.run] if row.reward is None else row.reward
        if reward is not None:
            runs.setdefault(row.run, []).append(reward)
    if not runs:
        return None, None
    if all(min(some) == max(some) for some in runs.values()):
        rewards = [some[0] for some in runs.values()]
        return statistics.fmean(rewards), statistics.stdev(rewards) if len(rewards) > 1 else None
    mean = statistics.fmean(map(statistics.fmean, runs.values()))
    if len(runs) == 1:
        return mean, None
    squares = sum(statistics.fmean((one - mean) ** 2 for one in some) for some in runs.values())
    return mean, math.sqrt(squares / (len(runs) - 1))


def _state(states: Sequence[str], missing: int) -> str:
    counted = Counter(states)
    told = [state if len(counted) == 1 else f"{n} {state}" for state, n in counted.items()]
    return "; ".join([*told, f"{missing} missing"] if missing else told)


def _advantage(fate: Fate | None, events: dict[int, EventWithSegment]) -> float | None:
    if fate is None or not fate.annotations:
        return None
    address = fate.annotations[0].address
    segment = events[position_of(address)].families.get("annotation")
    return None if segment is None else mean_of(segment, "advantages", slot_of(address))
