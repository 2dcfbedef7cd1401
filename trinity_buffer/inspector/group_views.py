"""Groups: all runs of one task in one batch, with their rewards, advantages and fate."""

from __future__ import annotations

import heapq
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from statistics import fmean
from typing import Literal

from trinity_buffer.identity import Key
from trinity_buffer.inspector.experience import EventWithSegment, events_with_segments, mean_of
from trinity_buffer.inspector.fates import Fate, fates
from trinity_buffer.inspector.source import Source, chosen_set, now
from trinity_buffer.limits import sizes
from trinity_buffer.pipeline.store import Experiment
from trinity_buffer.store import inspection, writer_queries
from trinity_buffer.store.rows import BatchRow, ExperienceRow, position_of, slot_of
from trinity_buffer.store.transaction import Transaction


@dataclass(frozen=True, slots=True)
class RunView:
    """One experience of a group.

    Attributes:
        reward: as it was recorded; of a set that takes those of a scoring, as that has it now.
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
        annotation_set: whose advantages and decisions are shown; by default that of the trainer
            furthest ahead, else the first there is.
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
    source = now(experiment)

    async def newest(limit: int, before: int | None) -> list[GroupView]:
        def newest_keys(tx: Transaction) -> list[tuple[str, str]]:
            if batch is not None:
                return inspection.groups_of_batch(tx, source.key, str(batch), limit, before)
            if named is None:
                return inspection.newest_groups(tx, source.key, limit, before)
            newest = {  # of the rows of a group, which are ordered by address, the last one counts
                (str(row.eid.batch), str(row.eid.task)): row.address
                for row in inspection.members(tx, source.key, named)
            }
            keys = [key for key, address in newest.items() if before is None or address < before]
            return sorted(keys, key=newest.__getitem__, reverse=True)[:limit]

        def read(tx: Transaction) -> list[tuple[BatchRow | None, _Members]]:
            consumers = writer_queries.consumers(tx, source.key)
            chosen = chosen_set(consumers, annotation_set)
            scoring = consumers[chosen].config.get("rewards") if chosen in consumers else None
            groups: dict[tuple[str, str], _Members] = {key: [] for key in newest_keys(tx)}
            rows = inspection.members(tx, source.key, list(groups))
            if scoring is not None:  # whose rewards the set compared, in place of the recorded ones
                wanted = [row.address for row in rows]
                given = writer_queries.assigned_rewards(tx, source.key, scoring, wanted)
                rows = [row._replace(reward=given.get(row.address)) for row in rows]
            decided = fates(tx, source.key, rows)
            for row in rows:
                fate = next((f for f in decided[row.address] if f.annotation_set == chosen), None)
                groups[str(row.eid.batch), str(row.eid.task)].append((row, fate))
            batches = writer_queries.batches(tx, source.key, sorted({key for key, _ in groups}))
            return [(batches.get(key), members) for (key, _), members in groups.items()]

        groups = await source.read(read)
        known = [*chain.from_iterable(members for _, members in groups)]
        noted = {  # an error about the event names the first of its rows
            position_of(fate.first): row.eid.uid
            for row, fate in reversed(known)
            if fate is not None and fate.first is not None
        }
        events = await events_with_segments(source, noted, ["annotation"])
        return [_group(planned, members, events) for planned, members in groups]

    if order == "newest":
        return await newest(limit, before)
    first: list[GroupView] = []
    # Any group may have the greatest value, so all pages are read; few groups are held.
    while page := await newest(sizes.groups_per_page, before):
        first = heapq.nlargest(limit, [*first, *page], key=lambda group: _rank(group, order))
        before = min(group.newest for group in page)
    return first


_Members = list[tuple[ExperienceRow, Fate | None]]
"""Experiences of a group, and what became of each in the set that is asked about."""


def _rank(group: GroupView, order: Order) -> float:
    if order == "abs-advantage":
        known = [abs(run.advantage) for run in group.runs if run.advantage is not None]
        return max(known, default=-1.0)
    value = group.mean if order == "reward" else group.deviation
    return float("-inf") if value is None else value


def _group(batch: BatchRow | None, rows: _Members, notes: dict[int, EventWithSegment]) -> GroupView:
    runs: list[RunView] = []
    of_run = attrgetter("eid.run", "eid.step", "eid.suffix")
    for row, fate in sorted(rows, key=lambda member: of_run(member[0])):
        state, advantage = "recorded" if fate is None else str(fate), None
        if fate is not None and fate.first is not None:
            segment = notes[position_of(fate.first)].segment
            advantage = mean_of(segment, "advantages", slot_of(fate.first))
        shown = (row.eid.uid, row.eid.run, row.eid.step, row.reward, advantage)
        runs.append(RunView(*shown, row.policy_version, row.num_tokens, state))
    # Strategies decide without what was refused or came late, so the moments do too.
    refused = {row.eid.uid for row, _ in rows if row.refused is not None}
    compared = [r for r in runs if r.uid not in refused and not r.state.endswith(": late")]
    rollouts = None if batch is None else batch.rollouts_per_group
    missing = len(set(range(rollouts or 0)) - {run.run for run in runs})
    states = Counter(run.state for run in runs)
    parts = [state if len(states) == 1 else f"{n} {state}" for state, n in states.items()]
    state = "; ".join([*parts, f"{missing} missing"] if missing else parts)
    eid, newest = rows[0][0].eid, max(row.address for row, _ in rows)
    planned = (eid.batch, eid.task, rollouts)
    return GroupView(*planned, *_moments(compared), state, missing, tuple(runs), newest)


def _moments(rows: Sequence[RunView]) -> tuple[float | None, float | None]:
    """Return mean and deviation of the rewards of a group, as its strategies take them.

    A row without a reward has that of the last row of its run, and each row of a run of ``k`` rows
    counts for ``1 / k``.
    """
    runs = known_rewards((row.run, row.reward) for row in rows)
    if not runs:
        return None, None
    if all(min(own) == max(own) for own in runs):
        # No mean of equal floats, which could differ from them in the last bit.
        rewards = [own[0] for own in runs]
        return fmean(rewards), statistics.stdev(rewards) if len(rewards) > 1 else None
    mean = fmean(map(fmean, runs))
    if len(runs) == 1:
        return mean, None
    # Each row of a run of k rows counts 1 / k, and the sample has n - 1 degrees of freedom.
    squares = sum(fmean((reward - mean) ** 2 for reward in own) for own in runs)
    return mean, math.sqrt(squares / (len(runs) - 1))


def known_rewards(rows: Iterable[tuple[Hashable, float | None]]) -> list[list[float]]:
    """Return the rewards of each run that has any, from (run, reward) of rows in order of steps.

    A row without a reward has that of the last row of its run.
    """
    runs = defaultdict[Hashable, list[float | None]](list)
    for run, reward in rows:
        runs[run].append(reward)
    filled = ([own[-1] if reward is None else reward for reward in own] for own in runs.values())
    known = ([reward for reward in own if reward is not None] for own in filled)
    return [own for own in known if own]
