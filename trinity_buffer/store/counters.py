"""What is asked often, counted as it is recorded: asking costs the same however long a run is.

A counter only grows, but for the lowest policy version. Nothing that trains depends on one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from functools import cache
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
    exists,
    func,
    select,
    update,
)

from trinity_buffer.events import ExperiencesAnnotated, ExperiencesRecorded, ExperiencesRejected
from trinity_buffer.store.tables import batch, counter, experience, plan
from trinity_buffer.store.transaction import (
    Prepared,
    Transaction,
    among_given,
    dialect_module,
    given,
    given_rows,
    rows_given,
)

Numbers = dict[tuple[str, str], int]
"""(consumer, state) -> a number; the consumer is ``""`` for the experiment itself."""

RECORDED = "recorded"
"""Experiences, refused ones included."""
ANNOTATED, ROWS = "annotated", "rows"
"""Of a set: experiences with an annotation, and annotations, copies included."""
LOWEST_VERSION, HIGHEST_VERSION = "lowest version", "highest version"
"""Of the policies that generated something."""

_REJECTED = "rejected: "


def rejected_for(reason: str) -> str:
    """Return the state of what a consumer rejected, or was refused at the door, for ``reason``."""
    return _REJECTED + reason


def key_of(state: str) -> str:
    """Return what stands for a state in the index, which takes no long texts on PostgreSQL."""
    said = state.encode(errors="surrogatepass")
    return state if len(said) <= _MAX_KEY_BYTES else sha256(said).hexdigest()


_MAX_KEY_BYTES = 200


def reasons(numbers: Numbers, consumer: str) -> dict[str, int]:
    """Return reason -> how many experiences (of a trainer: rows) a consumer rejected for it.

    Args:
        numbers: of an experiment.
        consumer: its name; "" for what was refused at the door.
    """
    found = {
        state.removeprefix(_REJECTED): number
        for (name, state), number in numbers.items()
        if name == consumer and state.startswith(_REJECTED)
    }
    return dict(sorted(found.items()))


def of_recorded(facts: Iterable[ExperiencesRecorded]) -> Numbers:
    """Return what events add that record experiences."""
    numbers: Counter[str] = Counter()
    versions: set[int] = set()
    for fact in facts:
        numbers["ExperiencesRecorded"] += 1
        numbers[RECORDED] += len(fact.columns)
        numbers.update(map(rejected_for, fact.refused.values()))
        versions.update(version for version in fact.columns.policy_version if version is not None)
    found = {("", state): number for state, number in numbers.items()}
    if versions:
        found["", LOWEST_VERSION], found["", HIGHEST_VERSION] = min(versions), max(versions)
    return found


def of_annotated(fact: ExperiencesAnnotated) -> Numbers:
    """Return what an event adds that annotates experiences."""
    found = {("", "ExperiencesAnnotated"): 1}
    if fact.experiences:
        found[fact.consumer, ANNOTATED] = len(set(fact.experiences))
        found[fact.consumer, ROWS] = len(fact.experiences)
    return found


def of_rejected(fact: ExperiencesRejected) -> Numbers:
    """Return what an event adds that rejects experiences, or rows of a set."""
    reasons = Counter(fact.reasons)
    return {(fact.consumer, rejected_for(reason)): count for reason, count in reasons.items()}


def add(tx: Transaction, experiment: int, numbers: Numbers) -> None:
    """Add to the counters of an experiment."""
    if numbers:
        rows = [(name, key_of(state), state, number) for (name, state), number in numbers.items()]
        _add(tx.dialect.name).change(tx, of=experiment, **given_rows(tx, rows))


@cache
def _add(dialect: str) -> Prepared:
    columns = [column.name for column in counter.c]
    each = rows_given(dialect, (Text(), Text(), Text(), BigInteger()))
    # A condition, or SQLite reads ON CONFLICT as that of a join.
    some = select(bindparam("of", type_=Integer()), *each).where(each[-1].is_not(None))
    made: Any = dialect_module(dialect).insert(counter).from_select(columns, some)
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
    return {(name, state): int(number) for name, state, number in _NUMBERS.rows(tx, of=experiment)}


_NUMBERS = Prepared(
    select(counter.c.consumer, counter.c.state, counter.c.number).where(
        counter.c.experiment == bindparam("of")
    )
)


def counted_of(tx: Transaction, experiment: int, consumer: str) -> Numbers:
    """Return the counters of one consumer, "" for those of the experiment itself."""
    rows = _OF_ONE.rows(tx, of=experiment, by=consumer)
    return {(consumer, state): int(number) for state, number in rows}


_OF_ONE = Prepared(
    select(counter.c.state, counter.c.number).where(
        counter.c.experiment == bindparam("of"), counter.c.consumer == bindparam("by")
    )
)


def all_numbers(tx: Transaction) -> dict[int, Numbers]:
    """Return experiment -> its counters, of all that have any."""
    found: dict[int, Numbers] = {}
    columns = (counter.c.experiment, counter.c.consumer, counter.c.state, counter.c.number)
    for of, name, state, number in tx.execute(select(*columns)).all():
        found.setdefault(int(of), {})[name, state] = int(number)
    return found


def count_stored(tx: Transaction, experiment: int, key: str) -> None:
    """Count the planned rollouts of a batch, which was sealed just now."""
    of = (batch.c.experiment == experiment, batch.c.batch == key)
    tx.execute(update(batch).where(*of).values(stored_rollouts=stored_rollouts()))


def count_late(
    tx: Transaction, experiment: int, runs: Collection[tuple[str, str, int]], first: int
) -> None:
    """Count what came to sealed batches: of some runs, those that are planned and were not there.

    Args:
        tx: a transaction.
        experiment: its key.
        runs: (batch, task, run) of an event.
        first: the lowest address of that event.
    """
    some = sorted(set(runs))
    if some:
        keys = given(tx, sorted({key for key, _, _ in some}))
        rows = given_rows(tx, some)
        _late(tx.dialect.name).change(tx, of=experiment, first=first, keys=keys, **rows)


@cache
def _late(dialect: str) -> Prepared:
    key, task, run = rows_given(dialect, (Text(), Text(), BigInteger()))
    of = bindparam("of", type_=Integer())
    planned = exists().where(plan.c.experiment == of, plan.c.batch == key, plan.c.task == task)
    before = exists().where(
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
    some = among_given(dialect, batch.c.batch, "keys")
    late = update(batch).where(batch.c.experiment == of, batch.c.sealed_at.is_not(None), some)
    return Prepared(late.values(stored_rollouts=batch.c.stored_rollouts + more))


def stored_rollouts() -> ScalarSelect[int]:
    """Return how many planned rollouts of a row of `batch` are stored, to be asked beside it."""
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
