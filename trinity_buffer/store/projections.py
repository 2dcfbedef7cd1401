"""The fold: how each kind of event changes the projections.

The same functions run in the transaction that records an event and when `rebuild` folds the whole
log again, so the two cannot differ. A fold reads nothing but its event's body and the projections,
and opens no segment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import groupby
from typing import Any

from sqlalchemy import Text, bindparam, delete, func, insert, select, update

from trinity_buffer.errors import CursorConflictError
from trinity_buffer.store import event_rows
from trinity_buffer.store.address import first_address
from trinity_buffer.store.dialect import among_given, given, upsert
from trinity_buffer.store.prepared import Prepared
from trinity_buffer.store.tables import (
    PROJECTIONS,
    annotation,
    archived,
    assigned_reward,
    batch,
    configuration,
    consumer,
    delivery,
    experience,
    plan,
    policy,
    rejection,
    step,
    waiting,
)
from trinity_buffer.store.transaction import Transaction

Body = Mapping[str, Any]


def fold(
    tx: Transaction, experiment: int, position: int, kind: str, body: Body, actor: str
) -> None:
    """Apply one event. An unknown kind changes nothing: an old version may read a newer log."""
    handler = _FOLDS.get(kind)
    if handler is not None:
        handler(tx, experiment, position, body, actor)


def fold_all(tx: Transaction, experiment: int, facts: Sequence[tuple[int, str, Body, str]]) -> None:
    """Apply events, as (position, kind, body, actor), in order; neighbours of a kind together.

    Calls that share a transaction record one event each: their experiences are one insert.
    """
    for kind, group in groupby(facts, key=lambda fact: fact[1]):
        some = list(group)
        if kind == "ExperiencesRecorded":
            rows = [
                row
                for at, _, body, _ in some
                for row in event_rows.experience_rows(experiment, at, body)
            ]
            tx.add(experience, rows)
            continue
        for position, _, body, actor in some:
            fold(tx, experiment, position, kind, body, actor)


def clear(tx: Transaction, experiment: int) -> None:
    """Delete every projection of the experiment, before `fold` makes them again."""
    for table in PROJECTIONS:
        tx.execute(delete(table).where(table.c.experiment == experiment))


def _configured(tx: Transaction, experiment: int, position: int, body: Body, actor: str) -> None:
    row = {
        "experiment": experiment,
        "position": position,
        "config": body["config"],
        "finished": False,
    }
    statement = upsert(tx, configuration).values(row)
    changed = {"position": position, "config": body["config"], "finished": False}
    tx.execute(statement.on_conflict_do_update(index_elements=["experiment"], set_=changed))


def _finished(tx: Transaction, experiment: int, position: int, body: Body, actor: str) -> None:
    tx.execute(
        update(configuration).where(configuration.c.experiment == experiment).values(finished=True)
    )


def _planned(tx: Transaction, experiment: int, position: int, body: Body, actor: str) -> None:
    key = body["batch"]
    row = {
        "experiment": experiment,
        "batch": str(key),
        "batch_is_int": isinstance(key, int),
        "actor": actor,
        "rollouts_per_group": body["rollouts_per_group"],
        "planned_at": position,
        "sealed_at": None,
        "expected": None,
    }
    tx.execute(insert(batch), row)
    last = select(func.coalesce(func.max(plan.c.ordinal), 0)).where(plan.c.experiment == experiment)
    first = int(tx.execute(last).scalar_one()) + 1
    tx.add(plan, event_rows.plan_rows(experiment, body, first))


def _sealed(tx: Transaction, experiment: int, position: int, body: Body, actor: str) -> None:
    key, sealed = body["batch"], {"sealed_at": position, "expected": body["expected"]}
    row = {
        "experiment": experiment,
        "batch": str(key),
        "batch_is_int": isinstance(key, int),
        "actor": actor,
        **sealed,
    }
    statement = upsert(tx, batch).values(row)
    tx.execute(statement.on_conflict_do_update(index_elements=["experiment", "batch"], set_=sealed))


def _recorded(tx: Transaction, experiment: int, position: int, body: Body, actor: str) -> None:
    tx.add(experience, event_rows.experience_rows(experiment, position, body))


def _registered(tx: Transaction, experiment: int, position: int, body: Body, actor: str) -> None:
    numbers = dict.fromkeys(
        ("cursor", "calls", "rejected_groups", "token", "leased_step", "committed_step"), 0
    )
    row = {
        "experiment": experiment,
        "name": body["consumer"],
        "kind": body["kind"],
        "config": body["config"],
    }
    tx.execute(insert(consumer), row | numbers)


def _see(tx: Transaction, experiment: int, body: Body) -> None:
    """Move the cursor of a strategy to ``seen``; what lies between becomes waiting."""
    name, seen = body["consumer"], body["seen"]
    mine = {"of": experiment, "by": name}
    ((cursor, calls),) = _CURSOR.rows(tx, **mine)
    if body.get("after", cursor) != cursor:
        raise CursorConflictError(
            f"strategy {name!r}: another process of the same name went on from position "
            f"{body['after']} to {cursor}; this one goes on from there"
        )
    if seen > cursor:
        end = first_address(seen + 1)
        _UNSEEN.rows(tx, **mine, start=first_address(cursor + 1), end=end)
    _SEE.rows(tx, **mine, to=max(seen, cursor), called=max(body["calls"], calls))


_OF_CONSUMER = (consumer.c.experiment == bindparam("of"), consumer.c.name == bindparam("by"))
_CURSOR = Prepared(select(consumer.c.cursor, consumer.c.calls).where(*_OF_CONSUMER))
_SEE = Prepared(
    update(consumer).where(*_OF_CONSUMER).values(cursor=bindparam("to"), calls=bindparam("called"))
)
_MORE = consumer.c.rejected_groups + bindparam("more")
_LEFT_OUT = Prepared(update(consumer).where(*_OF_CONSUMER).values(rejected_groups=_MORE))
_UNSEEN = Prepared(
    insert(waiting).from_select(
        ["experiment", "consumer", "address"],
        select(experience.c.experiment, bindparam("by", type_=Text()), experience.c.address).where(
            experience.c.experiment == bindparam("of"),
            experience.c.address >= bindparam("start"),
            experience.c.address < bindparam("end"),
            experience.c.refused.is_(None),
        ),
    )
)


@cache
def _taken(dialect: str) -> Prepared:
    mine = (waiting.c.experiment == bindparam("of"), waiting.c.consumer == bindparam("by"))
    some = among_given(dialect, waiting.c.address, "addresses")
    return Prepared(delete(waiting).where(*mine, some).returning(waiting.c.address))


def _decide(tx: Transaction, experiment: int, name: str, addresses: list[int]) -> None:
    """Take ``addresses`` out of waiting. Each can be taken once: who comes second fails here."""
    if not addresses:
        return
    mine = {"of": experiment, "by": name}
    gone = _taken(tx.dialect.name).rows(tx, **mine, addresses=given(tx, addresses))
    if len(gone) != len(addresses):
        raise CursorConflictError(
            f"strategy {name!r}: {len(addresses) - len(gone)} of {len(addresses)} experiences "
            "were decided by another process of the same name; it goes on from what that one left"
        )


def _annotated(tx: Transaction, experiment: int, position: int, body: Body, actor: str) -> None:
    _see(tx, experiment, body)
    _decide(tx, experiment, body["consumer"], sorted(set(body["experiences"])))
    tx.add(annotation, event_rows.annotation_rows(experiment, position, body))


def _rejected(tx: Transaction, experiment: int, position: int, body: Body, actor: str) -> None:
    name, addresses = body["consumer"], body["experiences"]
    if body["by"] == "strategy":
        _see(tx, experiment, body)
        _decide(tx, experiment, name, addresses)
    tx.add(rejection, event_rows.rejection_rows(experiment, position, body))
    if body["planned_groups"]:
        _LEFT_OUT.rows(tx, of=experiment, by=name, more=body["planned_groups"])


def _leased(tx: Transaction, experiment: int, position: int, body: Body, actor: str) -> None:
    name, number = body["consumer"], body["step"]
    addresses = body["annotations"]
    before = _GROUPS_SO_FAR.value(tx, of=experiment, by=name, at=number - 1)
    so_far = int(before or 0) + body["planned_groups"]
    size = (len(addresses), body["num_groups"], so_far)
    row = (experiment, name, number, position, *size, body["digest"], None, None, None)
    tx.add(step, [row])
    tx.add(delivery, event_rows.delivery_rows(experiment, body))
    _HANDED_OUT.rows(tx, of=experiment, by=name, number=number, fence=body["token"])


_OF_STEP = (step.c.experiment == bindparam("of"), step.c.consumer == bindparam("by"))
_GROUPS_SO_FAR = Prepared(
    select(step.c.planned_groups_so_far).where(*_OF_STEP, step.c.step == bindparam("at"))
)
_HANDED_OUT = Prepared(
    update(consumer)
    .where(*_OF_CONSUMER)
    .values(leased_step=bindparam("number"), token=bindparam("fence"))
)


def _committed(tx: Transaction, experiment: int, position: int, body: Body, actor: str) -> None:
    name, last = body["consumer"], body["steps"][-1]
    mine = (step.c.experiment == experiment, step.c.consumer == name)
    new = (
        update(step)
        .where(*mine, step.c.step <= last, step.c.committed_at.is_(None))
        .values(committed_at=position)
    )
    tx.execute(new)
    checkpoint = {"checkpoint": body["checkpoint"], "checkpoint_digest": body["checkpoint_digest"]}
    tx.execute(update(step).where(*mine, step.c.step == last).values(checkpoint))
    mine = (consumer.c.experiment == experiment, consumer.c.name == name)
    done = {"committed_step": last, "token": body["token"]}
    tx.execute(update(consumer).where(*mine).values(done))


def _rewound(tx: Transaction, experiment: int, position: int, body: Body, actor: str) -> None:
    name, kept = body["consumer"], body["step"]
    mine = (step.c.experiment == experiment, step.c.consumer == name, step.c.step > kept)
    superseded = {"committed_at": None, "checkpoint": None, "checkpoint_digest": None}
    tx.execute(update(step).where(*mine).values(superseded))
    live = (consumer.c.experiment == experiment, consumer.c.name == name)
    tx.execute(update(consumer).where(*live).values(committed_step=kept))


def _published(tx: Transaction, experiment: int, position: int, body: Body, actor: str) -> None:
    row = {"experiment": experiment, "position": position, "version": body["version"]}
    tx.execute(insert(policy), row | {"uri": body["uri"], "digest": body["digest"]})


def _scored(tx: Transaction, experiment: int, position: int, body: Body, actor: str) -> None:
    """A later event of the same scoring replaces what an earlier one said of an experience."""
    rows = [
        {"experiment": experiment, "scoring": body["scoring"], "address": address, "reward": reward}
        for address, reward in zip(body["experiences"], body["rewards"], strict=True)
    ]
    statement = upsert(tx, assigned_reward)
    keys = ["experiment", "scoring", "address"]
    replace = {"reward": statement.excluded.reward}
    tx.execute(statement.on_conflict_do_update(index_elements=keys, set_=replace), rows)


def _archived(tx: Transaction, experiment: int, position: int, body: Body, actor: str) -> None:
    rows = [
        {"experiment": experiment, "segment": key, "position": position, "uri": body["uri"]}
        for key in body["segments"]
    ]
    tx.execute(insert(archived), rows)


def _noted(tx: Transaction, experiment: int, position: int, body: Body, actor: str) -> None:
    """Change nothing: the event matters to those who read the log itself."""


_FOLDS: dict[str, Callable[[Transaction, int, int, Body, str], None]] = {
    "ExperimentCreated": _configured,
    "ConfigurationChanged": _configured,
    "ExperimentFinished": _finished,
    "BatchPlanned": _planned,
    "BatchSealed": _sealed,
    "ExperiencesRecorded": _recorded,
    "ConsumerRegistered": _registered,
    "ExperiencesAnnotated": _annotated,
    "ExperiencesRejected": _rejected,
    "BatchLeased": _leased,
    "StepsCommitted": _committed,
    "TrainerRewound": _rewound,
    "PolicyPublished": _published,
    # How the ranks of a trainer find each other, and tell that their part of a step is done.
    "RankJoined": _noted,
    "RanksAssembled": _noted,
    "StepPartDone": _noted,
    "StreamEnded": _noted,
    "RewardsAssigned": _scored,
    "SegmentsArchived": _archived,
}
EVENT_KINDS = tuple(_FOLDS)
