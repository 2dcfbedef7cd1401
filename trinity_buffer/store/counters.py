"""Counters of frequent questions, kept while recording: a read costs the same in a long run.

A counter only grows, except the lowest policy version. No gradient depends on one. Events are
counted under the name of their kind; all other states begin with a small letter.
"""

from __future__ import annotations

from trinity_buffer.store.transaction import Statement, Transaction

Numbers = dict[tuple[str, str], int]
"""(consumer, state) -> a number; the consumer is ``""`` for the experiment itself."""

RECORDED = "recorded"
"""Experiences, refused ones included."""
ANNOTATED, ROWS = "annotated", "rows"
"""Of a set: experiences with an annotation, and annotations, copies included."""
LOWEST_VERSION, HIGHEST_VERSION = "lowest version", "highest version"
"""Of the policies that generated an experience."""
PLANNED_GROUPS, PLANNED_ROLLOUTS = "planned groups", "planned rollouts"
STORED_ROLLOUTS = "stored rollouts"
"""Planned rollouts of sealed batches."""

_REJECTED, _PLANNED_BY = "rejected: ", "planned by: "


def rejected_for(reason: str) -> str:
    """Return the state of rows that were rejected, or refused at the door, for ``reason``."""
    return _REJECTED + reason


def planned_by(actor: str) -> str:
    """Return the state of the batches that an actor planned."""
    return _PLANNED_BY + actor


def reasons(numbers: Numbers, consumer: str) -> dict[str, int]:
    """Return reason -> how many experiences (of a trainer: rows) a consumer rejected for it.

    Args:
        numbers: of an experiment.
        consumer: its name; "" for what was refused at the door.
    """
    numbers_by_reason = {
        state.removeprefix(_REJECTED): number
        for (name, state), number in numbers.items()
        if name == consumer and state.startswith(_REJECTED)
    }
    return dict(sorted(numbers_by_reason.items()))


def kinds(numbers: Numbers) -> dict[str, int]:
    """Return kind -> how many events of it there are."""
    return {kind: number for (of, kind), number in numbers.items() if not of and kind[0].isupper()}


def numbers_of(tx: Transaction, experiment: int) -> Numbers:
    """Return the counters of one experiment."""
    return {(name, state): number for name, state, number in _NUMBERS.fetch_all(tx, of=experiment)}


_NUMBERS = Statement("SELECT consumer, state, number FROM counter WHERE experiment = :of")


# Planned rollouts of a row of `batch` that are stored. A look at an index for each group: joined,
# every experience would be looked up again.
STORED = (
    "(SELECT coalesce(sum((SELECT count(DISTINCT e.run) FROM experience e "
    "WHERE e.experiment = p.experiment AND e.batch = p.batch AND e.task = p.task "
    "AND e.run < batch.rollouts_per_group)), 0) FROM plan p "
    "WHERE p.experiment = batch.experiment AND p.batch = batch.batch)"
)
