"""What differs: two annotation sets over the same rollouts, or two runs."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trinity_buffer.errors import UnknownNameError
from trinity_buffer.inspect.blobs import Unreadable, readable_events
from trinity_buffer.inspect.fates import Fate, fates
from trinity_buffer.inspect.source import Source
from trinity_buffer.inspect.step_lines import StepLine, steps
from trinity_buffer.inspect.tensors import mean_of
from trinity_buffer.pipeline.history.refold import Progress, no_progress
from trinity_buffer.sizes import sizes
from trinity_buffer.store import queries, reads
from trinity_buffer.store.rows import ExperienceRow, position_of, slot_of
from trinity_buffer.store.transaction import Transaction


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


async def pages(source: Source, after: int = -1) -> AsyncIterator[list[ExperienceRow]]:
    """Yield the experiences that were not refused, above an address, a page at a time, in order."""
    limit = sizes().experiences_per_page
    while rows := await source.read(
        reads.experiences, source.key, reads.Filter(), after=after, limit=limit
    ):
        yield rows
        after = rows[-1].address


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
    found, head = SetDifference(first, second), await source.head()
    async for so_far, position in comparing(source, first, second, limit=limit):
        found = so_far
        progress("diff", position, head)
    return found


async def comparing(
    source: Source, first: str, second: str, *, limit: int = 20
) -> AsyncIterator[tuple[SetDifference, int]]:
    """Yield what was found so far and the position that was reached, page by page.

    Raises:
        UnknownNameError: no such annotation set.
    """
    consumers = await source.read(queries.consumers, source.key)
    names = [name for name, row in consumers.items() if row.kind == "strategy"]
    for name in (first, second):
        if name not in names:
            known = ", ".join(names) or "none"
            raise UnknownNameError(f"no annotation set {name!r} (there: {known})")
    found = SetDifference(first, second)
    async for rows in pages(source):
        compared, unreadable = await _compared(source, rows, first, second)
        for one in compared:
            _count(found, one)
        found.unreadable += unreadable
        damaged = {one.uid for one in unreadable}
        differing = [one for one in compared if one.by and one.uid not in damaged]
        found.rows = heapq.nlargest(limit, [*found.rows, *differing], key=lambda one: one.by)
        yield found, position_of(rows[-1].address)


def _count(found: SetDifference, one: Differing) -> None:
    found.experiences += 1
    found.states[f"{one.first} / {one.second}"] += 1
    a, b = one.first_advantage, one.second_advantage
    if a is None or b is None:
        return
    found.both += 1
    found.equal += a == b
    found.opposite += a * b < 0
    found.total += abs(a - b)
    found.greatest = max(found.greatest, abs(a - b))


async def _compared(
    source: Source, rows: Sequence[ExperienceRow], first: str, second: str
) -> tuple[list[Differing], list[Unreadable]]:
    def look(tx: Transaction) -> dict[int, list[Fate]]:
        return fates(tx, source.key, rows)

    decided = await source.read(look)
    wanted = [f for some in decided.values() for f in some if f.annotation_set in (first, second)]
    noted = [f.annotations[0].position for f in wanted if f.annotations]
    events, damaged = await readable_events(source, noted, ["annotation"])

    def advantage(fate: Fate) -> float | None:
        if not fate.annotations or fate.annotations[0].position not in events:
            return None
        note = fate.annotations[0]
        segment = events[note.position].families.get("annotation")
        return None if segment is None else mean_of(segment, "advantages", slot_of(note.address))

    found, unreadable = [], []
    for row in rows:
        own = {fate.annotation_set: fate for fate in decided[row.address]}
        a, b = own[first], own[second]
        found.append(Differing(row.eid.uid, _state(a), _state(b), advantage(a), advantage(b)))
        unreadable += [
            Unreadable(row.eid.uid, note.position, str(damaged[note.position]))
            for fate in (a, b)
            for note in fate.annotations[:1]
            if note.position in damaged
        ]
    return found, unreadable


def _state(fate: Fate) -> str:
    return fate.state if fate.reason is None else f"{fate.state}: {fate.reason}"


async def compare_runs(
    first: Source, second: Source, *, limit: int | None = None, progress: Progress = no_progress
) -> RunDifference:
    """Return how two runs differ: configuration, counts, and the steps that both have.

    Args:
        first, second: the experiments; they may be of different stores.
        limit: only so many of the last steps of each count; None: all do.
        progress: called with the step that was reached, and the last one.
    """
    sides = (first, second)
    configs = [await one.read(queries.config_of, one.key) for one in sides]
    a, b = ({} if config is None else _flat(config[0]) for config in configs)
    config = {k: [a.get(k), b.get(k)] for k in sorted({*a, *b}) if a.get(k) != b.get(k)}
    totals = (_Totals(), _Totals())
    shared: dict[int, dict[str, list[Any]]] = {}
    last = [await _last_step(one) for one in sides]
    skipped = [0 if limit is None else max(0, one - limit) for one in last]
    page = sizes().experiences_per_page
    for after in range(min(skipped), max(last), page):
        up_to = after + page
        some = [
            await _steps(one, max(after, left), min(up_to, end))
            for one, left, end in zip(sides, skipped, last, strict=True)
        ]
        for total, lines in zip(totals, some, strict=True):
            total.add(lines.values())
        both = sorted(some[0].keys() & some[1].keys())
        shared |= {step: _side_by_side(some[0][step], some[1][step]) for step in both}
        progress("diff", min(up_to, max(last)), max(last))
    numbers = [one.numbers() for one in totals]
    found = {name: [one[name] for one in numbers] for name in numbers[0]}
    return RunDifference(first.name, second.name, config, found, shared)


async def _last_step(source: Source) -> int:
    """Return the last step of the busiest trainer, 0 where there is none."""
    consumers = await source.read(queries.consumers, source.key)
    trainers = [row for row in consumers.values() if row.kind == "trainer"]
    return max((row.leased_step for row in trainers), default=0)


async def _steps(source: Source, after: int, up_to: int) -> dict[int, StepLine]:
    if after >= up_to:
        return {}
    lines = await steps(source, after=after, limit=up_to - after)
    return {line.step: line for line in lines if line.step <= up_to}


@dataclass(slots=True)
class _Totals:
    """What is counted of the steps of a run, page by page."""

    steps: int = 0
    sums: Counter[str] = field(default_factory=Counter)
    known: dict[str, tuple[float, int]] = field(default_factory=dict)

    def add(self, lines: Iterable[StepLine]) -> None:
        """Count some more steps."""
        for line in lines:
            self.steps += 1
            self.sums["committed"] += line.state == "committed"
            self.sums["rows"] += line.rows
            self.sums["tokens"] += line.tokens
            for name in _MEANS:
                value = getattr(line, name)
                if value is not None:
                    total, number = self.known.get(name, (0.0, 0))
                    self.known[name] = (total + value, number + 1)

    def numbers(self) -> dict[str, Any]:
        """Return the counts, and the means over the steps that know the number."""
        means = {name: self.known.get(name) for name in _MEANS}
        return {
            "steps": self.steps,
            **{name: self.sums[name] for name in ("committed", "rows", "tokens")},
            **{name: None if one is None else one[0] / one[1] for name, one in means.items()},
        }


_MEANS = ("reward", "staleness", "seconds")


def _side_by_side(a: StepLine, b: StepLine) -> dict[str, list[Any]]:
    names = ("rows", "tokens", "reward", "staleness")
    found = {name: [getattr(a, name), getattr(b, name)] for name in names}
    shared = sorted(a.metrics.keys() & b.metrics.keys())
    return found | {name: [a.metrics[name], b.metrics[name]] for name in shared}


def _flat(config: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in config.items():
        inner = isinstance(value, Mapping)
        found |= _flat(value, f"{at}{key}.") if inner else {f"{at}{key}": value}
    return found
