"""Queries of writers and strategies, and filtered reads of experiences, page by page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.events import NewEvent
from trinity_buffer.identity import EID, Key
from trinity_buffer.options import renamed
from trinity_buffer.store import counters, fold, log
from trinity_buffer.store import rows as store_rows
from trinity_buffer.store.rows import BatchRow, ConsumerRow, ExperienceRow
from trinity_buffer.store.transaction import Statement, Transaction, one_statement

Group = tuple[str, str]
"""Batch and task, as texts."""

DOOR = "door"
"""The consumer name of rows that are refused as late or invalid when they are written."""


def config_of(tx: Transaction, experiment: int) -> tuple[dict[str, Any], bool] | None:
    """Return (configuration, whether it is finished), or None before the first event."""
    for config, finished in _CONFIG.fetch_all(tx, of=experiment):
        return renamed(store_rows.parsed(config, dict) or {}, warn=False), bool(finished)
    return None


@one_statement
def is_finished(tx: Transaction, experiment: int) -> bool:
    """Return whether an experiment was finished since the last change of its configuration."""
    return bool(_FINISHED.value(tx, of=experiment))


_CONFIG = Statement("SELECT config, finished FROM configuration WHERE experiment = :of")
_FINISHED = Statement("SELECT finished FROM configuration WHERE experiment = :of")


def stored(tx: Transaction, experiment: int, eids: Sequence[EID]) -> dict[str, bytes]:
    """Return uid -> content digest of those of ``eids`` that are stored."""
    groups = ((str(eid.batch), str(eid.task)) for eid in eids)
    rows = of_groups(tx, _OF_TASKS, experiment, groups)
    digests = {"/".join(map(str, address)): bytes(digest) for *address, digest in rows}
    return {eid.uid: digests[eid.uid] for eid in eids if eid.uid in digests}


def of_groups(
    tx: Transaction, query: Statement, experiment: int, groups: Iterable[Group], **values: object
) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a query `in_batch` of (batch, task) groups, each behind its batch."""
    tasks: dict[str, dict[str, None]] = {}
    for batch_key, task in groups:
        tasks.setdefault(batch_key, {})[task] = None
    for batch_key, names in tasks.items():
        rows = query.fetch_all(tx, of=experiment, batch=batch_key, tasks=names, **values)
        yield from ((batch_key, *row) for row in rows)


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
_OF_TASKS = in_batch("task, run, step, suffix, digest", IN_TASKS)
_SETTLED = in_batch(
    "task, run, refused",
    IN_TASKS,
    " AND address < :seen AND (refused IS NOT NULL OR address < :decided AND NOT EXISTS "
    "(SELECT 1 FROM waiting w WHERE w.experiment = :of AND w.consumer = :by "
    "AND w.address = e.address OFFSET 0))",
)
_IN_BATCH = in_batch("count(address)", "", " AND refused IS DISTINCT FROM 'late'")


def batch_row(tx: Transaction, experiment: int, key: Key) -> BatchRow | None:
    """Return the batch with its planned tasks, or None if it was neither planned nor sealed."""
    return batches(tx, experiment, [str(key)]).get(str(key))


def batches(tx: Transaction, experiment: int, keys: Sequence[str]) -> dict[str, BatchRow]:
    """Return those of the batches ``keys`` that were planned or sealed."""
    rows = _BATCHES.fetch_all(tx, of=experiment, batches=keys)
    tasks: dict[str, list[Key]] = {}
    if rows:
        # Sorted here: asked to, SQLite walks through all plans of the run in their order.
        plans = _TASKS.fetch_all(tx, of=experiment, batches=keys)
        for _, key, task, is_int in sorted(plans):
            tasks.setdefault(key, []).append(store_rows.typed(task, is_int=is_int))
    return {
        key: BatchRow(
            store_rows.typed(key, is_int=is_int),
            actor,
            size,
            planned,
            sealed,
            expected,
            tuple(tasks.get(key, ())),
        )
        for key, is_int, actor, size, planned, sealed, expected in rows
    }


_OF_THESE = "WHERE experiment = :of AND batch IN TEXTS(:batches)"
_BATCHES = Statement(
    "SELECT batch, batch_is_int, actor, rollouts_per_group, planned_at, sealed_at, expected "
    f"FROM batch {_OF_THESE}"
)
_TASKS = Statement(f"SELECT ordinal, batch, task, task_is_int FROM plan {_OF_THESE}")


def batches_of_actor(tx: Transaction, experiment: int, actor: str) -> tuple[int, list[str]]:
    """Return how many batches ``actor`` planned, and which of them are not sealed, oldest first."""
    unsealed = [key for (key,) in _UNSEALED_OF.fetch_all(tx, of=experiment, by=actor)]
    planned = _COUNTER.value(tx, of=experiment, key=fold.key_of(counters.planned_by(actor)))
    return int(planned or 0), unsealed


_COUNTER = Statement(
    "SELECT number FROM counter WHERE experiment = :of AND consumer = '' AND key = :key"
)


IS_OPEN = "planned_at > 0 AND sealed_at IS NULL"
"""Of a row of `batch` that is planned and not sealed, in the words of its index."""

_UNSEALED_OF = Statement(
    f"SELECT batch FROM batch WHERE experiment = :of AND actor = :by AND {IS_OPEN} "
    "ORDER BY planned_at"
)


def runs_of(tx: Transaction, experiment: int, keys: Iterable[Key]) -> set[tuple[str, str, int]]:
    """Return (batch as text, task as text, run) of what is stored of these batches."""
    rows = _RUNS.fetch_all(tx, of=experiment, batches=list(map(str, keys)))
    return {(batch, task, int(run)) for batch, task, run in rows}


_OF = "FROM experience WHERE experiment = :of AND batch"
_OF_BATCH = f"{_OF} = :batch"
_RUNS = Statement(f"SELECT DISTINCT batch, task, run {_OF} IN TEXTS(:batches)")
_KINDS_OF_KEYS = Statement(f"SELECT int_keys {_OF_BATCH} LIMIT 1")


def key_of_batch(tx: Transaction, experiment: int, batch: str) -> Key:
    """Return the id, with its type, of a batch of which something is stored."""
    kinds = int(_KINDS_OF_KEYS.value(tx, of=experiment, batch=batch))
    return store_rows.typed(batch, is_int=bool(kinds & 1))


def count_in_batch(tx: Transaction, experiment: int, key: Key) -> int:
    """Return how many experiences of a batch are stored and not refused as late."""
    return int(_IN_BATCH.value(tx, of=experiment, batch=str(key)))


def consumers(tx: Transaction, experiment: int) -> dict[str, ConsumerRow]:
    """Return all consumers of the experiment."""
    rows = map(store_rows.read_consumer, _CONSUMERS.fetch_all(tx, of=experiment))
    return {row.name: row for row in rows}


@one_statement
def consumer_row(tx: Transaction, experiment: int, name: str) -> ConsumerRow | None:
    """Return one consumer, or None."""
    rows = _CONSUMER.fetch_all(tx, of=experiment, by=name)
    return store_rows.read_consumer(rows[0]) if rows else None


_COLUMNS_OF_CONSUMER = f"SELECT {store_rows.CONSUMER_COLUMNS} FROM consumer WHERE experiment = :of"
_CONSUMERS = Statement(f"{_COLUMNS_OF_CONSUMER} ORDER BY name")
_CONSUMER = Statement(f"{_COLUMNS_OF_CONSUMER} AND name = :by")


def registered(tx: Transaction, experiment: int, name: str, event: NewEvent) -> ConsumerRow:
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
        log.append(tx, experiment, [(name, event)])
        row = consumer_row(tx, experiment, name)
    assert row is not None
    return row


@one_statement
def waiting_addresses(
    tx: Transaction, experiment: int, name: str, *, after: int, up_to: int, limit: int
) -> list[int]:
    """Return addresses that strategy ``name`` has seen and not decided, above ``after``."""
    end = store_rows.first_address(up_to + 1)
    rows = _WAITING.fetch_all(tx, of=experiment, by=name, after=after, end=end, most=limit)
    return [address for (address,) in rows]


_WAITING = Statement(
    "SELECT address FROM waiting WHERE experiment = :of AND consumer = :by "
    "AND address > :after AND address < :end ORDER BY address LIMIT :most"
)


def last_recorded(tx: Transaction, experiment: int) -> int:
    """Return the position of the last event that recorded experiences, or 0."""
    return store_rows.position_of(int(_LAST_RECORDED.value(tx, of=experiment) or 0))


_LAST_RECORDED = Statement("SELECT max(address) FROM experience WHERE experiment = :of")


def experience_rows(
    tx: Transaction, experiment: int, addresses: Sequence[int]
) -> list[ExperienceRow]:
    """Return the experiences at ``addresses``, in order of address."""
    rows = _AT.fetch_all(tx, of=experiment, addresses=addresses)
    return list(map(store_rows.experience_row, rows))


@one_statement
def rows_of_event(tx: Transaction, experiment: int, position: int) -> list[ExperienceRow]:
    """Return the experiences that the event at ``position`` recorded."""
    first, end = map(store_rows.first_address, (position, position + 1))
    rows = _OF_EVENT.fetch_all(tx, of=experiment, first=first, end=end)
    return list(map(store_rows.experience_row, rows))


_EXPERIENCE = f"SELECT {store_rows.EXPERIENCE_COLUMNS} FROM experience e WHERE experiment = :of AND"
_AT = Statement(f"{_EXPERIENCE} address IN INTS(:addresses) ORDER BY address")
_OF_EVENT = Statement(f"{_EXPERIENCE} address >= :first AND address < :end ORDER BY address")


def settled(
    tx: Transaction, experiment: int, name: str, groups: Iterable[Group], *, cursor: int, seen: int
) -> tuple[set[Group], set[tuple[Group, int]]]:
    """Return which groups a strategy has decided in part, and (group, run) of what was refused.

    Args:
        groups: (batch, task) of those that are asked for.
        cursor: decided are experiences up to here.
        seen: experiences are refused up to here, at the door.
    """
    before, end = (store_rows.first_address(last + 1) for last in (cursor, seen))
    ends = {"decided": before, "seen": end}
    decided, refused = set(), set()
    for key, task, run, why in of_groups(tx, _SETTLED, experiment, groups, by=name, **ends):
        if why is None:
            decided.add((key, task))
        else:
            refused.add(((key, task), int(run)))
    return decided, refused


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


def newest_of_followed(tx: Transaction, experiment: int) -> tuple[int, str, str, int] | None:
    """Return `newest_policy` of the trainer that the configuration names now."""
    stored = config_of(tx, experiment)
    config = {} if stored is None else stored[0]
    return newest_policy(tx, experiment, str(config.get("trainer") or "trainer"))


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
    query = _IN_BATCH_OF if task is None else _IN_GROUP
    mine = {"of": experiment, "batch": str(batch), "task": str(task), "most": limit}
    return tuple(address for (address,) in query.fetch_all(tx, **mine))


_IN_BATCH_OF = Statement(f"SELECT address {_OF_BATCH} LIMIT :most")
_IN_GROUP = Statement(f"SELECT address {_OF_BATCH} AND task = :task LIMIT :most")


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
    values = asdict(wanted) | {"of": experiment, "after": after, "most": limit}
    conditions = [_CONDITIONS[name] for name in _CONDITIONS if values[name] is not None]
    for name in ("batch", "task"):
        if values[name] is not None:
            values[name] = str(values[name])
            # With addresses, the lookup goes by them: this keeps the planner from an index of keys.
            column = name if wanted.addresses is None else f"{name} || ''"
            conditions.append(f"{column} = :{name}")
    if wanted.state is not None:
        conditions.append(_IN_STATE[wanted.state])
    if not wanted.include_refused:
        conditions.append("refused IS NULL")
    those = " AND ".join(["address > :after", *conditions])
    query = Statement(f"{_EXPERIENCE} {those} ORDER BY address LIMIT :most")
    return list(map(store_rows.experience_row, query.fetch_all(tx, **values)))


_CONDITIONS = {
    "run": "run = :run",
    "policy_version": "policy_version = :policy_version",
    "reward_min": "reward >= :reward_min",
    "reward_max": "reward <= :reward_max",
    "addresses": "address IN INTS(:addresses)",
}
_ENTRY = (
    "EXISTS (SELECT 1 FROM {0} WHERE {0}.experiment = :of AND consumer = :annotation_set "
    "AND {0}.{1} = e.address OFFSET 0)"
)
_IN_STATE: dict[State, str] = {
    "unseen": f"address >= {store_rows.MAX_ROWS_PER_EVENT} * (1 + "
    "(SELECT cursor FROM consumer WHERE experiment = :of AND name = :annotation_set))",
    "waiting": _ENTRY.format("waiting", "address"),
    "annotated": _ENTRY.format("annotation", "experience"),
    "rejected": _ENTRY.format("rejection", "address"),
}


def assigned_rewards(
    tx: Transaction, experiment: int, scoring: str, addresses: Sequence[int]
) -> dict[int, float]:
    """Return address -> reward of those of ``addresses`` that a scoring has rewarded."""
    rows = _ASSIGNED.fetch_all(tx, of=experiment, scoring=scoring, addresses=addresses)
    return {int(address): float(reward) for address, reward in rows}


_ASSIGNED = Statement(
    "SELECT address, reward FROM assigned_reward "
    "WHERE experiment = :of AND scoring = :scoring AND address IN INTS(:addresses)"
)


def scorings(tx: Transaction, experiment: int) -> list[str]:
    """Return the names of the scorings of an experiment, sorted."""
    return sorted(name for (name,) in _SCORINGS.fetch_all(tx, of=experiment))


_SCORINGS = Statement("SELECT DISTINCT scoring FROM assigned_reward WHERE experiment = :of")
