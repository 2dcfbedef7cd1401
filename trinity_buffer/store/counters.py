"""Counters of frequent questions, kept while recording: a read costs the same in a long run.

A counter only grows, except the lowest policy version. No gradient depends on one. Events are
counted under the name of their kind; all other states begin with a small letter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from hashlib import sha256

from trinity_buffer.events import (
    BatchPlanned,
    BatchSealed,
    ExperiencesAnnotated,
    ExperiencesRecorded,
    ExperiencesRejected,
    PlacedFact,
    kind_of,
)
from trinity_buffer.store.transaction import Statement, Transaction

Numbers = dict[tuple[str, str], int]
"""(consumer, state) -> a number; the consumer is ``""`` for the experiment itself."""

RECORDED = "recorded"
"""Experiences, refused ones included."""
ANNOTATED, ROWS = "annotated", "rows"
"""Of a set: experiences with an annotation, and annotations, copies included."""
LOWEST_VERSION, HIGHEST_VERSION = "lowest version", "highest version"
"""Of the policies that generated an experience."""
PLANNED_GROUPS, PLANNED_ROLLOUTS = "planned groups", "planned rollouts"
STORED_ROLLOUTS = "stored rollouts"
"""Planned rollouts of sealed batches."""

_REJECTED, _PLANNED_BY = "rejected: ", "planned by: "


def rejected_for(reason: str) -> str:
    """Return the state of rows that were rejected, or refused at the door, for ``reason``."""
    return _REJECTED + reason


def planned_by(actor: str) -> str:
    """Return the state of the batches that an actor planned."""
    return _PLANNED_BY + actor


def key_of(state: str) -> str:
    """Return the key of a state in the index, which takes no long texts on PostgreSQL."""
    encoded = state.encode(errors="surrogatepass")
    return state if len(encoded) <= _MAX_KEY_BYTES else sha256(encoded).hexdigest()


_MAX_KEY_BYTES = 200


def reasons(numbers: Numbers, consumer: str) -> dict[str, int]:
    """Return reason -> how many experiences (of a trainer: rows) a consumer rejected for it.

    Args:
        numbers: of an experiment.
        consumer: its name; "" for what was refused at the door.
    """
    numbers_by_reason = {
        state.removeprefix(_REJECTED): number
        for (name, state), number in numbers.items()
        if name == consumer and state.startswith(_REJECTED)
    }
    return dict(sorted(numbers_by_reason.items()))


def kinds(numbers: Numbers) -> dict[str, int]:
    """Return kind -> how many events of it there are."""
    return {kind: number for (of, kind), number in numbers.items() if not of and kind[0].isupper()}


def of_events(events: Sequence[PlacedFact]) -> Numbers:
    """Return the numbers that ``events`` add."""
    numbers: Counter[tuple[str, str]] = Counter(("", kind_of(placed.fact)) for placed in events)
    versions: set[int] = set()
    for placed in events:
        match placed.fact:
            case ExperiencesRecorded() as fact:
                numbers["", RECORDED] += len(fact.columns.batch)
                numbers.update(("", rejected_for(reason)) for reason in fact.refused.values())
                versions.update(v for v in fact.columns.policy_version if v is not None)
            case ExperiencesAnnotated() as fact if fact.experiences:
                numbers[fact.consumer, ANNOTATED] += len(set(fact.experiences))
                numbers[fact.consumer, ROWS] += len(fact.experiences)
            case ExperiencesRejected() as fact:
                numbers.update((fact.consumer, rejected_for(reason)) for reason in fact.reasons)
            case BatchPlanned() as fact:
                numbers["", planned_by(placed.actor)] += 1
                numbers["", PLANNED_GROUPS] += len(fact.tasks)
                numbers["", PLANNED_ROLLOUTS] += len(fact.tasks) * fact.rollouts_per_group
            case BatchSealed():
                numbers["", STORED_ROLLOUTS] += 0  # how many, the fold sees
            case _:
                pass  # nothing is counted but its kind
    if versions:
        numbers["", LOWEST_VERSION], numbers["", HIGHEST_VERSION] = min(versions), max(versions)
    return numbers


def add(tx: Transaction, experiment: int, events: Sequence[PlacedFact], stored: int) -> None:
    """Add to the counters what ``events`` and the ``stored`` rollouts of sealed batches add."""
    numbers = of_events(events)
    if stored:
        numbers["", STORED_ROLLOUTS] = stored
    rows = [(name, key_of(state), state, number) for (name, state), number in numbers.items()]
    if rows:
        _ADD.execute_later(tx, of=experiment, rows=rows)


# A condition, or SQLite reads ON CONFLICT as that of a join.
_ADD = Statement(
    "INSERT INTO counter (experiment, consumer, key, state, number) "
    "SELECT :of, c0, c1, c2, c3 FROM ROWS(text, text, text, bigint) WHERE c3 IS NOT NULL "
    "ON CONFLICT (experiment, consumer, key) DO UPDATE SET number = CASE counter.state "
    f"WHEN '{LOWEST_VERSION}' THEN CASE WHEN excluded.number < counter.number "
    "THEN excluded.number ELSE counter.number END "
    f"WHEN '{HIGHEST_VERSION}' THEN CASE WHEN excluded.number > counter.number "
    "THEN excluded.number ELSE counter.number END "
    "ELSE counter.number + excluded.number END"
)


def numbers_of(tx: Transaction, experiment: int) -> Numbers:
    """Return the counters of one experiment."""
    return {
        (name, state): int(number) for name, state, number in _NUMBERS.fetch_all(tx, of=experiment)
    }


_NUMBERS = Statement("SELECT consumer, state, number FROM counter WHERE experiment = :of")


def planned_batches(tx: Transaction, experiment: int, actor: str) -> int:
    """Return how many batches an actor planned."""
    return int(_ONE.value(tx, of=experiment, by="", key=key_of(planned_by(actor))) or 0)


_ONE = Statement(
    "SELECT number FROM counter WHERE experiment = :of AND consumer = :by AND key = :key"
)


def count_stored(tx: Transaction, experiment: int, key: str) -> int:
    """Count the planned rollouts of a batch, which was sealed just now; return their number."""
    return int(_COUNT_STORED.value(tx, of=experiment, sealed=key))


def count_late(
    tx: Transaction, experiment: int, runs: Collection[tuple[str, str, int]], first: int
) -> int:
    """Count late runs that fill their sealed batches: planned ones that were not stored yet.

    Args:
        tx: a transaction.
        experiment: its key.
        runs: (batch, task, run) of an event.
        first: the lowest address of that event.

    Returns:
        How many there are.
    """
    late_runs = sorted(set(runs))
    if not late_runs:
        return 0
    mine = {"of": experiment, "keys": sorted({key for key, _, _ in late_runs})}
    before = _STORED_OF.value(tx, **mine)
    _LATE.execute_later(tx, **mine, first=first, rows=late_runs)
    return int(_STORED_OF.value(tx, **mine) or 0) - int(before or 0)


# Planned rollouts of a row of `batch` that are stored. A look at an index for each group: joined,
# every experience would be looked up again.
STORED = (
    "(SELECT coalesce(sum((SELECT count(DISTINCT e.run) FROM experience e "
    "WHERE e.experiment = p.experiment AND e.batch = p.batch AND e.task = p.task "
    "AND e.run < batch.rollouts_per_group)), 0) FROM plan p "
    "WHERE p.experiment = batch.experiment AND p.batch = batch.batch)"
)
_COUNT_STORED = Statement(
    f"UPDATE batch SET stored_rollouts = {STORED} "
    "WHERE experiment = :of AND batch = :sealed RETURNING stored_rollouts"
)
_STORED_OF = Statement(
    "SELECT sum(stored_rollouts) FROM batch WHERE experiment = :of AND batch IN TEXTS(:keys)"
)
_LATE = Statement(
    "UPDATE batch SET stored_rollouts = stored_rollouts + "
    "(SELECT count(*) FROM ROWS(text, text, bigint) "
    "WHERE c0 = batch.batch AND c2 < batch.rollouts_per_group AND EXISTS (SELECT 1 FROM plan p "
    "WHERE p.experiment = :of AND p.batch = c0 AND p.task = c1 OFFSET 0) "
    "AND NOT EXISTS (SELECT 1 FROM experience e WHERE e.experiment = :of AND e.batch = c0 "
    "AND e.task = c1 AND e.run = c2 AND e.address < :first OFFSET 0)) "
    "WHERE experiment = :of AND sealed_at IS NOT NULL AND batch IN TEXTS(:keys)"
)
