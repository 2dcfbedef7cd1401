"""Filtered reads of stored experiences, page by page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import ColumnElement, select

from trinity_buffer.identity import Key
from trinity_buffer.store.rows import (
    EXPERIENCE_COLUMNS,
    MAX_ROWS_PER_EVENT,
    ExperienceRow,
    experience_row,
)
from trinity_buffer.store.tables import (
    annotation,
    assigned_reward,
    consumer,
    experience,
    rejection,
    waiting,
)
from trinity_buffer.store.transaction import Transaction, among, has_row

State = Literal["unseen", "waiting", "annotated", "rejected"]


@dataclass(frozen=True, slots=True)
class Filter:
    """What an experience must be; None: anything. ``state`` is that in ``annotation_set``."""

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
    """Return the policy version of the experience that was stored last, None if nothing says."""
    query = select(experience.c.policy_version).where(experience.c.experiment == experiment)
    return tx.execute(query.order_by(experience.c.address.desc()).limit(1)).scalar()


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
        query = query.where(among(tx, experience.c.address, wanted.addresses))
    if wanted.state is not None:
        query = query.where(_is(wanted.state, wanted.annotation_set or ""))
    if not wanted.include_refused:
        query = query.where(experience.c.refused.is_(None))
    rows = tx.execute(query.order_by(experience.c.address).limit(limit))
    return [experience_row(row) for row in rows.all()]


def _keys(wanted: Filter) -> Iterator[tuple[ColumnElement[str], str | None]]:
    """Yield the columns of the keys, and what each must be.

    Where addresses are given, these are looked up: no index of the keys is to be walked.
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
    query = select(assigned_reward.c.address, assigned_reward.c.reward).where(
        assigned_reward.c.experiment == experiment,
        assigned_reward.c.scoring == scoring,
        among(tx, assigned_reward.c.address, addresses),
    )
    return {int(address): float(reward) for address, reward in tx.execute(query).all()}


def scorings(tx: Transaction, experiment: int) -> list[str]:
    """Return the names of the scorings of an experiment, sorted."""
    query = select(assigned_reward.c.scoring).where(assigned_reward.c.experiment == experiment)
    return sorted(tx.execute(query.distinct()).scalars().all())
