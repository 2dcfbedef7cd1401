"""What writers and strategies ask the projections. Reads only; an open transaction comes first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Select, and_, exists, func, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from trinity_buffer.identity import EID, Key
from trinity_buffer.store.address import first_address
from trinity_buffer.store.dialect import among
from trinity_buffer.store.rows import (
    EXPERIENCE_COLUMNS,
    BatchRow,
    ConsumerRow,
    ExperienceRow,
    experience_row,
    typed,
)
from trinity_buffer.store.tables import (
    batch,
    configuration,
    consumer,
    experience,
    plan,
    policy,
    waiting,
)

EID_CHUNK = 4_000
"""EIDs per statement: 6 variables each, below the 30,000 that one statement may bind."""


async def config_of(tx: AsyncConnection, experiment: int) -> tuple[dict[str, Any], bool] | None:
    """Return (configuration, whether it is finished), or None before the first event."""
    query = select(configuration.c.config, configuration.c.finished).where(
        configuration.c.experiment == experiment
    )
    row = (await tx.execute(query)).one_or_none()
    return None if row is None else (dict(row.config), bool(row.finished))


async def stored(
    tx: AsyncConnection, experiment: int, eids: Sequence[EID]
) -> dict[EID, tuple[int, bytes]]:
    """Return (address, content digest) of those of ``eids`` that are stored."""
    columns = (
        experience.c.batch,
        experience.c.task,
        experience.c.run,
        experience.c.step,
        experience.c.suffix,
    )
    wanted = {(str(e.batch), str(e.task), e.run, e.step, e.suffix): e for e in eids}
    found: dict[EID, tuple[int, bytes]] = {}
    keys = list(wanted)
    for start in range(0, len(keys), EID_CHUNK):
        query = select(experience.c.address, experience.c.digest, *columns).where(
            experience.c.experiment == experiment,
            tuple_(*columns).in_(keys[start : start + EID_CHUNK]),
        )
        for address, digest, *key in (await tx.execute(query)).all():
            found[wanted[tuple(key)]] = (int(address), bytes(digest))
    return found


async def sealed_among(tx: AsyncConnection, experiment: int, batches: Sequence[str]) -> set[str]:
    """Return which of ``batches`` are sealed."""
    query = select(batch.c.batch).where(
        batch.c.experiment == experiment,
        batch.c.sealed_at.is_not(None),
        among(tx, batch.c.batch, batches),
    )
    return set((await tx.execute(query)).scalars())


async def batch_row(tx: AsyncConnection, experiment: int, key: Key) -> BatchRow | None:
    """Return the batch with its planned tasks, or None if it was neither planned nor sealed."""
    rows = await batches(tx, experiment, [str(key)])
    return rows.get(str(key))


async def batches(tx: AsyncConnection, experiment: int, keys: Sequence[str]) -> dict[str, BatchRow]:
    """Return those of the batches ``keys`` that were planned or sealed."""
    mine = (plan.c.experiment == experiment, among(tx, plan.c.batch, keys))
    tasks: dict[str, list[Key]] = {}
    # Sorted here: asked to, SQLite walks through all plans of the run in their order.
    query: Select[Any] = select(
        plan.c.ordinal, plan.c.batch, plan.c.task, plan.c.task_is_int
    ).where(*mine)
    for _, key, task, is_int in sorted(map(tuple, (await tx.execute(query)).all())):
        tasks.setdefault(key, []).append(typed(task, is_int=is_int))
    query = select(batch).where(batch.c.experiment == experiment, among(tx, batch.c.batch, keys))
    return {
        row.batch: BatchRow(
            typed(row.batch, is_int=row.batch_is_int),
            row.actor,
            row.rollouts_per_group,
            row.planned_at,
            row.sealed_at,
            row.expected,
            tuple(tasks.get(row.batch, ())),
        )
        for row in (await tx.execute(query)).all()
    }


async def batches_of_actor(
    tx: AsyncConnection, experiment: int, actor: str
) -> tuple[int, list[str]]:
    """Return how many batches ``actor`` planned, and which of them are not sealed, oldest first."""
    mine = (
        batch.c.experiment == experiment,
        batch.c.actor == actor,
        batch.c.planned_at.is_not(None),
    )
    number = int(
        (await tx.execute(select(func.count()).select_from(batch).where(*mine))).scalar_one()
    )
    query = (
        select(batch.c.batch).where(*mine, batch.c.sealed_at.is_(None)).order_by(batch.c.planned_at)
    )
    return number, list((await tx.execute(query)).scalars())


async def runs_of(tx: AsyncConnection, experiment: int, key: Key) -> set[tuple[str, int]]:
    """Return the (task as text, run) pairs of a batch that are stored."""
    query = (
        select(experience.c.task, experience.c.run)
        .where(experience.c.experiment == experiment, experience.c.batch == str(key))
        .distinct()
    )
    return {(task, int(run)) for task, run in (await tx.execute(query)).all()}


async def count_in_batch(tx: AsyncConnection, experiment: int, key: Key) -> int:
    """Return how many experiences of a batch are stored and not refused as late."""
    # In two: in one, SQLite takes the primary key and looks at every experience of the run.
    of_batch = select(experience.c.address).where(
        experience.c.experiment == experiment, experience.c.batch == str(key)
    )
    query = (
        select(func.count())
        .select_from(experience)
        .where(
            experience.c.experiment == experiment,
            experience.c.address.in_(of_batch),
            experience.c.refused.is_distinct_from("late"),
        )
    )
    return int((await tx.execute(query)).scalar_one())


async def consumers(tx: AsyncConnection, experiment: int) -> dict[str, ConsumerRow]:
    """Return all consumers of the experiment."""
    query = select(consumer).where(consumer.c.experiment == experiment).order_by(consumer.c.name)
    return {row.name: ConsumerRow(*row[1:]) for row in (await tx.execute(query)).all()}


async def consumer_row(tx: AsyncConnection, experiment: int, name: str) -> ConsumerRow | None:
    """Return one consumer, or None."""
    query = select(consumer).where(consumer.c.experiment == experiment, consumer.c.name == name)
    row = (await tx.execute(query)).one_or_none()
    return None if row is None else ConsumerRow(*row[1:])


async def waiting_rows(
    tx: AsyncConnection, experiment: int, name: str, *, after: int, up_to: int, limit: int
) -> list[ExperienceRow]:
    """Return what strategy ``name`` has seen and not decided, above ``after``, by address."""
    query = (
        select(*EXPERIENCE_COLUMNS)
        .join(
            waiting,
            and_(
                waiting.c.experiment == experience.c.experiment,
                waiting.c.address == experience.c.address,
            ),
        )
        .where(
            waiting.c.experiment == experiment,
            waiting.c.consumer == name,
            waiting.c.address > after,
            waiting.c.address < first_address(up_to + 1),
        )
        .order_by(waiting.c.address)
        .limit(limit)
    )
    return [experience_row(row) for row in (await tx.execute(query)).all()]


async def experience_rows(
    tx: AsyncConnection, experiment: int, addresses: Sequence[int]
) -> list[ExperienceRow]:
    """Return the experiences at ``addresses``, in order of address."""
    mine = (experience.c.experiment == experiment, among(tx, experience.c.address, addresses))
    query = select(*EXPERIENCE_COLUMNS).where(*mine).order_by(experience.c.address)
    return [experience_row(row) for row in (await tx.execute(query)).all()]


async def decided_groups(
    tx: AsyncConnection,
    experiment: int,
    name: str,
    groups: Sequence[tuple[str, str]],
    *,
    cursor: int,
) -> set[tuple[str, str]]:
    """Return which groups have experiences up to ``cursor`` that the strategy has decided."""
    decided: set[tuple[str, str]] = set()
    still = exists().where(
        waiting.c.experiment == experiment,
        waiting.c.consumer == name,
        waiting.c.address == experience.c.address,
    )
    for start in range(0, len(groups), EID_CHUNK):
        query = (
            select(experience.c.batch, experience.c.task)
            .where(
                experience.c.experiment == experiment,
                tuple_(experience.c.batch, experience.c.task).in_(
                    groups[start : start + EID_CHUNK]
                ),
                experience.c.address < first_address(cursor + 1),
                experience.c.refused.is_(None),
                ~still,
            )
            .distinct()
        )
        decided.update((row.batch, row.task) for row in (await tx.execute(query)).all())
    return decided


async def newest_policy(tx: AsyncConnection, experiment: int) -> tuple[int, str, str, int] | None:
    """Return (version, uri, digest, position) of the policy that was published last, or None."""
    query = select(policy.c.version, policy.c.uri, policy.c.digest, policy.c.position)
    query = (
        query.where(policy.c.experiment == experiment).order_by(policy.c.position.desc()).limit(1)
    )
    row = (await tx.execute(query)).one_or_none()
    return None if row is None else (int(row[0]), row[1], row[2], int(row[3]))


async def refused_runs(
    tx: AsyncConnection, experiment: int, groups: Sequence[tuple[str, str]], *, cursor: int
) -> set[tuple[tuple[str, str], int]]:
    """Return (group, run) of the experiences up to ``cursor`` that were refused at the door."""
    found: set[tuple[tuple[str, str], int]] = set()
    for start in range(0, len(groups), EID_CHUNK):
        query = select(experience.c.batch, experience.c.task, experience.c.run).where(
            experience.c.experiment == experiment,
            tuple_(experience.c.batch, experience.c.task).in_(groups[start : start + EID_CHUNK]),
            experience.c.address < first_address(cursor + 1),
            experience.c.refused.is_not(None),
        )
        found.update(
            ((row.batch, row.task), int(row.run)) for row in (await tx.execute(query)).all()
        )
    return found
