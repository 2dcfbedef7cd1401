"""Queries of writers and strategies, and filtered reads of experiences, page by page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import ColumnElement, bindparam, select

from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.identity import EID, Key
from trinity_buffer.options import renamed
from trinity_buffer.store import counters, log
from trinity_buffer.store.rows import (
    EXPERIENCE_COLUMNS,
    MAX_ROWS_PER_EVENT,
    BatchRow,
    ConsumerRow,
    ExperienceRow,
    experience_row,
    first_address,
    position_of,
    read_consumer,
    typed,
)
from trinity_buffer.store.tables import (
    annotation,
    configuration,
    consumer,
    experience,
    rejection,
    waiting,
)
from trinity_buffer.store.transaction import (
    Statement,
    Transaction,
    bind_list,
    has_row,
    in_list,
    one_statement,
)

DOOR = "door"
"""The consumer name of rows that are refused as late or invalid when they are written."""


def config_of(tx: Transaction, experiment: int) -> tuple[dict[str, Any], bool] | None:
    """Return (configuration, whether it is finished), or None before the first event."""
    row = tx.execute(_CONFIG, {"of": experiment}).one_or_none()
    return None if row is None else (renamed(row.config, warn=False), bool(row.finished))


@one_statement
def is_finished(tx: Transaction, experiment: int) -> bool:
    """Return whether an experiment was finished since the last change of its configuration."""
    return bool(_FINISHED.value(tx, of=experiment))


_CONFIG = select(configuration.c.config, configuration.c.finished).where(
    configuration.c.experiment == bindparam("of")
)
_FINISHED = Statement("SELECT finished FROM configuration WHERE experiment = :of")


def stored(tx: Transaction, experiment: int, eids: Sequence[EID]) -> dict[EID, tuple[int, bytes]]:
    """Return (address, content digest) of those of ``eids`` that are stored."""
    wanted = {(str(e.batch), str(e.task), e.run, e.step, e.suffix): e for e in eids}
    rows_by_eid: dict[EID, tuple[int, bytes]] = {}
    for batch_key, tasks in _by_batch(key[:2] for key in wanted):
        rows = _OF_TASKS.fetch_all(tx, of=experiment, batch=batch_key, tasks=bind_list(tx, tasks))
        for address, digest, *key in rows:
            eid = wanted.get((batch_key, *key))
            if eid is not None:
                rows_by_eid[eid] = (int(address), bytes(digest))
    return rows_by_eid


def _by_batch(groups: Iterable[tuple[str, str]]) -> Iterable[tuple[str, list[str]]]:
    """Return each batch with its tasks."""
    tasks: dict[str, dict[str, None]] = {}
    for batch_key, task in groups:
        tasks.setdefault(batch_key, {})[task] = None
    return [(batch_key, list(names)) for batch_key, names in tasks.items()]


def in_batch(columns: str, named: str, more: str = "") -> Statement:
    """Return a query of the experiences of one batch.

    One at a time: of several, SQLite, which has no statistics, looks at every experience of the
    run.

    Args:
        columns: of `experience`, which is called e.
        named: further conditions, of columns of the index of EIDs.
        more: conditions of other columns.
    """
    batch = f"experiment = :of AND batch = :batch{named}"
    asked = f"SELECT {columns} FROM experience e WHERE"
    # In two: in one, SQLite takes the primary key and looks at every experience of the run.
    addresses = f"SELECT address FROM experience WHERE {batch}"
    in_two = f"{asked} experiment = :of AND address IN ({addresses}){more}"
    # In one: of two, PostgreSQL compares each row with each, as long as it has no statistics.
    return Statement(in_two, f"{asked} {batch}{more}")


IN_TASKS = " AND task IN TEXTS(:tasks)"
_OF_TASKS = in_batch("address, digest, task, run, step, suffix", IN_TASKS)
_REFUSED = in_batch("task, run", IN_TASKS, " AND address < :end AND refused IS NOT NULL")
_DECIDED = in_batch(
    "task",
    IN_TASKS,
    " AND address < :end AND refused IS NULL AND NOT EXISTS (SELECT 1 FROM waiting w "
    "WHERE w.experiment = :of AND w.consumer = :by AND w.address = e.address OFFSET 0)",
)
_IN_BATCH = in_batch("count(address)", "", " AND refused IS DISTINCT FROM 'late'")


def sealed_among(tx: Transaction, experiment: int, batches: Sequence[str]) -> set[str]:
    """Return which of ``batches`` are sealed."""
    named = bind_list(tx, batches)
    return {key for (key,) in _SEALED_AMONG.fetch_all(tx, of=experiment, batches=named)}


_SEALED_AMONG = Statement(
    "SELECT batch FROM batch "
    "WHERE experiment = :of AND batch IN TEXTS(:batches) AND sealed_at IS NOT NULL"
)


def batch_row(tx: Transaction, experiment: int, key: Key) -> BatchRow | None:
    """Return the batch with its planned tasks, or None if it was neither planned nor sealed."""
    rows = batches(tx, experiment, [str(key)])
    return rows.get(str(key))


def batches(tx: Transaction, experiment: int, keys: Sequence[str]) -> dict[str, BatchRow]:
    """Return those of the batches ``keys`` that were planned or sealed."""
    wanted = bind_list(tx, keys)
    rows = _BATCHES.fetch_all(tx, of=experiment, batches=wanted)
    tasks: dict[str, list[Key]] = {}
    if rows:
        # Sorted here: asked to, SQLite walks through all plans of the run in their order.
        plans = _TASKS.fetch_all(tx, of=experiment, batches=wanted)
        for _, key, task, is_int in sorted(plans):
            tasks.setdefault(key, []).append(typed(task, is_int=is_int))
    return {
        key: BatchRow(
            typed(key, is_int=is_int),
            actor,
            size,
            planned,
            sealed,
            expected,
            tuple(tasks.get(key, ())),
        )
        for key, is_int, actor, size, planned, sealed, expected in rows
    }


_BATCHES = Statement(
    "SELECT batch, batch_is_int, actor, rollouts_per_group, planned_at, sealed_at, expected "
    "FROM batch WHERE experiment = :of AND batch IN TEXTS(:batches)"
)
_TASKS = Statement(
    "SELECT ordinal, batch, task, task_is_int FROM plan "
    "WHERE experiment = :of AND batch IN TEXTS(:batches)"
)


def batches_of_actor(tx: Transaction, experiment: int, actor: str) -> tuple[int, list[str]]:
    """Return how many batches ``actor`` planned, and which of them are not sealed, oldest first."""
    unsealed = [key for (key,) in _UNSEALED_OF.fetch_all(tx, of=experiment, by=actor)]
    return counters.planned_batches(tx, experiment, actor), unsealed


IS_OPEN = "planned_at > 0 AND sealed_at IS NULL"
"""Of a row of `batch` that is planned and not sealed, in the words of its index."""

_UNSEALED_OF = Statement(
    f"SELECT batch FROM batch WHERE experiment = :of AND actor = :by AND {IS_OPEN} "
    "ORDER BY planned_at"
)


def runs_of(tx: Transaction, experiment: int, key: Key) -> set[tuple[str, int]]:
    """Return the (task as text, run) pairs of a batch that are stored."""
    return {(task, int(run)) for task, run in _RUNS.fetch_all(tx, of=experiment, batch=str(key))}


_RUNS = Statement(
    "SELECT DISTINCT task, run FROM experience WHERE experiment = :of AND batch = :batch"
)
_KINDS_OF_KEYS = Statement(
    "SELECT int_keys FROM experience WHERE experiment = :of AND batch = :batch LIMIT 1"
)


def key_of_batch(tx: Transaction, experiment: int, batch: str) -> Key:
    """Return the id, with its type, of a batch of which something is stored."""
    kinds = int(_KINDS_OF_KEYS.value(tx, of=experiment, batch=batch))
    return typed(batch, is_int=bool(kinds & 1))


def count_in_batch(tx: Transaction, experiment: int, key: Key) -> int:
    """Return how many experiences of a batch are stored and not refused as late."""
    return int(_IN_BATCH.value(tx, of=experiment, batch=str(key)))


def consumers(tx: Transaction, experiment: int) -> dict[str, ConsumerRow]:
    """Return all consumers of the experiment."""
    rows = map(read_consumer, _CONSUMERS.fetch_all(tx, of=experiment))
    return {row.name: row for row in rows}


@one_statement
def consumer_row(tx: Transaction, experiment: int, name: str) -> ConsumerRow | None:
    """Return one consumer, or None."""
    rows = _CONSUMER.fetch_all(tx, of=experiment, by=name)
    return read_consumer(rows[0]) if rows else None


_COLUMNS_OF_CONSUMER = (
    "SELECT name, kind, config, cursor, calls, rejected_groups, token, leased_step, "
    "committed_step FROM consumer WHERE experiment = :of"
)
_CONSUMERS = Statement(f"{_COLUMNS_OF_CONSUMER} ORDER BY name")
_CONSUMER = Statement(f"{_COLUMNS_OF_CONSUMER} AND name = :by")


def registered(
    tx: Transaction, experiment: int, name: str, event: log.NewEvent, *, clock: Callable[[], int]
) -> ConsumerRow:
    """Return the consumer ``name``; append the event that registers it if it is new.

    Raises:
        InvalidArgumentError: a new name has a slash, or is that of the door.
    """
    tx.lock(experiment)
    row = consumer_row(tx, experiment, name)
    if row is None:
        if "/" in name:
            raise InvalidArgumentError(
                f"consumer {name!r}: a name with a slash belongs to a trainer of another "
                "experiment, which rejects rows here; choose one without"
            )
        if name == DOOR:
            raise InvalidArgumentError(
                f"consumer {name!r}: this name is reserved for rows that are refused when they are "
                "written; choose another one"
            )
        log.append(tx, experiment, [(name, event)], now_us=clock())
        row = consumer_row(tx, experiment, name)
    assert row is not None
    return row


def waiting_addresses(
    tx: Transaction, experiment: int, name: str, *, after: int, up_to: int, limit: int
) -> list[int]:
    """Return addresses that strategy ``name`` has seen and not decided, above ``after``."""
    end = first_address(up_to + 1)
    rows = _WAITING.fetch_all(tx, of=experiment, by=name, after=after, end=end, most=limit)
    return [address for (address,) in rows]


_WAITING = Statement(
    "SELECT address FROM waiting WHERE experiment = :of AND consumer = :by "
    "AND address > :after AND address < :end ORDER BY address LIMIT :most"
)


def last_recorded(tx: Transaction, experiment: int) -> int:
    """Return the position of the last event that recorded experiences, or 0."""
    return position_of(int(_LAST_RECORDED.value(tx, of=experiment) or 0))


_LAST_RECORDED = Statement("SELECT max(address) FROM experience WHERE experiment = :of")


def experience_rows(
    tx: Transaction, experiment: int, addresses: Sequence[int]
) -> list[ExperienceRow]:
    """Return the experiences at ``addresses``, in order of address."""
    mine = (experience.c.experiment == experiment, in_list(tx, experience.c.address, addresses))
    query = select(*EXPERIENCE_COLUMNS).where(*mine).order_by(experience.c.address)
    return [experience_row(row) for row in tx.execute(query).all()]


def rows_of_events(
    tx: Transaction, experiment: int, positions: Sequence[int]
) -> dict[int, list[ExperienceRow]]:
    """Return position -> the experiences that the event there recorded, of those that did."""
    rows_by_position: dict[int, list[ExperienceRow]] = {}
    for position in positions:
        inside = experience.c.address.between(
            first_address(position), first_address(position + 1) - 1
        )
        query = select(*EXPERIENCE_COLUMNS).where(experience.c.experiment == experiment, inside)
        rows = tx.execute(query.order_by(experience.c.address)).all()
        rows_by_position[position] = [experience_row(row) for row in rows]
    return rows_by_position


def decided_groups(
    tx: Transaction, experiment: int, name: str, groups: Sequence[tuple[str, str]], *, cursor: int
) -> set[tuple[str, str]]:
    """Return which groups have experiences up to ``cursor`` that the strategy has decided."""
    end = first_address(cursor + 1)
    decided: set[tuple[str, str]] = set()
    for key, tasks in _by_batch(groups):
        wanted = bind_list(tx, tasks)
        rows = _DECIDED.fetch_all(tx, of=experiment, by=name, batch=key, tasks=wanted, end=end)
        decided.update((key, task) for (task,) in rows)
    return decided


def newest_policy(
    tx: Transaction, experiment: int, trainer: str
) -> tuple[int, str, str, int] | None:
    """Return (version, uri, digest, position) of the policy that was published last, or None.

    Policies of trainers other than ``trainer`` are passed over, unless that one does not exist or
    has published none: explorers follow one model.
    """
    own = _NEWEST_POLICY.fetch_all(tx, of=experiment, by=trainer)
    for version, uri, digest, position in own or _NEWEST_OF_ALL.fetch_all(tx, of=experiment):
        return int(version), uri, digest, int(position)
    return None


OF_NO_OTHER_TRAINER = (
    "NOT EXISTS (SELECT 1 FROM event, consumer "
    "WHERE event.experiment = policy.experiment AND event.position = policy.position "
    "AND event.actor <> :by AND consumer.experiment = policy.experiment "
    "AND consumer.name = event.actor AND consumer.kind = 'trainer')"
)
"""Of a row of `policy`: it was published by the trainer ``by``, or by no trainer."""

_NEWEST = "SELECT version, uri, digest, position FROM policy WHERE experiment = :of"
_NEWEST_OF_ALL = Statement(f"{_NEWEST} ORDER BY position DESC LIMIT 1")
_NEWEST_POLICY = Statement(
    f"{_NEWEST} AND EXISTS (SELECT 1 FROM consumer WHERE consumer.experiment = policy.experiment "
    f"AND name = :by AND kind = 'trainer') AND {OF_NO_OTHER_TRAINER} "
    "ORDER BY position DESC LIMIT 1"
)


def refused_runs(
    tx: Transaction, experiment: int, groups: Sequence[tuple[str, str]], *, cursor: int
) -> set[tuple[tuple[str, str], int]]:
    """Return (group, run) of the experiences up to ``cursor`` that were refused at the door."""
    end = first_address(cursor + 1)
    runs: set[tuple[tuple[str, str], int]] = set()
    for key, tasks in _by_batch(groups):
        rows = _REFUSED.fetch_all(tx, of=experiment, batch=key, tasks=bind_list(tx, tasks), end=end)
        runs.update(((key, task), int(run)) for task, run in rows)
    return runs


State = Literal["unseen", "waiting", "annotated", "rejected"]


@dataclass(frozen=True, slots=True)
class Filter:
    """Conditions on experiences; None accepts all. ``state`` is that in ``annotation_set``."""

    batch: Key | None = None
    task: Key | None = None
    run: int | None = None
    policy_version: int | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    include_refused: bool = False
    annotation_set: str | None = None
    state: State | None = None
    addresses: tuple[int, ...] | None = None


def addresses_in_batch(
    tx: Transaction, experiment: int, batch: Key, task: Key | None, *, limit: int
) -> tuple[int, ...]:
    """Return the addresses of up to ``limit`` experiences of a batch, or of a task in it."""
    query = select(experience.c.address).where(
        experience.c.experiment == experiment, experience.c.batch == str(batch)
    )
    if task is not None:
        query = query.where(experience.c.task == str(task))
    return tuple(tx.execute(query.limit(limit)).scalars())


def newest_version(tx: Transaction, experiment: int) -> int | None:
    """Return the policy version of the experience that was stored last, or None."""
    version: int | None = _NEWEST_VERSION.value(tx, of=experiment)
    return version


_NEWEST_VERSION = Statement(
    "SELECT policy_version FROM experience WHERE experiment = :of ORDER BY address DESC LIMIT 1"
)


def experiences(
    tx: Transaction, experiment: int, wanted: Filter, *, after: int, limit: int
) -> list[ExperienceRow]:
    """Return up to ``limit`` experiences with an address above ``after``, in order of address."""
    query = select(*EXPERIENCE_COLUMNS).where(
        experience.c.experiment == experiment, experience.c.address > after
    )
    equal = ((experience.c.run, wanted.run), (experience.c.policy_version, wanted.policy_version))
    for column, value in (*equal, *_keys(wanted)):
        if value is not None:
            query = query.where(column == value)
    if wanted.reward_min is not None:
        query = query.where(experience.c.reward >= wanted.reward_min)
    if wanted.reward_max is not None:
        query = query.where(experience.c.reward <= wanted.reward_max)
    if wanted.addresses is not None:
        query = query.where(in_list(tx, experience.c.address, wanted.addresses))
    if wanted.state is not None:
        query = query.where(_is(wanted.state, wanted.annotation_set or ""))
    if not wanted.include_refused:
        query = query.where(experience.c.refused.is_(None))
    rows = tx.execute(query.order_by(experience.c.address).limit(limit))
    return [experience_row(row) for row in rows.all()]


def _keys(wanted: Filter) -> Iterator[tuple[ColumnElement[str], str | None]]:
    """Yield the columns of the keys, and what each must be.

    With addresses, the lookup goes by them: ``|| ''`` keeps the planner from an index of keys.
    """
    for column, key in ((experience.c.batch, wanted.batch), (experience.c.task, wanted.task)):
        compared = column if wanted.addresses is None else column.concat("")
        yield compared, None if key is None else str(key)


def _is(state: State, name: str) -> ColumnElement[bool]:
    """Return the condition that an experience is in ``state`` for the annotation set ``name``."""
    if state == "unseen":
        cursor = select(consumer.c.cursor).where(
            consumer.c.experiment == experience.c.experiment, consumer.c.name == name
        )
        return experience.c.address >= (cursor.scalar_subquery() + 1) * MAX_ROWS_PER_EVENT
    place: ColumnElement[Any]
    if state == "annotated":
        table, place = annotation, annotation.c.experience
    else:
        table = waiting if state == "waiting" else rejection
        place = table.c.address
    return has_row(
        table.c.experiment == experience.c.experiment,
        table.c.consumer == name,
        place == experience.c.address,
    )


def assigned_rewards(
    tx: Transaction, experiment: int, scoring: str, addresses: Sequence[int]
) -> dict[int, float]:
    """Return address -> reward of those of ``addresses`` that a scoring has rewarded."""
    wanted = bind_list(tx, addresses)
    rows = _ASSIGNED.fetch_all(tx, of=experiment, scoring=scoring, addresses=wanted)
    return {int(address): float(reward) for address, reward in rows}


_ASSIGNED = Statement(
    "SELECT address, reward FROM assigned_reward "
    "WHERE experiment = :of AND scoring = :scoring AND address IN INTS(:addresses)"
)


def scorings(tx: Transaction, experiment: int) -> list[str]:
    """Return the names of the scorings of an experiment, sorted."""
    return sorted(name for (name,) in _SCORINGS.fetch_all(tx, of=experiment))


_SCORINGS = Statement("SELECT DISTINCT scoring FROM assigned_reward WHERE experiment = :of")
