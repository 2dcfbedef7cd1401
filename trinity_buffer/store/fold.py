"""The fold: how each kind of event changes the projections.

The same functions run in the transaction that records an event and when `rebuild` folds the whole
log again, so the two cannot differ. A fold reads only its event's body and the projections, and
opens no segment.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from itertools import groupby, repeat
from typing import Any, assert_never

from msgspec import structs

from trinity_buffer import events
from trinity_buffer.errors import CursorConflictError
from trinity_buffer.events import PlacedFact, kind_of
from trinity_buffer.store import counters, tables
from trinity_buffer.store.rows import SLOT_BITS, ExperienceRow, experience_row, first_address
from trinity_buffer.store.transaction import Statement, Transaction

Values = dict[str, Any]

Decided = events.ExperiencesAnnotated | events.ExperiencesRejected
"""Events that move the cursor of a strategy."""


def fold_all(tx: Transaction, experiment: int, facts: Sequence[PlacedFact]) -> None:
    """Apply events in order, with one insert for consecutive experiences, and the counters.

    Calls that share a transaction record one event each: their experiences are one insert.
    """
    stored = 0
    for kind, group in groupby(facts, key=lambda placed: type(placed.fact)):
        if kind is events.ExperiencesRecorded:
            stored += _recorded(tx, experiment, list(group))
            continue
        stored += sum(fold_rows(tx, experiment, placed) for placed in group)
    count(tx, experiment, facts, stored)


def fold_rows(tx: Transaction, experiment: int, placed: PlacedFact) -> int:  # noqa: C901, PLR0912, PLR0915 - one case per kind
    """Apply one event, except to counters; return how many rollouts it adds to sealed batches.

    Those are counted, for `stats`: planned = stored + missing. Statements run in the order of their
    ``execute_later``.
    """
    stored = 0
    at, fact = placed.position, placed.fact
    # By these names the statements ask for what an event says.
    says: Values = structs.asdict(fact) | {"of": experiment, "at": at, "actor": placed.actor}
    match fact:
        case events.ExperimentCreated() | events.ConfigurationChanged():
            _CONFIGURE.execute_later(tx, **says | {"config": _canonical(fact.config)})
        case events.ExperimentFinished():
            _FINISH.execute_later(tx, of=experiment)
        case events.BatchPlanned():
            _planned(tx, experiment, at, fact, placed.actor)
        case events.BatchSealed():
            says["batch"], is_int = str(fact.batch), isinstance(fact.batch, int)
            _SEAL.execute_later(tx, **says, is_int=is_int)
            stored = int(_COUNT_STORED.value(tx, of=experiment, sealed=says["batch"]))
        case events.ExperiencesRecorded():
            stored = _recorded(tx, experiment, [placed])
        case events.ConsumerRegistered():
            # The zeros: where a strategy and a trainer begin, each with columns of its own.
            named = (experiment, fact.consumer, fact.kind, _canonical(fact.config))
            tx.insert_many(tables.consumer, [(*named, *repeat(0, 6))])
        case events.ExperiencesAnnotated():
            _decide(tx, experiment, fact)
            name, grouped = fact.consumer, zip(fact.experiences, fact.groups, strict=True)
            rows = [
                (experiment, name, slot, address, group, fact.planned[group])
                for slot, (address, group) in enumerate(grouped, first_address(at))
            ]
            tx.insert_many(tables.annotation, rows)
        case events.ExperiencesRejected():
            if fact.by == "strategy":
                _decide(tx, experiment, fact)
            # The key of `rejection` refuses a row that this consumer has rejected already.
            name, reasons = fact.consumer, zip(fact.experiences, fact.reasons, strict=True)
            tx.insert_many(tables.rejection, [(experiment, name, *row, at) for row in reasons])
            if fact.planned_groups:
                _LEFT_OUT.execute_later(tx, **says)
        case events.BatchLeased():
            _leased(tx, says, fact)
        case events.StepDealt():
            _dealt(tx, says, fact)
        case events.StepsCommitted():
            ranks = _canonical(list(fact.rows_by_rank[-1]) if fact.rows_by_rank else None)
            _DONE.execute_later(tx, **says | {"rows_by_rank": ranks}, last=fact.steps[-1])
            _COMMITTED.execute_later(tx, **says, last=fact.steps[-1])
        case events.TrainerRewound():
            for undo in (_UNCOMMIT, _REWIND):  # `policy` and `delivery` stay as they are
                undo.execute_later(tx, **says)
        case events.PolicyPublished():
            tx.insert_many(tables.policy, [(experiment, at, fact.number, fact.uri, fact.digest)])
        case events.RewardsAssigned():
            # A later event of the same scoring replaces what an earlier one said of an experience.
            scored = {"of": experiment, "scoring": fact.scoring}
            for address, reward in zip(fact.experiences, fact.rewards, strict=True):
                _SCORE.execute_later(tx, **scored, address=address, reward=reward)
        case events.SegmentsArchived():
            gone = [(experiment, key, at, fact.uri) for key in fact.segments]
            tx.insert_many(tables.archived, gone)
        case events.SegmentsRestored():
            _RESTORE.execute_later(tx, **says)
        case events.RankJoined() | events.RanksAssembled() | events.StepPartDone():
            pass  # what ranks say to each other they read in the log itself
        case events.StreamEnded() | events.StepMeasured() | events.ChainStarted():
            pass  # read in the log itself, too
        case events.UnknownEvent():
            pass  # an old version may read a newer log
        case _:
            assert_never(fact)
    return stored


_CONFIGURE = Statement(
    "INSERT INTO configuration (experiment, position, config, finished) "
    "VALUES (:of, :at, :config, false) ON CONFLICT (experiment) DO UPDATE "
    "SET position = excluded.position, config = excluded.config, finished = excluded.finished"
)
_FINISH = Statement("UPDATE configuration SET finished = true WHERE experiment = :of")
_OF_CONSUMER = "WHERE experiment = :of AND name = :consumer"
# A planned batch keeps the actor of its plan, even if another one seals it.
_SEAL = Statement(
    "INSERT INTO batch (experiment, batch, batch_is_int, actor, sealed_at, expected) "
    "VALUES (:of, :batch, :is_int, :actor, :at, :expected) ON CONFLICT (experiment, batch) "
    "DO UPDATE SET sealed_at = excluded.sealed_at, expected = excluded.expected"
)
_LEFT_OUT = Statement(
    f"UPDATE consumer SET rejected_groups = rejected_groups + :planned_groups {_OF_CONSUMER}"
)
_OF_STEP = "WHERE experiment = :of AND consumer = :consumer AND step"
# All open steps up to the last, which gets the checkpoint.
_DONE = Statement(
    "UPDATE step SET committed_at = :at, "
    "checkpoint = CASE WHEN step = :last THEN :checkpoint ELSE checkpoint END, "
    "checkpoint_digest = CASE WHEN step = :last THEN :checkpoint_digest ELSE checkpoint_digest "
    "END, chain = CASE WHEN step = :last THEN :chain ELSE chain END, "
    "rows_by_rank = CASE WHEN step = :last THEN :rows_by_rank ELSE rows_by_rank END "
    f"{_OF_STEP} <= :last AND step > (SELECT committed_step FROM consumer {_OF_CONSUMER})"
)
_COMMITTED = Statement(f"UPDATE consumer SET committed_step = :last, token = :token {_OF_CONSUMER}")
_UNCOMMIT = Statement(
    "UPDATE step SET committed_at = NULL, checkpoint = NULL, checkpoint_digest = NULL, "
    f"chain = NULL, rows_by_rank = NULL {_OF_STEP} > :step"
)
_REWIND = Statement(f"UPDATE consumer SET committed_step = :step {_OF_CONSUMER}")
_SCORE = Statement(
    "INSERT INTO assigned_reward (experiment, scoring, address, reward) "
    "VALUES (:of, :scoring, :address, :reward) "
    "ON CONFLICT (experiment, scoring, address) DO UPDATE SET reward = excluded.reward"
)
_RESTORE = Statement("DELETE FROM archived WHERE experiment = :of AND segment IN BYTES(:segments)")


def _canonical(value: Any) -> str | None:
    """Return ``value`` as JSON with sorted keys; None as None."""
    return None if value is None else json.dumps(value, sort_keys=True, separators=(",", ":"))


def _planned(
    tx: Transaction, experiment: int, position: int, fact: events.BatchPlanned, actor: str
) -> None:
    key, size, groups = fact.batch, fact.rollouts_per_group, len(fact.tasks)
    named = (experiment, str(key), isinstance(key, int), actor)
    tx.insert_many(tables.batch, [(*named, size, position, None, None, groups, None)])
    tasks = enumerate(fact.tasks, int(LAST_ORDINAL.value(tx, of=experiment)) + 1)
    own = (experiment, str(key))
    tx.insert_many(tables.plan, [(*own, str(task), isinstance(task, int), n) for n, task in tasks])


LAST_ORDINAL = Statement("SELECT coalesce(max(ordinal), 0) FROM plan WHERE experiment = :of")


def _recorded(tx: Transaction, experiment: int, placed: Sequence[PlacedFact]) -> int:
    """Insert experiences; return how many rollouts they add to sealed batches.

    The fold of a seal counts all that came before it, and what comes later is refused as late: so
    only refused rows can add any. Those refused as invalid are asked about too; in a batch that is
    still open they add none.
    """
    facts = [
        (event.position, event.fact)
        for event in placed
        if isinstance(event.fact, events.ExperiencesRecorded)
    ]
    made = [row for position, fact in facts for row in _experience_rows(experiment, position, fact)]
    tx.insert_many(tables.experience, made)
    stored = 0
    for position, fact in facts:
        if fact.refused:
            keys, tasks, runs = fact.columns.batch, fact.columns.task, fact.columns.run
            late = [(str(keys[n]), str(tasks[n]), runs[n]) for n in fact.refused]
            stored += count_late(tx, experiment, late, first_address(position))
    return stored


def _experience_rows(
    experiment: int, position: int, fact: events.ExperiencesRecorded
) -> list[tuple[Any, ...]]:
    """Return the rows of `experience` that an event makes."""
    columns, refused = fact.columns, fact.refused
    number, base = len(columns.batch), position << SLOT_BITS
    keys = zip(columns.batch, columns.task, strict=True)
    int_keys = [isinstance(batch, int) + 2 * isinstance(task, int) for batch, task in keys]
    return list(
        zip(
            repeat(experiment, number),
            range(base, base + number),
            map(str, columns.batch),
            map(str, columns.task),
            columns.run,
            columns.step,
            columns.suffix,
            int_keys,
            # PostgreSQL takes no True for a number.
            [None if reward is None else +reward for reward in columns.reward],
            columns.policy_version,
            columns.prompt_length,
            columns.length,
            columns.trained_tokens,
            columns.finish_reason,
            map(refused.get, range(number)) if refused else repeat(None, number),
            repeat(fact.segment, number),
            columns.digest,
            strict=True,
        )
    )


def rows_recorded_by(position: int, fact: events.ExperiencesRecorded) -> list[ExperienceRow]:
    """Return the rows that an event made, from the event alone."""
    return [experience_row(row) for _, *row in _experience_rows(0, position, fact)]


def _decide(tx: Transaction, experiment: int, fact: Decided) -> None:
    """Move the cursor of a strategy to ``seen``, and delete what it decided from waiting.

    What the cursor passes over becomes waiting, but for what is decided here. What lies before the
    cursor must be waiting: a second process of the same name fails here, and its transaction rolls
    back.
    """
    name, seen, calls_then = fact.consumer, fact.seen, fact.calls
    if seen is None or calls_then is None:
        raise ValueError(f"strategy {name!r} does not say what it has seen")
    mine = {"of": experiment, "by": name}
    # The cursor as it is now, under the lock: what another process moved it over lies below it, and
    # must be waiting.
    ((cursor, calls),) = _CURSOR.fetch_all(tx, **mine)
    if fact.after not in (None, cursor):
        raise CursorConflictError(
            f"strategy {name!r}: another process of the same name went on from position "
            f"{fact.after} to {cursor}; this one goes on from there"
        )
    addresses, unseen = sorted(set(fact.experiences)), first_address(cursor + 1)
    waiting = addresses[: bisect_left(addresses, unseen)]
    if seen > cursor:
        # Inside the database: a cursor may move over many thousands of rows.
        span = {"start": unseen, "end": first_address(seen + 1)}
        _UNSEEN.execute_later(tx, **mine, **span, decided=addresses[len(waiting) :])
    _SEE.execute_later(tx, **mine, to=max(seen, cursor), called=max(calls_then, calls))
    if waiting:
        # One DELETE that returns its rows: of two processes, only one can get a row.
        missing = len(waiting) - len(TAKEN.fetch_all(tx, **mine, addresses=waiting))
        if missing:
            raise CursorConflictError(
                f"strategy {name!r}: {missing} of {len(waiting)} experiences were decided by "
                "another process of the same name; it goes on from what that one left"
            )


_STRATEGY = "WHERE experiment = :of AND name = :by"
_CURSOR = Statement(f"SELECT cursor, calls FROM consumer {_STRATEGY}")
_SEE = Statement(f"UPDATE consumer SET cursor = :to, calls = :called {_STRATEGY}")
_PASSED_OVER = (
    "INSERT INTO waiting (experiment, consumer, address) SELECT experiment, :by, address "
    "FROM experience WHERE experiment = :of AND address >= :start AND address < :end "
    "AND refused IS NULL AND "
)
_UNSEEN = Statement(
    _PASSED_OVER + "NOT address IN INTS(:decided)",
    # Hashed on all versions, where NOT = ANY would compare every row with every other.
    postgresql=_PASSED_OVER + "address NOT IN (SELECT unnest(:decided::text[]::bigint[]))",
)
TAKEN = Statement(
    "DELETE FROM waiting WHERE experiment = :of AND consumer = :by "
    "AND address IN INTS(:addresses) RETURNING address"
)


def _leased(tx: Transaction, says: Values, fact: events.BatchLeased) -> None:
    """Note which rows a trainer holds; the key of `delivery` refuses a row that it has already."""
    names = ("", *fact.sources)
    sources = [names[of] for of in fact.source] or [""] * len(fact.annotations)
    rows = zip(sources, fact.annotations, strict=True)
    of, by, step = says["of"], fact.consumer, fact.step
    tx.insert_many(tables.delivery, [(of, by, source, at, step) for source, at in rows])
    _STEP.execute_later(tx, **says, rows=len(sources), own=sources.count(""))
    _HANDED_OUT.execute_later(tx, **says)


_STEP = Statement(
    'INSERT INTO step (experiment, consumer, step, leased_at, "rows", "groups", '
    "planned_groups_so_far, manifest_digest, own_rows_so_far) "
    "VALUES (:of, :consumer, :step, :at, :rows, :num_groups, :planned_groups + coalesce("
    f"(SELECT planned_groups_so_far FROM step {_OF_STEP} = :step - 1), 0), :digest, "
    f":own + coalesce((SELECT own_rows_so_far FROM step {_OF_STEP} = :step - 1), 0))"
)
_HANDED_OUT = Statement(f"UPDATE consumer SET leased_step = :step, token = :token {_OF_CONSUMER}")


def _dealt(tx: Transaction, says: Values, fact: events.StepDealt) -> None:
    _SERVE.execute_later(tx, **says)
    if fact.dropped:
        _SHRINK.execute_later(tx, **says, rows=len(fact.order))
        sources = fact.dropped_from or ("",) * len(fact.dropped)
        for source, address in zip(sources, fact.dropped, strict=True):
            _DROP.execute_later(tx, **says, source=source, address=address)
        # planned_groups_so_far stays: explorers went on when the step was leased.
        _LESS.execute_later(tx, **says, less=sources.count(""))
    _FENCE.execute_later(tx, **says)


_SERVE = Statement(f"UPDATE step SET leased_at = :at, manifest_digest = :digest {_OF_STEP} = :step")
_SHRINK = Statement(f'UPDATE step SET "rows" = :rows, "groups" = :num_groups {_OF_STEP} = :step')
_LESS = Statement(f"UPDATE step SET own_rows_so_far = own_rows_so_far - :less {_OF_STEP} >= :step")
_DROP = Statement(
    f"DELETE FROM delivery {_OF_STEP} = :step AND source = :source AND address = :address"
)
_FENCE = Statement(f"UPDATE consumer SET token = :token {_OF_CONSUMER}")


def count(tx: Transaction, experiment: int, facts: Sequence[PlacedFact], stored: int) -> None:
    """Add to the counters what ``facts`` and the ``stored`` rollouts of sealed batches add."""
    numbers: Counter[tuple[str, str]] = Counter(("", kind_of(placed.fact)) for placed in facts)
    versions: set[int] = set()
    for placed in facts:
        match placed.fact:
            case events.ExperiencesRecorded() as fact:
                numbers["", counters.RECORDED] += len(fact.columns.batch)
                numbers.update(("", counters.rejected_for(why)) for why in fact.refused.values())
                versions.update(v for v in fact.columns.policy_version if v is not None)
            case events.ExperiencesAnnotated() as fact if fact.experiences:
                numbers[fact.consumer, counters.ANNOTATED] += len(set(fact.experiences))
                numbers[fact.consumer, counters.ROWS] += len(fact.experiences)
            case events.ExperiencesRejected() as fact:
                numbers.update((fact.consumer, counters.rejected_for(why)) for why in fact.reasons)
            case events.BatchPlanned() as fact:
                numbers["", counters.planned_by(placed.actor)] += 1
                numbers["", counters.PLANNED_GROUPS] += len(fact.tasks)
                numbers["", counters.PLANNED_ROLLOUTS] += len(fact.tasks) * fact.rollouts_per_group
            case events.BatchSealed():
                numbers["", counters.STORED_ROLLOUTS] += 0  # how many, the fold sees
            case _:
                pass  # nothing is counted but its kind
    if versions:
        numbers["", counters.LOWEST_VERSION] = min(versions)
        numbers["", counters.HIGHEST_VERSION] = max(versions)
    if stored:
        numbers["", counters.STORED_ROLLOUTS] = stored
    rows = [(experiment, by, key_of(state), state, n) for (by, state), n in numbers.items()]
    tx.insert_many(tables.counter, rows, _ADD)


_ADD = (
    " ON CONFLICT (experiment, consumer, key) DO UPDATE SET number = CASE counter.state "
    f"WHEN '{counters.LOWEST_VERSION}' THEN CASE WHEN excluded.number < counter.number "
    "THEN excluded.number ELSE counter.number END "
    f"WHEN '{counters.HIGHEST_VERSION}' THEN CASE WHEN excluded.number > counter.number "
    "THEN excluded.number ELSE counter.number END "
    "ELSE counter.number + excluded.number END"
)


@lru_cache(1024)
def key_of(state: str) -> str:
    """Return the key of a state in the index, which takes no long texts on PostgreSQL."""
    encoded = state.encode(errors="surrogatepass")
    return state if len(encoded) <= _MAX_KEY_BYTES else sha256(encoded).hexdigest()


_MAX_KEY_BYTES = 200


def count_late(
    tx: Transaction, experiment: int, runs: Sequence[tuple[str, str, int]], first: int
) -> int:
    """Count late runs that fill their sealed batches: planned ones that were not stored yet.

    Args:
        tx: a transaction.
        experiment: its key.
        runs: (batch, task, run) of an event, one or more.
        first: the lowest address of that event.
    """
    mine = {"of": experiment, "keys": sorted({key for key, _, _ in runs})}
    before = _STORED_OF.value(tx, **mine)
    _LATE.execute_later(tx, **mine, first=first, rows=sorted(set(runs)))
    return int(_STORED_OF.value(tx, **mine) or 0) - int(before or 0)


_COUNT_STORED = Statement(
    f"UPDATE batch SET stored_rollouts = {counters.STORED} "
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
