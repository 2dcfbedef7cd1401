"""What differs: two annotation sets over the same rollouts, or two runs."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from trinity_buffer.inspector.experience import Damage, Unreadable, means_of, readable_events
from trinity_buffer.inspector.source import Source, chosen_set
from trinity_buffer.inspector.step_lines import StepLine, steps
from trinity_buffer.limits import sizes
from trinity_buffer.pipeline.verify.projections import Progress, no_progress
from trinity_buffer.store import writer_queries
from trinity_buffer.store.row_numbers import Decisions, Integers, addresses, decisions
from trinity_buffer.store.rows import MAX_ROWS_PER_EVENT, SLOT_BITS, position_of
from trinity_buffer.store.transaction import Transaction

Numbers = npt.NDArray[Any]

ROUNDING = 1e-12
"""So far two float64 numbers of the size of 1 may lie apart by rounding alone, and one from 0."""


@dataclass(frozen=True, slots=True)
class Differing:
    """One experience that two sets treat differently; advantages are means over its tokens."""

    uid: str
    first: str
    second: str
    first_advantage: float | None
    second_advantage: float | None

    @property
    def by(self) -> float:
        """How far the advantages lie apart; infinite where only one set has any."""
        if self.first_advantage is None or self.second_advantage is None:
            return 0.0 if self.first_advantage == self.second_advantage else float("inf")
        return abs(self.first_advantage - self.second_advantage)


@dataclass(slots=True)
class SetDifference:
    """Two annotation sets side by side.

    Attributes:
        states: "state in the first / state in the second" -> how many experiences.
        both: with an advantage in both sets; ``equal`` of them have the same one.
        opposite: with advantages of opposite sign.
        greatest, mean: of the difference, over ``both``.
        rows: those that differ most.
        unreadable: those of which an annotation cannot be read; they have a state alone.
    """

    first: str
    second: str
    experiences: int = 0
    states: Counter[str] = field(default_factory=Counter)
    both: int = 0
    equal: int = 0
    opposite: int = 0
    greatest: float = 0.0
    total: float = 0.0
    rows: list[Differing] = field(default_factory=list)
    unreadable: list[Unreadable] = field(default_factory=list)

    @property
    def mean(self) -> float | None:
        """Mean difference of the advantages; None where no experience has two."""
        return self.total / self.both if self.both else None


@dataclass(frozen=True, slots=True)
class RunDifference:
    """Two runs side by side.

    Attributes:
        config: key -> [value in the first, value in the second], where they differ.
        numbers: what is counted of both -> [first, second].
        steps: gradient steps that both have -> metric -> [first, second].
    """

    first: str
    second: str
    config: Mapping[str, Sequence[Any]]
    numbers: Mapping[str, Sequence[Any]]
    steps: Mapping[int, Mapping[str, Sequence[Any]]]


async def compare_sets(
    source: Source, first: str, second: str, *, limit: int = 20, progress: Progress = no_progress
) -> SetDifference:
    """Return how two annotation sets differ over the same rollouts.

    Args:
        first, second: names of the sets.
        limit: how many of the rows that differ most are kept.
        progress: called with the position that was reached, and the last one.

    Raises:
        UnknownNameError: no such annotation set.
    """
    difference, head = SetDifference(first, second), await source.head()
    async for so_far, position in comparing(source, first, second, limit=limit):
        difference = so_far
        progress("diff", position, head)
    return difference


async def comparing(
    source: Source, first: str, second: str, *, limit: int = 20
) -> AsyncIterator[tuple[SetDifference, int]]:
    """Yield what was found so far and the position that was reached, page by page.

    Raises:
        UnknownNameError: no such annotation set.
    """
    consumers = await source.read(writer_queries.consumers, source.key)
    names = dict.fromkeys(chosen_set(consumers, name) for name in (first, second))
    sets = [consumers[name] for name in names if name is not None]
    difference, after = SetDifference(first, second), -1
    most = 4 * sizes.rows_per_page  # or the events of a set would be read again and again

    def look(tx: Transaction) -> tuple[Integers, list[Decisions]]:
        wanted = addresses(tx, source.key, after=after, limit=most)
        return wanted, decisions(tx, source.key, sets, wanted) if len(wanted) else []

    while True:
        wanted, decided = await source.read(look)
        if not decided:
            return
        sides = [await _side(source, decision) for decision in decided]
        a, b = sides[0], sides[-1]
        difference.experiences += len(wanted)
        for pair, count in Counter(zip(a.states.tolist(), b.states.tolist(), strict=True)).items():
            difference.states[" / ".join(pair)] += count
        # Differences and signs are of those that have an advantage in both sets.
        both, by = a.known & b.known, np.abs(a.advantages - b.advantages)
        # Two sets sum the same numbers in another order: what rounding leaves is no difference.
        by[by <= ROUNDING * np.fmax(1.0, np.fmax(np.abs(a.advantages), np.abs(b.advantages)))] = 0.0
        difference.both += int(both.sum())
        difference.equal += int((by == 0)[both].sum())
        difference.opposite += int((a.advantages * b.advantages < 0)[both & (by > 0)].sum())
        difference.total += float(by[both].sum())
        difference.greatest = float(np.fmax.reduce(by[both], initial=difference.greatest))
        # An advantage in one set alone differs most of all, and is not part of the mean.
        by[a.known != b.known] = np.inf
        damaged = np.isin(a.positions, [*a.damaged]) | np.isin(b.positions, [*b.damaged])
        # Rows of this page that could not enter the list are never built.
        least = difference.rows[-1].by if 0 < limit == len(difference.rows) else 0.0
        differing = np.flatnonzero((by > least) & ~damaged)
        # Stable, so that of equal ones the first in the log is shown.
        differing = differing[np.argsort(-by[differing], kind="stable")[:limit]]
        shown = [*differing.tolist(), *np.flatnonzero(damaged).tolist()]
        named = wanted[shown].tolist()
        rows = await source.read(writer_queries.experience_rows, source.key, named)
        uids = {row.address: row.eid.uid for row in rows}
        for at, uid in ((at, uids[int(wanted[at])]) for at in shown):
            if damaged[at]:
                positions = [(int(side.positions[at]), side.damaged) for side in (a, b)]
                difference.unreadable += [
                    Unreadable(uid, position, str(broken[position]))
                    for position, broken in positions
                    if position in broken
                ]
            else:
                (state, advantage), (other, other_advantage) = a.of(at), b.of(at)
                difference.rows.append(Differing(uid, state, other, advantage, other_advantage))
        difference.rows = heapq.nlargest(limit, difference.rows, key=lambda row: row.by)
        after = int(wanted[-1])
        yield difference, position_of(after)


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """What one set made of some experiences.

    Attributes:
        advantages: mean over the tokens of each, where it is ``known``.
        positions: of the events that annotated them, 0 where none did.
        damaged: those events that cannot be read.
    """

    states: Numbers
    advantages: Numbers
    known: Numbers
    positions: Integers
    damaged: Mapping[int, Damage]

    def of(self, at: int) -> tuple[str, float | None]:
        """Return state and advantage of one."""
        return self.states[at], float(self.advantages[at]) if self.known[at] else None


async def _side(source: Source, decided: Decisions) -> _Side:
    positions, slots = decided.notes >> SLOT_BITS, decided.notes & (MAX_ROWS_PER_EVENT - 1)
    advantages, known = np.zeros(len(slots)), np.zeros(len(slots), bool)
    noted = np.unique(positions[positions > 0]).tolist()
    damaged: dict[int, Damage] = {}
    size = sizes.segments_per_load
    for start in range(0, len(noted), size):
        events, broken = await readable_events(source, noted[start : start + size], ["annotation"])
        damaged |= broken
        for position, event in events.items():
            if event.segment.rows:
                own = np.flatnonzero(positions == position)
                means, there = means_of(event.segment, "advantages")
                # Else the sign of what rounding left of 0 would count as an opposite advantage.
                means[np.abs(means) <= ROUNDING] = 0.0
                advantages[own], known[own] = means[slots[own]], there[slots[own]]
    return _Side(decided.states, advantages, known, positions, damaged)


async def compare_runs(
    first: Source, second: Source, *, limit: int | None = None, progress: Progress = no_progress
) -> RunDifference:
    """Return how two runs differ: configuration, counts, and the steps that both have.

    Args:
        first, second: the experiments; they may be of different stores.
        limit: only so many of the last steps of each count; None: all do.
        progress: called, for each run, with the step that was reached, and the last one.
    """
    sides = (first, second)
    configs = [await side.read(writer_queries.config_of, side.key) for side in sides]
    a, b = ({} if config is None else _flat(config[0]) for config in configs)
    config = {k: [a.get(k), b.get(k)] for k in sorted({*a, *b}) if a.get(k) != b.get(k)}
    runs = [await _last_steps(side, limit, progress) for side in sides]
    lines = [run.values() for run in runs]
    numbers: dict[str, list[Any]] = {
        "steps": [*map(len, runs)],
        "committed": [sum(line.committed_at is not None for line in own) for own in lines],
        "rows": [sum(line.rows for line in own) for own in lines],
        "tokens": [sum(line.tokens for line in own) for own in lines],
    }
    for name in ("reward", "staleness", "seconds"):
        values = ([getattr(line, name) for line in own] for own in lines)
        known = ([value for value in own if value is not None] for own in values)
        numbers[name] = [fmean(own) if own else None for own in known]
    both = sorted(runs[0].keys() & runs[1].keys())
    steps_of_both = {step: _side_by_side(runs[0][step], runs[1][step]) for step in both}
    return RunDifference(first.name, second.name, config, numbers, steps_of_both)


async def _last_steps(source: Source, limit: int | None, progress: Progress) -> dict[int, StepLine]:
    """Return the steps of a run, or the last ones; those that are handed out meanwhile are left."""
    consumers = (await source.read(writer_queries.consumers, source.key)).values()
    last = max((row.leased_step for row in consumers if row.kind == "trainer"), default=0)
    after = 0 if limit is None else max(0, last - limit)
    lines: dict[int, StepLine] = {}
    while after < last:
        most = min(sizes.events_per_page, last - after)
        lines |= {line.step: line for line in await steps(source, after=after, limit=most)}
        after += most
        progress("diff", after, last)
    return {step: line for step, line in lines.items() if step <= last}


def _side_by_side(a: StepLine, b: StepLine) -> dict[str, list[Any]]:
    names = ("rows", "tokens", "reward", "staleness")
    pairs = {name: [getattr(a, name), getattr(b, name)] for name in names}
    for name in sorted(a.metrics.keys() & b.metrics.keys()):
        both = (a.metrics[name], b.metrics[name])
        pairs[name] = [0.0 if abs(number) <= ROUNDING else number for number in both]
    return pairs


def _flat(config: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        inner = isinstance(value, Mapping)
        flat |= _flat(value, f"{at}{key}.") if inner else {f"{at}{key}": value}
    return flat
