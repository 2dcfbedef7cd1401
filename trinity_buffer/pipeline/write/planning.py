"""Admission of new batches, and planning, sealing and taking over batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from trinity_buffer import errors
from trinity_buffer.codec.objects import new_event
from trinity_buffer.events import BatchPlanned, BatchSealed
from trinity_buffer.identity import Key, problem_of_key
from trinity_buffer.options import AdmissionOptions
from trinity_buffer.pipeline.coordination import diagnosis, waiting
from trinity_buffer.pipeline.handle import decoded
from trinity_buffer.store import counts, leases, log, trainer_queries, writer_queries
from trinity_buffer.store import rows as store_rows
from trinity_buffer.store.leases import PresenceRow
from trinity_buffer.store.transaction import Transaction

_logger = logging.getLogger(__name__)


class Admission(AdmissionOptions):
    """When an explorer may plan its next batch.

    It waits while the groups not yet delivered to the trainer number at least
    ``max(max_queued_groups, groups_per_step)``, or while
    ``floor(uncommitted groups / groups_per_step) + (published - own version) > max_staleness``,
    where an own version above the published one, as after a rewind, counts as the published one.
    Rejected groups do not count, until all groups of several steps were rejected as faulty; nor do
    groups that lack runs of an actor that is gone. Writes to a planned batch never wait.
    """

    @property
    def most_waiting(self) -> int:
        """Number of undelivered groups at which the next plan waits."""
        return max(self.max_queued_groups or 0, self.groups_per_step)

    def admits(self, backlog: trainer_queries.Backlog, policy_version: int | None) -> bool:
        """Return whether one more batch may be planned now."""
        if self.max_queued_groups is not None and backlog.undelivered >= self.most_waiting:
            return False
        if self.max_staleness is None:
            return True
        # After a rewind, own weights may be newer than the published ones; that is not negative
        # staleness.
        behind = 0 if policy_version is None else max(0, backlog.published - policy_version)
        return backlog.uncommitted // self.groups_per_step + behind <= self.max_staleness

    def require_reachable(self, groups_per_step: int) -> None:
        """Raise unless explorers can plan a step's groups before they wait for that step.

        Raises:
            InvalidArgumentError: explorers and trainer would wait for each other.
        """
        bounds = {
            "max_queued_groups": None if self.max_queued_groups is None else self.most_waiting,
            "max_staleness": None if self.max_staleness is None else self.groups_per_step,
        }
        for name, most in bounds.items():
            if most is not None and groups_per_step > most:
                raise errors.InvalidArgumentError(
                    f"groups_per_step={groups_per_step}: with {name}={getattr(self, name)} and a "
                    f"configured groups_per_step={self.groups_per_step} explorers may plan no more "
                    f"than {most} before they wait for trainer {self.trainer!r}, which would wait "
                    f"for them: set groups_per_step={groups_per_step} in the experiment's "
                    "configuration"
                )

    @property
    def most_uncommitted_steps(self) -> int | None:
        """Longest interval of commits without a deadlock with explorers; None: any."""
        return None if self.max_staleness is None else max(self.max_staleness, 1)

    def require_commits(self, every_steps: int, what: str) -> None:
        """Raise if explorers and a trainer that commits every ``every_steps`` steps would deadlock.

        Args:
            every_steps: steps between commits.
            what: the option that sets it, for the message.

        Raises:
            InvalidArgumentError: explorers would wait for a commit, and the commit for them.
        """
        most = self.most_uncommitted_steps
        if most is not None and every_steps > most:
            raise errors.InvalidArgumentError(
                f"{what}={every_steps} with max_staleness={self.max_staleness}: explorers would "
                f"wait for a commit that waits for them; commit at least every "
                f"{diagnosis.counted(most, 'step')}"
            )


_NO_RULES, _NO_BACKLOG = Admission(), trainer_queries.Backlog(0, 0, 0)


class Answer(Enum):
    """The answer to a request to plan a batch."""

    PLAN = "it may be planned now"
    PLANNED = "it is planned already"
    FINISHED = "the experiment is finished"
    WAIT = "the trainer has enough"


@dataclass(frozen=True, slots=True)
class AdmissionCheck:
    """An answer, and the state that it was decided by.

    Attributes:
        all_rejected: whether all rows of the last steps were rejected as faulty.
        abandoned: number of groups whose actor is gone, which the backlog does not count.
    """

    answer: Answer
    rules: Admission = _NO_RULES
    backlog: trainer_queries.Backlog = _NO_BACKLOG
    all_rejected: bool = False
    abandoned: int = 0

    def describe(self, policy_version: int | None) -> str:
        """Describe the bound that is exceeded."""
        rules, backlog = self.rules, self.backlog
        gone = f", beside {self.abandoned} that lack runs of an actor that is gone"
        gone = gone if self.abandoned else ""
        if self.all_rejected:
            return (
                "every row of the last steps was rejected for a fault (`trinity-buffer stats` "
                f"names the reason), and one step more is on its way{gone}"
            )
        if rules.max_queued_groups is not None and backlog.undelivered >= rules.most_waiting:
            return (
                f"{diagnosis.counted(backlog.undelivered, 'planned group')} not delivered to "
                f"trainer {rules.trainer!r} (at most {rules.most_waiting}, "
                f"max_queued_groups){gone}"
            )
        own = "" if policy_version is None else f", own weights of version {policy_version}"
        return (
            f"{diagnosis.counted(backlog.uncommitted, 'planned group')} not committed by trainer "
            f"{rules.trainer!r} (groups_per_step={rules.groups_per_step}), published is version "
            f"{backlog.published}{own}, and max_staleness={rules.max_staleness}{gone}"
        )


def is_unpublished(rules: Admission, backlog: trainer_queries.Backlog) -> bool:
    """Return whether more committed steps than the bound, and than 1, follow the newest weights."""
    return backlog.committed_step - backlog.published > max(rules.max_staleness or 0, 1)


def unpublished(rules: Admission, backlog: trainer_queries.Backlog) -> str:
    """Describe a trainer that publishes no weights."""
    bound = rules.max_staleness
    broken = "" if bound is None else f", so that max_staleness={bound} cannot hold"
    return (
        f"trainer {rules.trainer!r} has committed step {backlog.committed_step}, and the newest "
        f"published weights are those of version {backlog.published}{broken}"
    )


PUBLISHING = (
    "commit(step, checkpoint=PATH) publishes the checkpoint (policy=PATH another path of the same "
    "weights, policy=False nothing)"
)
"""How to publish a trainer's weights to explorers, for messages."""


def require_fresh(
    batch: Key, version: int | Callable[[], int | None] | None, check: AdmissionCheck
) -> None:
    """Raise if fixed weights are too old ever to be admitted.

    Raises:
        InvalidArgumentError: they are too old, and waiting cannot help.
    """
    most, newest = check.rules.max_staleness, check.backlog.published
    if most is None or version is None or callable(version) or newest - version <= most:
        return
    raise errors.InvalidArgumentError(
        f"batch {batch!r}: policy_version={version} is {newest - version} behind the published "
        f"{newest}, and max_staleness={most}, so that it can never be planned: load the weights of "
        f"version {newest} (`await experiment.newest_policy()` says where they are), or pass a "
        "function that returns the version which is loaded"
    )


MAX_ROLLOUTS = 1 << 20
"""Upper bound of rollouts of one task in one batch."""


def check_admission(
    tx: Transaction, experiment: int, actor: str, wanted: BatchPlanned, version: int | None
) -> AdmissionCheck:
    """Return whether the batch may be planned now."""
    existing = writer_queries.batch_row(tx, experiment, wanted.batch)
    if existing is not None:
        _require_same_plan(tx, experiment, existing, wanted)
        if existing.actor != actor:
            raise errors.BatchTakenError(
                f"batch {existing.batch!r} is planned by {existing.actor!r}; a batch has one "
                f"actor, so {actor!r} needs an id of its own"
            )
        return AdmissionCheck(Answer.PLANNED)
    # Rows without a plan may already be in decided groups, which a plan would contradict.
    if writer_queries.count_in_batch(tx, experiment, wanted.batch):
        raise errors.ConflictingPlanError(
            f"batch {wanted.batch!r} holds experiences without a plan; "
            "plan a batch before writing to it"
        )
    stored = writer_queries.config_of(tx, experiment)
    config, finished = stored if stored is not None else ({}, False)
    if finished:
        return AdmissionCheck(Answer.FINISHED)
    rules = Admission.of(config)
    backlog = trainer_queries.backlog(tx, experiment, rules.trainer)
    # Groups of dead explorers are counted only when they would block: it takes reading their runs.
    admitted, abandoned = rules.admits(backlog, version), 0
    if not admitted:
        abandoned = diagnosis.abandoned_groups(tx, experiment)
        backlog = backlog.without(abandoned)
        admitted = rules.admits(backlog, version)
    # Rejected groups free the bounds; without this check, explorers would fill the store with
    # faulty rows.
    all_rejected = admitted and _all_rejected(tx, experiment, config, backlog)
    answer = Answer.PLAN if admitted and not all_rejected else Answer.WAIT
    return AdmissionCheck(answer, rules, backlog, all_rejected, abandoned)


def _all_rejected(
    tx: Transaction, experiment: int, config: dict[str, Any], backlog: trainer_queries.Backlog
) -> bool:
    """Return whether several steps were fully rejected as faulty, and more rows are on their way.

    Then only one step at a time is planned: enough for the strategy or trainer to give up, or to
    see that the fault is gone.
    """
    rules = Admission.of(config)
    if backlog.undelivered < rules.groups_per_step:
        return False
    steps = min(
        waiting.WARN_AFTER_STEPS, config.get("max_rejected_steps", waiting.MAX_REJECTED_STEPS)
    )
    rows = steps * rules.groups_per_step * config.get("rollouts_per_group", 1)
    return trainer_queries.rejects_all(
        tx, experiment, rules.trainer, faults=waiting.FAULTS, rows=rows
    )


def _require_same_plan(
    tx: Transaction, experiment: int, existing: store_rows.BatchRow, wanted: BatchPlanned
) -> None:
    key = wanted.batch
    if existing.planned_at is None:
        raise errors.ConflictingPlanError(
            f"batch {key!r} was sealed without a plan; choose another batch id"
        )
    # As text, since the store treats 7 and "7" as one task.
    same_tasks = [str(task) for task in existing.tasks] == [str(task) for task in wanted.tasks]
    if not same_tasks or existing.rollouts_per_group != wanted.rollouts_per_group:
        raise errors.ConflictingPlanError(
            f"batch {key!r} is planned with {len(existing.tasks)} tasks × "
            f"{existing.rollouts_per_group} rollouts, which is not what this plan says, and cannot "
            "be changed: choose another batch id; where `explore` plans, another experiment"
        )
    if wanted.contents is not None:
        require_same_contents(key, contents_of(tx, experiment, [existing]), wanted.contents)


def contents_of(
    tx: Transaction, experiment: int, batches: Iterable[store_rows.BatchRow]
) -> dict[str, bytes]:
    """Return batch -> digest of the contents of its tasks, for plans that recorded one."""
    positions = [row.planned_at for row in batches if row.planned_at is not None]
    name = log.experiment_name(tx, experiment)
    facts = [decoded(name, stored).fact for stored in log.read_at(tx, experiment, positions)]
    plans = [fact for fact in facts if isinstance(fact, BatchPlanned)]
    return {str(plan.batch): plan.contents for plan in plans if plan.contents is not None}


def require_same_contents(batch: Key, known: Mapping[str, bytes], wanted: bytes | None) -> None:
    """Raise unless a planned batch's tasks have the recorded contents, if any were recorded.

    Raises:
        ConflictingPlanError: the contents of the tasks differ.
    """
    if wanted is not None and known.get(str(batch), wanted) != wanted:
        raise errors.ConflictingPlanError(
            f"batch {batch!r} was planned for other tasks at the same positions of the list: give "
            "the list that this experiment began with, or explore the other one in another "
            "experiment; if they only look different, give a mapping, dict(enumerate(tasks)), of "
            "which the keys alone are compared"
        )


def check_plan(wanted: BatchPlanned) -> None:
    """Raise unless a batch can be planned like this.

    Raises:
        InvalidArgumentError: it cannot.
    """
    batch, tasks, rollouts_per_group = wanted.batch, wanted.tasks, wanted.rollouts_per_group
    check_batch(batch)
    for task in tasks:
        problem = problem_of_key(task)
        if problem is not None:
            raise errors.InvalidArgumentError(f"batch {batch!r}: task {task!r} {problem}")
    problem = None
    if not tasks or len({str(task) for task in tasks}) != len(tasks):
        problem = "a plan needs at least one task, and each only once"
    elif type(rollouts_per_group) is not int or not 1 <= rollouts_per_group <= MAX_ROLLOUTS:
        given = f"rollouts_per_group={rollouts_per_group!r}"
        problem = f"{given}, it must be an int from 1 to {MAX_ROLLOUTS}"
    elif not isinstance(wanted.contents, bytes | None):
        problem = f"contents={wanted.contents!r:.40}, it must be bytes, or None"
    if problem is not None:
        raise errors.InvalidArgumentError(f"batch {batch!r}: {problem}")


def check_batch(batch: object) -> None:
    """Raise unless ``batch`` can be the id of one.

    Raises:
        InvalidArgumentError: it cannot.
    """
    problem = problem_of_key(batch)
    # A slash separates batch and task in uids.
    if problem is None and ("/" in str(batch) or batch == ""):
        problem = "must be a number, or a text without '/'"
    if problem is not None:
        raise errors.InvalidArgumentError(f"batch {batch!r}: a batch id {problem}")


def planned(tx: Transaction, experiment: int, batch: Key) -> tuple[tuple[Key, ...], int]:
    """Return the tasks of a planned batch and the planned number of rollouts of each.

    Raises:
        InvalidArgumentError: the batch was never planned.
    """
    row = writer_queries.batch_row(tx, experiment, batch)
    if row is None or row.rollouts_per_group is None:
        raise errors.InvalidArgumentError(f"batch {batch!r} was never planned; call plan() first")
    return row.tasks, row.rollouts_per_group


def missing(tx: Transaction, experiment: int, batch: Key) -> list[tuple[Key, int]]:
    """Return the planned (task, run) pairs that are not stored, in the order of the plan.

    Raises:
        InvalidArgumentError: the batch was never planned.
    """
    tasks, runs = planned(tx, experiment, batch)
    stored = {(task, run) for _, task, run in writer_queries.runs_of(tx, experiment, [batch])}
    pairs = [(task, run) for task in tasks for run in range(runs)]
    return [(task, run) for task, run in pairs if (str(task), run) not in stored]


def take_over(
    tx: Transaction,
    experiment: int,
    presence_of: Callable[[str], waiting.Presence],
    mine: set[str],
    batches: Collection[str] | None,
) -> list[counts.OpenBatch]:
    """Claim open batches of explorers that are gone; return them, oldest first.

    This process then sends heartbeats under their names, so that no other one claims them too.

    Args:
        presence_of: returns this process's presence under an explorer's name.
        mine: names that the calling writer uses already. Those that are claimed are added: where a
            server's answer to the commit was lost, this runs again, and finds its own heartbeats.
        batches: the batches that may be claimed; None: all.
    """
    tx.lock(experiment)
    here = diagnosis.RunSnapshot.of(tx, experiment).here

    def is_there(actor: str) -> bool:
        rows = [row for row in here if (row.role, row.name) == ("explorer", actor)]
        return any(actor not in mine or not presence_of(actor).is_own(row) for row in rows)

    gone = [
        batch
        for batch in counts.open_batches(tx, experiment, counts.ALL)
        if batches is None or batch.key in batches
        if not is_there(batch.actor)
    ]
    mine.update(batch.actor for batch in gone)
    for actor in sorted({batch.actor for batch in gone}):
        leases.record_presence(tx, experiment, presence_of(actor).first())
    return gone


def heirs_of(presence: waiting.Presence, here: Sequence[PresenceRow]) -> list[PresenceRow]:
    """Return processes that took over an explorer's name and also have a name of their own."""
    names: dict[tuple[str, int], set[str]] = {}
    for row in here:
        if row.role == presence.role:
            names.setdefault((row.host, row.pid), set()).add(row.name)
    return [row for row in filter(presence.is_namesake, here) if len(names[row.host, row.pid]) > 1]


def seal(
    tx: Transaction, experiment: int, batch: Key, expected: int | None = None, *, actor: str
) -> int | None:
    """Seal a batch; return the number of its rows, None if it was sealed before.

    Args:
        expected: how many rows it has to hold; None: as many as are stored.

    Raises:
        ConflictingSealError: the batch holds, or was sealed with, another number.
        UnknownNameError: no plan and no rows under this id, and nothing is expected.
    """
    tx.lock(experiment)
    row = writer_queries.batch_row(tx, experiment, batch)
    if row is not None and row.sealed_at is not None:
        if expected not in (None, row.expected):
            raise errors.ConflictingSealError(
                f"batch {batch!r} was sealed with {row.expected} experiences, "
                f"this seal says {expected}"
            )
        return None
    held = writer_queries.count_in_batch(tx, experiment, batch)
    if expected is None:
        if row is not None:
            batch = row.batch
        elif held:
            batch = writer_queries.key_of_batch(tx, experiment, str(batch))
        else:
            raise errors.UnknownNameError(
                f"experiment {log.experiment_name(tx, experiment)!r} has no batch {batch!r}: "
                "`trinity-buffer doctor` names those that lack runs"
            )
    elif held != expected:
        raise errors.ConflictingSealError(
            f"batch {batch!r} holds {held} experiences, this seal says {expected}; "
            "nothing was sealed. "
            "missing(batch) names the planned runs that are not stored"
        )
    event = new_event(BatchSealed(batch=batch, expected=held))
    log.append(tx, experiment, [(actor, event)])
    return held
