"""What the pipeline asks the projections. Reads only; every function takes an open transaction first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Row, Select, and_, exists, func, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from trinity_buffer.identity import EID, Key
from trinity_buffer.store.address import first_address
from trinity_buffer.store.dialect import among
from trinity_buffer.store.tables import (
    annotation,
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

EID_CHUNK = 4_000
"""EIDs per statement: 6 variables each, below the 30,000 that one statement may bind."""


@dataclass(frozen=True, slots=True)
class ExperienceRow:
    """What the log knows of an experience without opening its segment."""

    address: int
    eid: EID
    reward: float | None
    policy_version: int | None
    prompt_length: int
    length: int
    trained_tokens: int
    finish_reason: str | None
    refused: str | None
    segment: bytes
    digest: bytes


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A planned or sealed batch."""

    batch: Key
    actor: str
    rollouts_per_group: int | None
    planned_at: int | None
    sealed_at: int | None
    expected: int | None
    tasks: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class ConsumerRow:
    """A strategy or a trainer and how far it is; see `tables.consumer`."""

    name: str
    kind: str
    config: dict[str, Any]
    cursor: int
    calls: int
    rejected_groups: int
    token: int
    leased_step: int
    committed_step: int


@dataclass(frozen=True, slots=True)
class StepRow:
    """A gradient step that was handed out; see `tables.step`."""

    step: int
    leased_at: int
    rows: int
    groups: int
    planned_groups_so_far: int
    manifest_digest: bytes
    committed_at: int | None
    checkpoint: str | None
    checkpoint_digest: str | None


@dataclass(frozen=True, slots=True)
class ReadyRow:
    """An annotation row that no step of a trainer holds yet, with what planning a micro-batch needs."""

    address: int
    group_slot: int
    planned: bool
    experience: int
    policy_version: int | None
    prompt_length: int
    length: int
    trained_tokens: int
    segment: bytes
    eid: EID


@dataclass(frozen=True, slots=True)
class Reader:
    """A trainer as it reads an annotation set, of its own experiment or of another.

    Attributes:
        experiment: the trainer's own, whose deliveries count.
        name: the trainer.
        source: name of the experiment that is read; "" for its own.
        rejecting: by which name it rejects in the experiment that is read.
    """

    experiment: int
    name: str
    source: str
    rejecting: str

    def held(self) -> tuple[ColumnElement[bool], ...]:
        """Return the conditions of the deliveries of what is read."""
        return (
            delivery.c.experiment == self.experiment,
            delivery.c.consumer == self.name,
            delivery.c.source == self.source,
        )


def typed(text_key: str, *, is_int: bool) -> Key:
    """Return a stored key with its type."""
    return int(text_key) if is_int else text_key


def eid_of(row: Any) -> EID:
    """Return the EID of a row with the columns of `tables.experience`."""
    kinds = row.int_keys
    return EID(
        typed(row.batch, is_int=bool(kinds & 1)),
        typed(row.task, is_int=bool(kinds & 2)),
        row.run,
        row.step,
        row.suffix,
    )


EXPERIENCE_COLUMNS = (
    experience.c.address,
    experience.c.batch,
    experience.c.task,
    experience.c.run,
    experience.c.step,
    experience.c.suffix,
    experience.c.int_keys,
    experience.c.reward,
    experience.c.policy_version,
    experience.c.prompt_length,
    experience.c.length,
    experience.c.trained_tokens,
    experience.c.finish_reason,
    experience.c.refused,
    experience.c.segment,
    experience.c.digest,
)


def experience_row(row: Row[Any]) -> ExperienceRow:
    """Return the value object of a selected row."""
    return ExperienceRow(
        int(row.address),
        eid_of(row),
        row.reward,
        row.policy_version,
        row.prompt_length,
        row.length,
        row.trained_tokens,
        row.finish_reason,
        row.refused,
        bytes(row.segment),
        bytes(row.digest),
    )


async def config_of(tx: AsyncConnection, experiment: int) -> tuple[dict[str, Any], bool] | None:
    """Return (configuration, whether the experiment is finished), or None before its first event."""
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
            found[wanted[tuple(key)]] = (int(address), bytes(digest))  # type: ignore[index]
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
    query: Select[Any] = (
        select(plan.c.batch, plan.c.task, plan.c.task_is_int).where(*mine).order_by(plan.c.ordinal)
    )
    for key, task, is_int in (await tx.execute(query)).all():
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
    query = (
        select(func.count())
        .select_from(experience)
        .where(
            experience.c.experiment == experiment,
            experience.c.batch == str(key),
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
    tx: AsyncConnection, experiment: int, name: str, *, after: int, limit: int
) -> list[ExperienceRow]:
    """Return experiences that strategy ``name`` has seen and not decided, by address, above ``after``."""
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
    """Return which (batch, task) groups have experiences up to ``cursor`` that the strategy has decided already."""
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


async def ready_rows(
    tx: AsyncConnection,
    experiment: int,
    *,
    annotation_set: str,
    trainer: Reader,
    start: int,
    limit: int,
) -> list[ReadyRow]:
    """Return annotation rows from address ``start`` on that ``trainer`` neither holds nor rejected, oldest first."""
    held = exists().where(*trainer.held(), delivery.c.address == annotation.c.address)
    left_out = exists().where(
        rejection.c.experiment == experiment,
        rejection.c.consumer == trainer.rejecting,
        rejection.c.address == annotation.c.address,
    )
    key = (
        experience.c.batch,
        experience.c.task,
        experience.c.run,
        experience.c.step,
        experience.c.suffix,
    )
    query = (
        select(
            annotation.c.address,
            annotation.c.group_slot,
            annotation.c.planned,
            annotation.c.experience,
            experience.c.policy_version,
            experience.c.prompt_length,
            experience.c.length,
            experience.c.trained_tokens,
            experience.c.segment,
            *key,
            experience.c.int_keys,
        )
        .join(
            experience,
            and_(
                experience.c.experiment == annotation.c.experiment,
                experience.c.address == annotation.c.experience,
            ),
        )
        .where(
            annotation.c.experiment == experiment,
            annotation.c.consumer == annotation_set,
            annotation.c.address >= start,
            ~held,
            ~left_out,
        )
        .order_by(annotation.c.address)
        .limit(limit)
    )
    return [
        ReadyRow(
            int(row.address),
            row.group_slot,
            bool(row.planned),
            int(row.experience),
            row.policy_version,
            row.prompt_length,
            row.length,
            row.trained_tokens,
            bytes(row.segment),
            eid_of(row),
        )
        for row in (await tx.execute(query)).all()
    ]


async def steps(
    tx: AsyncConnection, experiment: int, name: str, *, after: int = 0, limit: int = -1
) -> list[StepRow]:
    """Return the steps of a trainer above ``after``, in order."""
    query = select(step).where(
        step.c.experiment == experiment, step.c.consumer == name, step.c.step > after
    )
    query = query.order_by(step.c.step)
    if limit >= 0:
        query = query.limit(limit)
    return [StepRow(*row[2:]) for row in (await tx.execute(query)).all()]


async def last_checkpoint(
    tx: AsyncConnection, experiment: int, name: str, *, at: int | None = None
) -> StepRow | None:
    """Return the last committed step (or step ``at``) of the live line that names a checkpoint."""
    query = select(step).where(
        step.c.experiment == experiment,
        step.c.consumer == name,
        step.c.committed_at.is_not(None),
        step.c.checkpoint.is_not(None),
    )
    if at is not None:
        query = query.where(step.c.step == at)
    row = (await tx.execute(query.order_by(step.c.step.desc()).limit(1))).one_or_none()
    return None if row is None else StepRow(*row[2:])


async def newest_policy(tx: AsyncConnection, experiment: int) -> tuple[int, str, str, int] | None:
    """Return (version, uri, digest, position) of the policy that was published last, or None."""
    query = select(policy.c.version, policy.c.uri, policy.c.digest, policy.c.position)
    query = (
        query.where(policy.c.experiment == experiment).order_by(policy.c.position.desc()).limit(1)
    )
    row = (await tx.execute(query)).one_or_none()
    return None if row is None else (int(row[0]), row[1], row[2], int(row[3]))


@dataclass(frozen=True, slots=True)
class Backlog:
    """Planned groups on their way to a trainer, and the newest policy; what admission control looks at.

    Attributes:
        undelivered: planned groups that were neither handed to the trainer nor rejected.
        uncommitted: planned groups whose gradient step is not committed; rejected ones do not
            count.
        published: the newest policy version, 0 before the first.
    """

    undelivered: int
    uncommitted: int
    published: int


async def backlog(tx: AsyncConnection, experiment: int, trainer: str) -> Backlog:
    """Return the backlog in front of ``trainer``. Its cost does not depend on how long the run is."""
    last = select(func.coalesce(func.max(plan.c.ordinal), 0)).where(plan.c.experiment == experiment)
    planned = int((await tx.execute(last)).scalar_one())
    row = await consumer_row(tx, experiment, trainer)
    delivered = committed = rejected = 0
    if row is not None:
        strategy = await consumer_row(tx, experiment, str(row.config.get("strategy", "")))
        rejected = row.rejected_groups + (strategy.rejected_groups if strategy else 0)
        so_far = select(step.c.step, step.c.planned_groups_so_far).where(
            step.c.experiment == experiment,
            step.c.consumer == trainer,
            step.c.step.in_([row.leased_step, row.committed_step]),
        )
        totals = {int(number): int(groups) for number, groups in (await tx.execute(so_far)).all()}
        delivered, committed = totals.get(row.leased_step, 0), totals.get(row.committed_step, 0)
    newest = await newest_policy(tx, experiment)
    return Backlog(
        planned - rejected - delivered, planned - rejected - committed, newest[0] if newest else 0
    )


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


def typed_rows_of_event(position: int, body: Mapping[str, Any]) -> list[ExperienceRow]:
    """Return the rows that an ``ExperiencesRecorded`` event made, from its body alone."""
    meta, refused, key = body["meta"], body["refused"], bytes(body["segment"])
    base = first_address(position)
    columns = zip(
        meta["batch"],
        meta["task"],
        meta["run"],
        meta["step"],
        meta["suffix"],
        meta["reward"],
        meta["policy_version"],
        meta["prompt_length"],
        meta["length"],
        meta["trained_tokens"],
        meta["finish_reason"],
        meta["digest"],
        strict=True,
    )
    return [
        ExperienceRow(
            base + slot,
            EID(*row[:5]),
            *row[5:11],
            refused.get(slot),
            key,
            row[11],
        )
        for slot, row in enumerate(columns)
    ]


async def first_undelivered(tx: AsyncConnection, experiment: int, trainer: Reader) -> int:
    """Return the lowest address above everything that ``trainer`` was handed or has rejected."""
    handed = select(func.max(delivery.c.address)).where(*trainer.held())
    refused = select(func.max(rejection.c.address)).where(
        rejection.c.experiment == experiment, rejection.c.consumer == trainer.rejecting
    )
    found = [int((await tx.execute(query)).scalar() or 0) for query in (handed, refused)]
    return max(found) + 1


async def assigned_rewards(
    tx: AsyncConnection, experiment: int, scoring: str, addresses: Sequence[int]
) -> dict[int, float]:
    """Return address -> reward of those of ``addresses`` that a scoring has rewarded."""
    query = select(assigned_reward.c.address, assigned_reward.c.reward).where(
        assigned_reward.c.experiment == experiment,
        assigned_reward.c.scoring == scoring,
        among(tx, assigned_reward.c.address, addresses),
    )
    return {int(address): float(reward) for address, reward in (await tx.execute(query)).all()}
