"""Segments that no trainer needs any more."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import CTE, Select, func, literal, select

from trinity_buffer.store.rows import MAX_ROWS_PER_EVENT
from trinity_buffer.store.tables import (
    annotation,
    archived,
    consumer,
    delivery,
    experience,
    rejection,
)
from trinity_buffer.store.tables import experiment as experiments
from trinity_buffer.store.trainer_queries import Reader, guest_name
from trinity_buffer.store.transaction import Transaction, has_row

EXPERTS_SET = "recorded"
"""The set of an expert's experiment that other experiments mix in."""


class Held(NamedTuple):
    """A segment of experiences that is still in the database.

    Attributes:
        ordinal: its number among all segments of the query, archived ones included: 1, 2, ...
        first, last: addresses of its rows.
    """

    ordinal: int
    segment: bytes
    first: int
    last: int


class Need(NamedTuple):
    """A trainer that reads the experiences of an experiment.

    Attributes:
        reader: the trainer.
        annotation_set: what it reads.
        horizon: the last step whose data may leave.
    """

    reader: Reader
    annotation_set: str
    horizon: int


def held_segments(tx: Transaction, experiment: int, *, after: int, limit: int) -> list[Held]:
    """Return the next segments behind address ``after`` that have not been archived.

    Steps from event to event: the cost grows with the number of writes, not of experiences.
    """
    heads = _heads(experiment, after)
    inside = (
        experience.c.experiment == experiment,
        experience.c.address >= heads.c.address,
        experience.c.address < _next_event(heads),
    )
    segment = (
        select(experience.c.segment)
        .where(experience.c.experiment == experiment, experience.c.address == heads.c.address)
        .correlate(heads)
        .scalar_subquery()
    )
    last = select(func.max(experience.c.address)).where(*inside).scalar_subquery()
    # A count and not an EXISTS, of which PostgreSQL makes a join: the heads must stay in order.
    gone = (
        select(func.count())
        .where(archived.c.experiment == experiment, archived.c.segment == segment)
        .scalar_subquery()
    )
    query = (
        select(heads.c.ordinal, segment, heads.c.address, last)
        .where(heads.c.address.is_not(None), gone == 0)
        .limit(limit)
    )
    rows = tx.execute(query).all()
    return sorted(Held(int(n), bytes(key), int(a), int(z)) for n, key, a, z in rows)


def archives(tx: Transaction, experiment: int) -> dict[int, list[bytes]]:
    """Return position -> segments that its event archived to a file, in the order of the log."""
    query = select(archived.c.position, archived.c.segment).where(
        archived.c.experiment == experiment, archived.c.uri.is_not(None)
    )
    segments: dict[int, list[bytes]] = {}
    for position, segment in tx.execute(query.order_by(archived.c.position, archived.c.segment)):
        segments.setdefault(int(position), []).append(bytes(segment))
    return segments


def _next_event(heads: CTE) -> Any:
    return (heads.c.address // MAX_ROWS_PER_EVENT + 1) * MAX_ROWS_PER_EVENT


def _heads(experiment: int, after: int) -> CTE:
    """Return the first address of each event with experiences behind ``after``, in order."""
    mine = experience.c.experiment == experiment
    first = select(
        func.min(experience.c.address).label("address"), literal(1).label("ordinal")
    ).where(mine, experience.c.address > after)
    heads = first.cte("heads", recursive=True)
    following = (
        select(func.min(experience.c.address))
        .where(mine, experience.c.address >= _next_event(heads))
        .scalar_subquery()
    )
    more = select(following, heads.c.ordinal + 1).where(heads.c.address.is_not(None))
    return heads.union_all(more)


def needs_of(tx: Transaction, experiment: int, *, keep_steps: int) -> list[Need]:
    """Return the readers of an experiment: its trainers, and trainers that mix it in."""
    read = experiments.alias("read")  # apart from that of the trainer
    name = select(read.c.name).where(read.c.id == experiment).scalar_subquery()
    mixes = has_row(
        delivery.c.experiment == consumer.c.experiment,
        delivery.c.consumer == consumer.c.name,
        delivery.c.source == name,
    )
    own = consumer.c.experiment == experiment
    query = (
        select(
            consumer.c.experiment,
            experiments.c.name,
            consumer.c.name.label("trainer"),
            consumer.c.config,
            consumer.c.committed_step,
            name,
        )
        .join(experiments, experiments.c.id == consumer.c.experiment)
        .where(consumer.c.kind == "trainer", own | mixes)
    )
    needs = []
    for where, of, trainer, config, committed, source in tx.execute(query).all():
        mine = int(where) == experiment
        rejecting = trainer if mine else guest_name(of, trainer)
        reader = Reader(int(where), trainer, "" if mine else source, rejecting)
        annotation_set = config["strategy"] if mine else EXPERTS_SET
        needs.append(Need(reader, annotation_set, int(committed) - keep_steps))
    return needs


def finished(
    tx: Transaction, experiment: int, held: Sequence[Held], needs: Sequence[Need]
) -> list[Held]:
    """Return those of ``held``, which follow each other, that no trainer needs any more.

    Without any trainer all are still needed.
    """
    after, last = held[0].first - 1, held[-1].last
    query = select(experience.c.address).where(
        experience.c.experiment == experiment,
        experience.c.address > after,
        experience.c.address <= last,
        experience.c.refused.is_(None),
    )
    needed = {int(address) for address in tx.execute(query).scalars()}
    done: set[int] = set()
    for number, need in enumerate(needs):
        mine = _done_by(tx, experiment, need, after, last)
        done = mine if number == 0 else done & mine
    left = sorted(needed - done)
    return [segment for segment in held if not _any_between(left, segment)] if needs else []


def _any_between(left: Sequence[int], segment: Held) -> bool:
    place = bisect_left(left, segment.first)
    return place < len(left) and left[place] <= segment.last


def _done_by(tx: Transaction, experiment: int, need: Need, after: int, last: int) -> set[int]:
    """Return the addresses in (after, last] that a trainer does not need any more."""
    reader = need.reader
    of_set = (
        annotation.c.experiment == experiment,
        annotation.c.consumer == need.annotation_set,
        annotation.c.experience > after,
        annotation.c.experience <= last,
    )
    held = has_row(
        *reader.held(), delivery.c.address == annotation.c.address, delivery.c.step <= need.horizon
    )
    left_out = has_row(
        rejection.c.experiment == experiment,
        rejection.c.consumer == reader.rejecting,
        rejection.c.address == annotation.c.address,
    )
    pending = select(annotation.c.experience).where(*of_set, ~held, ~left_out)
    decided = select(rejection.c.address).where(
        rejection.c.experiment == experiment,
        rejection.c.consumer == need.annotation_set,
        rejection.c.address > after,
        rejection.c.address <= last,
    )
    annotated = _addresses(tx, select(annotation.c.experience).where(*of_set))
    return (annotated - _addresses(tx, pending)) | _addresses(tx, decided)


def _addresses(tx: Transaction, query: Select[Any]) -> set[int]:
    return {int(address) for address in tx.execute(query).scalars()}
