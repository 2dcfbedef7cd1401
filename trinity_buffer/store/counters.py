"""Counters of frequent questions, kept while recording: a read costs the same in a long run.

A counter only grows, except the lowest policy version. No gradient depends on one. Events are
counted under the name of their kind; all other states begin with a small letter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from hashlib import sha256
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Integer,
    ScalarSelect,
    Text,
    bindparam,
    case,
    func,
    select,
    update,
)

from trinity_buffer.events import (
    BatchPlanned,
    BatchSealed,
    ExperiencesAnnotated,
    ExperiencesRecorded,
    ExperiencesRejected,
    PlacedFact,
)
from trinity_buffer.store.tables import batch, counter, experience, plan
from trinity_buffer.store.transaction import (
    Prepared,
    Transaction,
    bind_list,
    bind_rows,
    by_dialect,
    dialect_module,
    has_row,
    in_bound_list,
    values_table,
)

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
    numbers: Counter[tuple[str, str]] = Counter(("", placed.kind) for placed in events)
    versions: set[int] = set()
    for placed in events:
        match placed.fact:
            case ExperiencesRecorded() as fact:
                numbers["", RECORDED] += len(fact.columns)
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


def add(tx: Transaction, experiment: int, numbers: Numbers) -> None:
    """Add to the counters of an experiment."""
    if numbers:
        rows = [(name, key_of(state), state, number) for (name, state), number in numbers.items()]
        _add(tx.dialect.name).execute_later(tx, of=experiment, **bind_rows(tx, rows))


@by_dialect
def _add(dialect: str) -> Prepared:
    columns = [column.name for column in counter.c]
    each = values_table(dialect, (Text(), Text(), Text(), BigInteger()))
    # A condition, or SQLite reads ON CONFLICT as that of a join.
    added = select(bindparam("of", type_=Integer()), *each).where(each[-1].is_not(None))
    made: Any = dialect_module(dialect).insert(counter).from_select(columns, added)
    number, more = counter.c.number, made.excluded.number
    new: ColumnElement[int] = case(
        (counter.c.state == LOWEST_VERSION, case((more < number, more), else_=number)),
        (counter.c.state == HIGHEST_VERSION, case((more > number, more), else_=number)),
        else_=number + more,
    )
    keys = [column.name for column in counter.primary_key]
    return Prepared(made.on_conflict_do_update(index_elements=keys, set_={"number": new}))


def numbers_of(tx: Transaction, experiment: int) -> Numbers:
    """Return the counters of one experiment."""
    return {
        (name, state): int(number) for name, state, number in _NUMBERS.fetch_all(tx, of=experiment)
    }


_NUMBERS = Prepared(
    select(counter.c.consumer, counter.c.state, counter.c.number).where(
        counter.c.experiment == bindparam("of")
    )
)


def counted_of(tx: Transaction, experiment: int, consumer: str) -> Numbers:
    """Return the counters of one consumer, "" for those of the experiment itself."""
    rows = _OF_ONE.fetch_all(tx, of=experiment, by=consumer)
    return {(consumer, state): int(number) for state, number in rows}


_OF_ONE = Prepared(
    select(counter.c.state, counter.c.number).where(
        counter.c.experiment == bindparam("of"), counter.c.consumer == bindparam("by")
    )
)


def planned_batches(tx: Transaction, experiment: int, actor: str) -> int:
    """Return how many batches an actor planned."""
    return int(_ONE.value(tx, of=experiment, by="", key=key_of(planned_by(actor))) or 0)


_ONE = Prepared(
    select(counter.c.number).where(
        counter.c.experiment == bindparam("of"),
        counter.c.consumer == bindparam("by"),
        counter.c.key == bindparam("key"),
    )
)


def all_numbers(tx: Transaction) -> dict[int, Numbers]:
    """Return experiment -> its counters, if it has any."""
    counters: dict[int, Numbers] = {}
    columns = (counter.c.experiment, counter.c.consumer, counter.c.state, counter.c.number)
    for of, name, state, number in tx.execute(select(*columns)).all():
        counters.setdefault(int(of), {})[name, state] = int(number)
    return counters


def count_stored(tx: Transaction, experiment: int, key: str) -> int:
    """Count the planned rollouts of a batch, which was sealed just now; return their number."""
    return int(_count_stored(tx.dialect.name).value(tx, of=experiment, sealed=key))


@by_dialect
def _count_stored(_dialect: str) -> Prepared:
    of = (batch.c.experiment == bindparam("of"), batch.c.batch == bindparam("sealed"))
    counted = update(batch).where(*of).values(stored_rollouts=stored_rollouts())
    return Prepared(counted.returning(batch.c.stored_rollouts))


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
    named = bind_list(tx, sorted({key for key, _, _ in late_runs}))
    stored = partial(_stored_of(tx.dialect.name).value, tx, of=experiment, keys=named)
    before, late = stored(), _late(tx.dialect.name)
    late.execute_later(tx, of=experiment, first=first, keys=named, **bind_rows(tx, late_runs))
    return int(stored() or 0) - int(before or 0)


@by_dialect
def _stored_of(dialect: str) -> Prepared:
    wanted = in_bound_list(dialect, batch.c.batch, "keys")
    total = func.sum(batch.c.stored_rollouts, type_=Integer)
    return Prepared(select(total).where(batch.c.experiment == bindparam("of"), wanted))


@by_dialect
def _late(dialect: str) -> Prepared:
    key, task, run = values_table(dialect, (Text(), Text(), BigInteger()))
    of = bindparam("of", type_=Integer())
    planned = has_row(plan.c.experiment == of, plan.c.batch == key, plan.c.task == task)
    before = has_row(
        experience.c.experiment == of,
        experience.c.batch == key,
        experience.c.task == task,
        experience.c.run == run,
        experience.c.address < bindparam("first", type_=BigInteger()),
    )
    new = select(func.count()).where(
        key == batch.c.batch, run < batch.c.rollouts_per_group, planned, ~before
    )
    more = new.correlate(batch).scalar_subquery()
    wanted = in_bound_list(dialect, batch.c.batch, "keys")
    late = update(batch).where(batch.c.experiment == of, batch.c.sealed_at.is_not(None), wanted)
    return Prepared(late.values(stored_rollouts=batch.c.stored_rollouts + more))


def stored_rollouts() -> ScalarSelect[int]:
    """Return the number of stored planned rollouts of a row of `batch`, as a subquery beside it."""
    # A look at an index for each group: joined, every experience would be looked up again.
    runs = select(func.count(experience.c.run.distinct())).where(
        experience.c.experiment == plan.c.experiment,
        experience.c.batch == plan.c.batch,
        experience.c.task == plan.c.task,
        experience.c.run < batch.c.rollouts_per_group,
    )
    of_group = runs.correlate(plan, batch).scalar_subquery()
    of_batch = select(func.coalesce(func.sum(of_group, type_=Integer), 0)).where(
        plan.c.experiment == batch.c.experiment, plan.c.batch == batch.c.batch
    )
    return of_batch.correlate(batch).scalar_subquery()
