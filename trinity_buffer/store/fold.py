"""The fold: how each kind of event changes the projections.

The same functions run in the transaction that records an event and when `rebuild` folds the whole
log again, so the two cannot differ. A fold reads only its event's body and the projections, and
opens no segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, repeat
from typing import Any, assert_never

from msgspec import structs

from trinity_buffer.errors import CursorConflictError
from trinity_buffer.events import (
    BatchLeased,
    BatchPlanned,
    BatchSealed,
    ChainStarted,
    ConfigurationChanged,
    ConsumerRegistered,
    ExperiencesAnnotated,
    ExperiencesRecorded,
    ExperiencesRejected,
    ExperimentCreated,
    ExperimentFinished,
    PlacedFact,
    PolicyPublished,
    RankJoined,
    RanksAssembled,
    RewardsAssigned,
    SegmentsArchived,
    SegmentsRestored,
    StepDealt,
    StepMeasured,
    StepPartDone,
    StepsCommitted,
    StreamEnded,
    TrainerRewound,
    UnknownEvent,
)
from trinity_buffer.store import counters
from trinity_buffer.store.rows import SLOT_BITS, first_address
from trinity_buffer.store.tables import (
    annotation,
    archived,
    batch,
    canonical,
    consumer,
    delivery,
    experience,
    plan,
    policy,
    rejection,
)
from trinity_buffer.store.transaction import Statement, Transaction

Values = dict[str, Any]

Decided = ExperiencesAnnotated | ExperiencesRejected
"""Events that move the cursor of a strategy."""


def fold_all(tx: Transaction, experiment: int, facts: Sequence[PlacedFact]) -> None:
    """Apply events in order, with one insert for consecutive experiences, and the counters.

    Calls that share a transaction record one event each: their experiences are one insert.
    """
    stored = 0
    for kind, group in groupby(facts, key=lambda placed: type(placed.fact)):
        if kind is ExperiencesRecorded:
            stored += _recorded(tx, experiment, list(group))
            continue
        stored += sum(fold_rows(tx, experiment, placed) for placed in group)
    counters.add(tx, experiment, facts, stored)


def fold_rows(tx: Transaction, experiment: int, placed: PlacedFact) -> int:  # noqa: C901, PLR0912, PLR0915 - one case per kind
    """Apply one event, except to counters; return how many rollouts it adds to sealed batches."""
    stored = 0
    at, fact = placed.position, placed.fact
    # By these names the statements ask for what an event says.
    says: Values = structs.asdict(fact) | {"of": experiment, "at": at, "actor": placed.actor}
    match fact:
        case ExperimentCreated() | ConfigurationChanged():
            _CONFIGURE.execute_later(tx, **says | {"config": canonical(fact.config)})
        case ExperimentFinished():
            _FINISH.execute_later(tx, of=experiment)
        case BatchPlanned():
            _planned(tx, experiment, at, fact, placed.actor)
        case BatchSealed():
            key, is_int = str(fact.batch), isinstance(fact.batch, int)
            _SEAL.execute_later(tx, **says | {"batch": key}, is_int=is_int)
            stored = counters.count_stored(tx, experiment, key)
        case ExperiencesRecorded():
            stored = _recorded(tx, experiment, [placed])
        case ConsumerRegistered():
            # The zeros: where a strategy and a trainer begin, each with columns of its own.
            named = (experiment, fact.consumer, fact.kind, canonical(fact.config))
            tx.insert_many(consumer, [(*named, *repeat(0, 6))])
        case ExperiencesAnnotated():
            _see(tx, experiment, fact)
            decide(tx, experiment, fact.consumer, sorted(set(fact.experiences)))
            name, grouped = fact.consumer, zip(fact.experiences, fact.groups, strict=True)
            rows = [
                (experiment, name, slot, address, group, fact.planned[group])
                for slot, (address, group) in enumerate(grouped, first_address(at))
            ]
            tx.insert_many(annotation, rows)
        case ExperiencesRejected():
            if fact.by == "strategy":
                _see(tx, experiment, fact)
                decide(tx, experiment, fact.consumer, fact.experiences)
            reasons = zip(fact.experiences, fact.reasons, strict=True)
            tx.insert_many(rejection, [(experiment, fact.consumer, *row, at) for row in reasons])
            if fact.planned_groups:
                _LEFT_OUT.execute_later(tx, **says)
        case BatchLeased():
            _leased(tx, says, fact)
        case StepDealt():
            _dealt(tx, says, fact)
        case StepsCommitted():
            ranks = canonical(list(fact.rows_by_rank[-1]) if fact.rows_by_rank else None)
            _DONE.execute_later(tx, **says | {"rows_by_rank": ranks}, last=fact.steps[-1])
            _COMMITTED.execute_later(tx, **says, last=fact.steps[-1])
        case TrainerRewound():
            for undo in (_UNCOMMIT, _REWIND):
                undo.execute_later(tx, **says)
        case PolicyPublished():
            tx.insert_many(policy, [(experiment, at, fact.number, fact.uri, fact.digest)])
        case RewardsAssigned():
            # A later event of the same scoring replaces what an earlier one said of an experience.
            scored = {"of": experiment, "scoring": fact.scoring}
            for address, reward in zip(fact.experiences, fact.rewards, strict=True):
                _SCORE.execute_later(tx, **scored, address=address, reward=reward)
        case SegmentsArchived():
            gone = [(experiment, key, at, fact.uri) for key in fact.segments]
            tx.insert_many(archived, gone)
        case SegmentsRestored():
            _RESTORE.execute_later(tx, **says)
        case RankJoined() | RanksAssembled() | StepPartDone() | StreamEnded():
            pass  # what ranks say to each other they read in the log itself
        case StepMeasured():
            pass  # found beside the commit; in no projection
        case ChainStarted():
            pass  # it proves the log, and is in no projection
        case UnknownEvent():
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
# A planned batch keeps the actor of its plan, even if another one seals it.
_SEAL = Statement(
    "INSERT INTO batch (experiment, batch, batch_is_int, actor, sealed_at, expected) "
    "VALUES (:of, :batch, :is_int, :actor, :at, :expected) ON CONFLICT (experiment, batch) "
    "DO UPDATE SET sealed_at = excluded.sealed_at, expected = excluded.expected"
)
_LEFT_OUT = Statement(
    "UPDATE consumer SET rejected_groups = rejected_groups + :planned_groups "
    "WHERE experiment = :of AND name = :consumer"
)
_OF_STEP = "WHERE experiment = :of AND consumer = :consumer AND step"
# All open steps up to the last, which gets the checkpoint.
_DONE = Statement(
    "UPDATE step SET committed_at = :at, "
    "checkpoint = CASE WHEN step = :last THEN :checkpoint ELSE checkpoint END, "
    "checkpoint_digest = CASE WHEN step = :last THEN :checkpoint_digest ELSE checkpoint_digest "
    "END, chain = CASE WHEN step = :last THEN :chain ELSE chain END, "
    "rows_by_rank = CASE WHEN step = :last THEN :rows_by_rank ELSE rows_by_rank END "
    f"{_OF_STEP} <= :last AND step > "
    "(SELECT committed_step FROM consumer WHERE experiment = :of AND name = :consumer)"
)
_COMMITTED = Statement(
    "UPDATE consumer SET committed_step = :last, token = :token "
    "WHERE experiment = :of AND name = :consumer"
)
_UNCOMMIT = Statement(
    "UPDATE step SET committed_at = NULL, checkpoint = NULL, checkpoint_digest = NULL, "
    f"chain = NULL, rows_by_rank = NULL {_OF_STEP} > :step"
)
_REWIND = Statement(
    "UPDATE consumer SET committed_step = :step WHERE experiment = :of AND name = :consumer"
)
_SCORE = Statement(
    "INSERT INTO assigned_reward (experiment, scoring, address, reward) "
    "VALUES (:of, :scoring, :address, :reward) "
    "ON CONFLICT (experiment, scoring, address) DO UPDATE SET reward = excluded.reward"
)
_RESTORE = Statement("DELETE FROM archived WHERE experiment = :of AND segment IN BYTES(:segments)")


def _planned(
    tx: Transaction, experiment: int, position: int, fact: BatchPlanned, actor: str
) -> None:
    key, size, groups = fact.batch, fact.rollouts_per_group, len(fact.tasks)
    named = (experiment, str(key), isinstance(key, int), actor)
    tx.insert_many(batch, [(*named, size, position, None, None, groups, None)])
    tasks = enumerate(fact.tasks, int(LAST_ORDINAL.value(tx, of=experiment)) + 1)
    own = (experiment, str(key))
    tx.insert_many(plan, [(*own, str(task), isinstance(task, int), n) for n, task in tasks])


LAST_ORDINAL = Statement("SELECT coalesce(max(ordinal), 0) FROM plan WHERE experiment = :of")


def _recorded(tx: Transaction, experiment: int, placed: Sequence[PlacedFact]) -> int:
    """Insert experiences; return how many rollouts they add to sealed batches.

    The fold of a seal counts all that came before it, and what comes later is refused as late: so
    only refused rows can add any. Those refused as invalid are asked about too; in a batch that is
    still open they add none.
    """
    facts = [event.fact for event in placed if isinstance(event.fact, ExperiencesRecorded)]
    made = []
    for event, fact in zip(placed, facts, strict=True):
        made += _experience_rows(experiment, event.position, fact)
    tx.insert_many(experience, made)
    stored = 0
    for event, fact in zip(placed, facts, strict=True):
        if not fact.refused:
            continue
        columns = fact.columns
        late = [(str(columns.batch[n]), str(columns.task[n]), columns.run[n]) for n in fact.refused]
        stored += counters.count_late(tx, experiment, late, first_address(event.position))
    return stored


def _experience_rows(
    experiment: int, position: int, fact: ExperiencesRecorded
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
            columns.reward,
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


def _see(tx: Transaction, experiment: int, fact: Decided) -> None:
    """Move the cursor of a strategy to ``seen``; what lies between becomes waiting."""
    name, seen, calls_then = fact.consumer, fact.seen, fact.calls
    if seen is None or calls_then is None:
        raise ValueError(f"strategy {name!r} does not say what it has seen")
    mine = {"of": experiment, "by": name}
    ((cursor, calls),) = _CURSOR.fetch_all(tx, **mine)
    if fact.after not in (None, cursor):
        raise CursorConflictError(
            f"strategy {name!r}: another process of the same name went on from position "
            f"{fact.after} to {cursor}; this one goes on from there"
        )
    if seen > cursor:
        # Inside the database: a cursor may move over many thousands of rows.
        end = first_address(seen + 1)
        _UNSEEN.execute_later(tx, **mine, start=first_address(cursor + 1), end=end)
    _SEE.execute_later(tx, **mine, to=max(seen, cursor), called=max(calls_then, calls))


_CURSOR = Statement("SELECT cursor, calls FROM consumer WHERE experiment = :of AND name = :by")
_SEE = Statement(
    "UPDATE consumer SET cursor = :to, calls = :called WHERE experiment = :of AND name = :by"
)
_UNSEEN = Statement(
    "INSERT INTO waiting (experiment, consumer, address) SELECT experiment, :by, address "
    "FROM experience WHERE experiment = :of AND address >= :start AND address < :end "
    "AND refused IS NULL"
)
_TAKEN = Statement(
    "DELETE FROM waiting WHERE experiment = :of AND consumer = :by "
    "AND address IN INTS(:addresses) RETURNING address"
)


def decide(tx: Transaction, experiment: int, name: str, addresses: Sequence[int]) -> None:
    """Delete ``addresses`` from waiting. Each is there once, so a second process fails here."""
    if not addresses:
        return
    mine = {"of": experiment, "by": name}
    # One DELETE that returns its rows: of two processes, only one can get a row.
    gone = _TAKEN.fetch_all(tx, **mine, addresses=addresses)
    if len(gone) != len(addresses):
        raise CursorConflictError(
            f"strategy {name!r}: {len(addresses) - len(gone)} of {len(addresses)} experiences "
            "were decided by another process of the same name; it goes on from what that one left"
        )


def _leased(tx: Transaction, says: Values, fact: BatchLeased) -> None:
    names = ("", *fact.sources)
    sources = [names[of] for of in fact.source] or [""] * len(fact.annotations)
    rows = zip(sources, fact.annotations, strict=True)
    named = (says["of"], fact.consumer)
    tx.insert_many(delivery, [(*named, *row, fact.step) for row in rows])
    _STEP.execute_later(tx, **says, rows=len(sources), own=sources.count(""))
    _HANDED_OUT.execute_later(tx, **says)


_STEP = Statement(
    'INSERT INTO step (experiment, consumer, step, leased_at, "rows", "groups", '
    "planned_groups_so_far, manifest_digest, own_rows_so_far) "
    "VALUES (:of, :consumer, :step, :at, :rows, :num_groups, :planned_groups + coalesce("
    f"(SELECT planned_groups_so_far FROM step {_OF_STEP} = :step - 1), 0), :digest, "
    f":own + coalesce((SELECT own_rows_so_far FROM step {_OF_STEP} = :step - 1), 0))"
)
_HANDED_OUT = Statement(
    "UPDATE consumer SET leased_step = :step, token = :token "
    "WHERE experiment = :of AND name = :consumer"
)


def _dealt(tx: Transaction, says: Values, fact: StepDealt) -> None:
    _SERVE.execute_later(tx, **says)
    if fact.dropped:
        _SHRINK.execute_later(tx, **says, rows=len(fact.order))
        sources = fact.dropped_from or ("",) * len(fact.dropped)
        for source, address in zip(sources, fact.dropped, strict=True):
            _DROP.execute_later(tx, **says, source=source, address=address)
        # planned_groups_so_far stays: explorers were let go on when the step was leased.
        _LESS.execute_later(tx, **says, less=sources.count(""))
    _FENCE.execute_later(tx, **says)


_SERVE = Statement(f"UPDATE step SET leased_at = :at, manifest_digest = :digest {_OF_STEP} = :step")
_SHRINK = Statement(f'UPDATE step SET "rows" = :rows, "groups" = :num_groups {_OF_STEP} = :step')
_LESS = Statement(f"UPDATE step SET own_rows_so_far = own_rows_so_far - :less {_OF_STEP} >= :step")
_DROP = Statement(
    f"DELETE FROM delivery {_OF_STEP} = :step AND source = :source AND address = :address"
)
_FENCE = Statement("UPDATE consumer SET token = :token WHERE experiment = :of AND name = :consumer")
