"""Explains why a process waits and which process would unblock it.

A trainer waits for a strategy, a strategy for explorers, and explorers for the trainer. Each
function explains one link of that ring, and continues with the next if that process waits too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from trinity_buffer.pipeline.coordination import waiting
from trinity_buffer.store import counters, counts, leases, writer_queries
from trinity_buffer.store.leases import PresenceRow
from trinity_buffer.store.rows import BatchRow, ConsumerRow
from trinity_buffer.store.transaction import Transaction

BATCHES_NAMED = 2


@dataclass(frozen=True, slots=True)
class Lack:
    """Incomplete groups of one batch.

    Attributes:
        actor: the explorer that planned it, "" if it is unplanned.
        planned_at: position of the plan, None if it is unplanned.
        groups: number of incomplete groups.
        fewest, most: number of runs that each lacks; None: their size is unknown.
    """

    batch: str
    actor: str
    planned_at: int | None
    groups: int
    fewest: int | None
    most: int | None

    def describe(self) -> str:
        """Describe the missing runs in words."""
        what = f"{counted(self.groups, 'group')} of batch {self.batch}"
        verb = "lacks" if self.groups == 1 else "lack"
        if self.most is None:
            return (
                f"{what} {verb} a number of runs (plan the batch, seal it, or give "
                "rollouts_per_group= or idle_s=)"
            )
        if self.most == 0:
            return f"{what} {verb} nothing but the seal of the batch"
        runs = counted(self.most, "run")
        if self.fewest != self.most:
            runs = f"{self.fewest} to {runs}"
        return f"{what} {verb} {runs}{' each' if self.groups > 1 else ''}, no seal"


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """Processes and registered consumers of an experiment, as one transaction saw them."""

    here: Sequence[PresenceRow]
    consumers: dict[str, ConsumerRow]

    @classmethod
    def of(cls, tx: Transaction, experiment: int) -> RunSnapshot:
        """Return the surroundings of an experiment."""
        rows = leases.processes(tx, experiment)
        # `AT_WORK` rows repeat a process under a second role.
        here = [row for row in rows if row.role != waiting.AT_WORK and waiting.is_here(row)]
        return cls(here, writer_queries.consumers(tx, experiment))

    def who(self, role: str, name: str | None = None) -> PresenceRow | None:
        """Return a process in this role, of this name or any, preferably one that works."""
        fitting = [r for r in self.here if r.role == role and name in (None, r.name)]
        # False sorts first: a process that works explains more than one that waits.
        return min(fitting, key=lambda row: row.waiting_for is not None, default=None)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the singular or plural."""
    ending = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{'' if number == 1 else ending}"


def of_trainer(tx: Transaction, experiment: int, annotation_set: str) -> str:
    """Explain why a trainer that has taken all ready rows of this set gets no more."""
    around = RunSnapshot.of(tx, experiment)
    strategy = around.consumers.get(annotation_set)
    number, _ = counts.unseen(tx, experiment, strategy)
    at_work = around.who("strategy", annotation_set)
    lacks = lacks_of(tx, experiment, strategy)
    unseen = counted(number, "experience")
    if number and at_work is None:
        lack = f"; {_describe(around, lacks)}" if lacks else ""
        return f"no process annotates set {annotation_set!r}: {unseen} unseen{lack}"
    if number and at_work is not None and not lacks:
        where = waiting.describe_process(at_work)
        return f"strategy {annotation_set!r} ({where}) has {unseen} to decide"
    return of_strategy(tx, experiment, annotation_set)


def of_strategy(tx: Transaction, experiment: int, name: str, *, whole_batches: bool = False) -> str:
    """Explain why a strategy that has read everything decides nothing.

    Args:
        tx: a transaction.
        experiment: its key.
        name: of the annotation set.
        whole_batches: its unit is the batch, so that whole groups wait too.
    """
    around = RunSnapshot.of(tx, experiment)
    strategy = around.consumers.get(name)
    if lacks := lacks_of(tx, experiment, strategy, whole_batches=whole_batches):
        return _describe(around, lacks)
    if (explorer := around.who("explorer")) is None:
        return (
            f"set {name!r} has all that is recorded, and no process explores (if none will, "
            "`await experiment.finish(reason)` ends the run)"
        )
    waits = f", which waits: {waiting.own_wait_of(explorer)}" if explorer.waiting_for else ""
    return (
        f"set {name!r} has all that is recorded; explorer {explorer.name!r} is there "
        f"({waiting.describe_process(explorer)}){waits}"
    )


def _describe(around: RunSnapshot, lacks: Sequence[Lack]) -> str:
    """Describe the missing runs, and which explorer would bring them."""
    text = "; ".join(lack.describe() for lack in lacks[:BATCHES_NAMED])
    if (more := len(lacks) - BATCHES_NAMED) > 0:
        text += f"; and groups of {more} more"
    # Only the explorer that planned a batch writes its missing runs.
    actor = next((lack.actor for lack in lacks if lack.actor), None)
    if (explorer := around.who("explorer", actor)) is not None:
        return f"{text}; explorer {explorer.name!r} is there ({waiting.describe_process(explorer)})"
    return f"{text}; no process explores" + ("" if actor is None else f" as {actor!r}")


def left_of(tx: Transaction, experiment: int, annotation_set: str) -> str:
    """Describe the undecided rows that a trainer leaves, and why; "" if there are none."""
    if _is_undecided(tx, experiment, writer_queries.consumers(tx, experiment).get(annotation_set)):
        return of_trainer(tx, experiment, annotation_set)
    return ""


def is_being_decided(tx: Transaction, experiment: int, annotation_set: str) -> bool:
    """Return whether a set has undecided rows and its strategy is at work.

    A live process without heartbeats does not count: its strategy may have ended alone.
    """
    around = RunSnapshot.of(tx, experiment)
    at_work = around.who("strategy", annotation_set)
    if at_work is None or waiting.was_silent(at_work):
        return False
    return _is_undecided(tx, experiment, around.consumers.get(annotation_set))


def _is_undecided(tx: Transaction, experiment: int, strategy: ConsumerRow | None) -> bool:
    if counts.unseen(tx, experiment, strategy)[0]:
        return True
    return strategy is not None and bool(counts.open_groups(tx, experiment, strategy))


def outcome_of(tx: Transaction, experiment: int, trainer: str) -> str:
    """Describe what happened to the rows of a trainer's set when none is left to train."""
    if (row := writer_queries.consumer_row(tx, experiment, trainer)) is None:
        return "it is not registered"
    terms = counts.of_trainer(tx, experiment, row, counters.numbers_of(tx, experiment))
    name, rejected = f"set {terms.annotation_set!r}", sum(terms.rejected.values())
    if not terms.rows:
        return f"{name} has no rows: nothing was annotated"
    text = f"of the {counted(terms.rows, 'row')} of {name} {terms.committed} are in committed steps"
    text += f", up to step {row.committed_step}"
    if rejected:
        text += f", and {rejected} were rejected ({', '.join(terms.rejected)})"
    return text + (f", and {terms.ready} are ready" if terms.ready else "")


def of_admission(tx: Transaction, experiment: int, trainer: str) -> str:
    """Return which process would make room for another batch, or why it cannot."""
    around = RunSnapshot.of(tx, experiment)
    at_work, known = around.who("trainer", trainer), around.consumers.get(trainer)
    if at_work is None:
        return f"no process trains as {trainer!r}"
    there = f"trainer {trainer!r} is there ({waiting.describe_process(at_work)})"
    if at_work.waiting_for is None or known is None:
        return there
    return f"{there}, which waits: {waiting.own_wait_of(at_work)}"


def abandoned_groups(tx: Transaction, experiment: int) -> int:
    """Return the number of planned groups whose missing runs will never come: the actor is gone."""
    around = RunSnapshot.of(tx, experiment)
    batches = counts.open_batches(tx, experiment, counts.ALL)
    # A plan and its first heartbeat are one transaction, so absence means that it ended.
    gone = [batch.key for batch in batches if around.who("explorer", batch.actor) is None]
    rows = writer_queries.batches(tx, experiment, gone).values() if gone else ()
    return len(_missing_runs(tx, experiment, rows))


def lacks_of(
    tx: Transaction, experiment: int, strategy: ConsumerRow | None, *, whole_batches: bool = False
) -> list[Lack]:
    """Return the incomplete groups that a strategy has not decided, the oldest batch first.

    Args:
        tx: a transaction.
        experiment: its key.
        strategy: None: only what planned batches lack.
        whole_batches: its unit is the batch, so that whole groups lack the seal.
    """
    config: dict[str, Any] = {} if strategy is None else strategy.config.get("grouping") or {}
    size = config.get("rollouts_per_group")
    stored = {} if strategy is None else counts.open_groups(tx, experiment, strategy)
    planned = [batch.key for batch in counts.open_batches(tx, experiment)]
    rows = writer_queries.batches(tx, experiment, sorted({*stored, *planned}))
    lacks = []
    for key in islice(dict.fromkeys((*planned, *stored)), counts.BATCHES_LOOKED_AT):
        row, groups = rows.get(key), stored.get(key, {})
        if row is None:
            plan: tuple[str, str, int | None] = key, "", None
            short = [] if size is None else [size - n for n in groups.values() if n < size]
        elif row.sealed_at is None:
            plan, short = (key, row.actor, row.planned_at), _missing_runs(tx, experiment, [row])
        else:
            continue  # sealed: no more runs will come
        if row is None and size is None and groups:
            lacks.append(Lack(*plan, len(groups), None, None))
        elif short:
            lacks.append(Lack(*plan, len(short), min(short), max(short)))
        # Complete groups of an unsealed batch still wait, if the strategy decides whole batches.
        elif whole_batches and groups:
            lacks.append(Lack(*plan, len(groups), 0, 0))
    return lacks


def _missing_runs(tx: Transaction, experiment: int, rows: Collection[BatchRow]) -> list[int]:
    """Return how many runs each incomplete group of planned batches lacks."""
    runs = writer_queries.runs_of(tx, experiment, [row.batch for row in rows])
    sizes = {str(row.batch): row.rollouts_per_group or 0 for row in rows}
    # Runs beyond the plan do not make a group complete.
    stored = Counter((batch, task) for batch, task, run in runs if run < sizes[batch])
    groups = [(str(row.batch), str(task)) for row in rows for task in row.tasks]
    return [lacks for group in groups if (lacks := sizes[group[0]] - stored[group]) > 0]
