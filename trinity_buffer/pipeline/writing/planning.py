"""Plans, seals and admission: what an explorer may generate, and when a batch is complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trinity_buffer.crash_points import reached
from trinity_buffer.errors import (
    BatchTakenError,
    ConflictingPlanError,
    ConflictingSealError,
    InvalidArgumentError,
)
from trinity_buffer.events import BatchPlanned, BatchSealed
from trinity_buffer.identity import Key, problem_of_key
from trinity_buffer.pipeline.events import new_event, now_us
from trinity_buffer.pipeline.rejection_watch import FAULTS, MAX_REJECTED_STEPS, WARN_AFTER_STEPS
from trinity_buffer.store import log, queries, trainer_queries
from trinity_buffer.store import rows as store_rows
from trinity_buffer.store.database import Database
from trinity_buffer.store.dialect import lock_experiment
from trinity_buffer.store.transaction import Transaction


@dataclass(frozen=True, slots=True)
class Admission:
    """When an explorer may plan its next batch.

    It waits while the groups not yet delivered to the trainer number at least
    ``max(max_waiting_groups, groups_per_step)``, or while
    ``floor(uncommitted groups / groups_per_step) + (published - own version) > max_staleness``.
    Rejected groups do not count, until all of several steps was rejected for a fault of the rows.
    A planned batch is never held half-way: its writes do not wait.

    Attributes:
        trainer: name of the trainer consumer that is waited for.
        max_waiting_groups: None: no bound.
        max_staleness: in policy versions (= gradient steps); None: no bound.
        groups_per_step: of that trainer.
    """

    trainer: str = "trainer"
    max_waiting_groups: int | None = None
    max_staleness: int | None = None
    groups_per_step: int = 1

    @classmethod
    def of(cls, config: dict[str, Any]) -> Admission:
        """Return the rules that an experiment's configuration states."""
        return cls(
            trainer=config.get("trainer", "trainer"),
            max_waiting_groups=config.get("max_waiting_groups"),
            max_staleness=config.get("max_staleness"),
            groups_per_step=config.get("groups_per_step", 1),
        )

    def admits(self, backlog: trainer_queries.Backlog, policy_version: int | None) -> bool:
        """Return whether one more batch may be planned now."""
        if self.max_waiting_groups is not None:
            bound = max(self.max_waiting_groups, self.groups_per_step)
            if backlog.undelivered >= bound:
                return False
        if self.max_staleness is None:
            return True
        behind = 0 if policy_version is None else backlog.published - policy_version
        return backlog.uncommitted // self.groups_per_step + behind <= self.max_staleness


async def plan(
    database: Database,
    experiment: int,
    actor: str,
    batch: Key,
    tasks: Sequence[Key],
    rollouts_per_group: int,
    policy_version: int | Callable[[], int] | None,
) -> bool:
    """Plan ``batch`` as soon as admission allows; see `SQLWriter.plan`."""
    _check(batch, tasks, rollouts_per_group)
    database.require_writable()  # who may not plan need not wait for it
    wanted = BatchPlanned(batch=batch, tasks=list(tasks), rollouts_per_group=rollouts_per_group)
    event = new_event(wanted)

    def append(tx: Transaction, own: int | None) -> object:
        # Asked again under the lock: two explorers must not both take the last place.
        lock_experiment(tx, experiment)
        answer = _may_plan(tx, experiment, actor, wanted, own)
        if answer is None:
            log.append(tx, experiment, [event], actor=actor, now_us=now_us())
        return answer

    while True:
        state = await database.changes.state()
        own = policy_version() if callable(policy_version) else policy_version
        answer = await database.read(_may_plan, experiment, actor, wanted, own)
        if answer is None:
            reached("before-plan")
            answer = await database.write(append, own)
            if answer is None:
                reached("after-plan")
                return True
        if answer is not _WAIT:
            return bool(answer)
        await database.changes.changed(state)


_WAIT = object()

MAX_ROLLOUTS = 1 << 20
"""Rollouts of one task in one batch."""


def _may_plan(
    tx: Transaction,
    experiment: int,
    actor: str,
    wanted: BatchPlanned,
    version: int | None,
) -> object:
    """Return None: plan it now; True: it is planned; False: the run is finished; or `_WAIT`."""
    existing = queries.batch_row(tx, experiment, wanted.batch)
    if existing is not None:
        return _same_plan(existing, actor, wanted)
    if queries.count_in_batch(tx, experiment, wanted.batch):
        raise ConflictingPlanError(
            f"batch {wanted.batch!r} holds experiences that nobody planned; "
            "plan a batch before writing to it"
        )
    found = queries.config_of(tx, experiment)
    config, finished = found if found is not None else ({}, False)
    if finished:
        return False
    rules = Admission.of(config)
    backlog = trainer_queries.backlog(tx, experiment, rules.trainer)
    if not rules.admits(backlog, version) or _is_in_vain(tx, experiment, config, backlog):
        return _WAIT
    return None


def _is_in_vain(
    tx: Transaction, experiment: int, config: dict[str, Any], backlog: trainer_queries.Backlog
) -> bool:
    """Return whether all of several steps was rejected for a fault, and more is on its way.

    Then one step at a time is planned: enough for the strategy or trainer to give up, or to see
    that the fault is gone.
    """
    rules = Admission.of(config)
    if backlog.undelivered < rules.groups_per_step:
        return False
    steps = min(WARN_AFTER_STEPS, config.get("max_rejected_steps", MAX_REJECTED_STEPS))
    rows = steps * rules.groups_per_step * config.get("rollouts_per_group", 1)
    return trainer_queries.rejects_all(tx, experiment, rules.trainer, faults=FAULTS, rows=rows)


def _same_plan(existing: store_rows.BatchRow, actor: str, wanted: BatchPlanned) -> bool:
    key = wanted.batch
    if existing.planned_at is None:
        raise ConflictingPlanError(
            f"batch {key!r} was sealed without a plan; choose another batch id"
        )
    same_tasks = [str(task) for task in existing.tasks] == [str(task) for task in wanted.tasks]
    if not same_tasks or existing.rollouts_per_group != wanted.rollouts_per_group:
        raise ConflictingPlanError(
            f"batch {key!r} is planned with {len(existing.tasks)} tasks × "
            f"{existing.rollouts_per_group} rollouts, which is "
            "not what this plan says; a plan cannot be changed, choose another batch id"
        )
    if existing.actor != actor:
        raise BatchTakenError(
            f"batch {key!r} is planned by {existing.actor!r}; a batch has one actor, so {actor!r} "
            "needs an id of its own"
        )
    return True


def _check(batch: Key, tasks: Sequence[Key], rollouts_per_group: int) -> None:
    _check_batch(batch)
    for task in tasks:
        problem = problem_of_key(task)
        if problem is not None:
            raise InvalidArgumentError(f"batch {batch!r}: task {task!r} {problem}")
    if not tasks or len({str(task) for task in tasks}) != len(tasks):
        raise InvalidArgumentError(
            f"batch {batch!r}: a plan needs at least one task, and each only once"
        )
    if type(rollouts_per_group) is not int or not 1 <= rollouts_per_group <= MAX_ROLLOUTS:
        raise InvalidArgumentError(
            f"batch {batch!r}: rollouts_per_group={rollouts_per_group!r}, it must be an int from 1 "
            f"to {MAX_ROLLOUTS}"
        )


def _check_batch(batch: object) -> None:
    problem = problem_of_key(batch)
    if problem is None and ("/" in str(batch) or batch == ""):
        problem = "must be a number, or a text without '/'"
    if problem is not None:
        raise InvalidArgumentError(f"batch {batch!r}: a batch id {problem}")


async def missing(database: Database, experiment: int, batch: Key) -> list[tuple[Key, int]]:
    """Return the planned (task, run) pairs that are not stored, in the order of the plan."""

    def look(tx: Transaction) -> tuple[store_rows.BatchRow | None, set[tuple[str, int]]]:
        planned = queries.batch_row(tx, experiment, batch)
        return planned, queries.runs_of(tx, experiment, batch)

    planned, stored = await database.read(look)
    if planned is None or planned.rollouts_per_group is None:
        raise InvalidArgumentError(f"batch {batch!r} was never planned; call plan() first")
    pairs = [(task, run) for task in planned.tasks for run in range(planned.rollouts_per_group)]
    return [(task, run) for task, run in pairs if (str(task), run) not in stored]


async def seal(database: Database, experiment: int, actor: str, batch: Key, expected: int) -> None:
    """Seal ``batch``; see `SQLWriter.seal`."""
    _check_batch(batch)
    event = new_event(BatchSealed(batch=batch, expected=expected))
    await database.write(_seal, experiment, actor, batch, expected, event)


def _seal(
    tx: Transaction, experiment: int, actor: str, batch: Key, expected: int, event: log.NewEvent
) -> None:
    lock_experiment(tx, experiment)
    existing = queries.batch_row(tx, experiment, batch)
    if existing is not None and existing.sealed_at is not None:
        if existing.expected == expected:
            return
        raise ConflictingSealError(
            f"batch {batch!r} was sealed with {existing.expected} experiences, "
            f"this seal says {expected}"
        )
    held = queries.count_in_batch(tx, experiment, batch)
    if held != expected:
        raise ConflictingSealError(
            f"batch {batch!r} holds {held} experiences, this seal says {expected}; "
            "nothing was sealed. "
            "missing(batch) names the planned runs that are not stored"
        )
    log.append(tx, experiment, [event], actor=actor, now_us=now_us())
