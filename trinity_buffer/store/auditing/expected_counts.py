"""What the log says that counters hold, and how much of a batch is stored; see `expectation`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from trinity_buffer.events import (
    BatchPlanned,
    ExperiencesAnnotated,
    ExperiencesRecorded,
    ExperiencesRejected,
)
from trinity_buffer.store import counters

Row = dict[str, Any]
Batches = Mapping[str, Row | None]
"""Batch -> its row, as it is expected so far; None: it is sealed and has all that it planned."""


class ExpectedCounts:
    """Takes in events; knows of a planned batch which runs are stored, while more may come."""

    def __init__(self) -> None:
        self._numbers: Counter[tuple[str, str]] = Counter()
        self._versions: set[int] = set()
        self._runs: dict[str, dict[str, int]] = {}  # batch -> task -> a bit for each run
        self._unplanned: set[str] = set()

    def taken(self, kind: str) -> None:
        """Count an event of a kind."""
        self._numbers["", kind] += 1

    def planned(self, fact: BatchPlanned, actor: str) -> None:
        """Take in the plan of an actor.

        Raises:
            ValueError: it came after rollouts, as old versions let it; which ones is not known.
        """
        if str(fact.batch) in self._unplanned:
            raise ValueError("a batch was planned after something was recorded of it")
        self._runs[str(fact.batch)] = dict.fromkeys(map(str, fact.tasks), 0)
        groups = len(fact.tasks)
        self._numbers["", counters.planned_by(actor)] += 1
        self._numbers["", counters.PLANNED_GROUPS] += groups
        self._numbers["", counters.PLANNED_ROLLOUTS] += groups * fact.rollouts_per_group

    def recorded(self, fact: ExperiencesRecorded, batches: Batches) -> None:
        """Take in experiences; what is refused may belong to a batch that is sealed."""
        columns, refused = fact.columns, fact.refused
        self._numbers["", counters.RECORDED] += len(columns)
        for reason in refused.values():
            self._numbers["", counters.rejected_for(reason)] += 1
        self._versions.update(version for version in columns.policy_version if version is not None)
        # Not by a difference of sets: Python walks through all that is taken away.
        self._unplanned.update(key for key in set(map(str, columns.batch)) if key not in batches)
        for key, task, run in zip(map(str, columns.batch), columns.task, columns.run, strict=True):
            of, row = self._runs.get(key, {}), batches.get(key)
            if row is not None and str(task) in of and run < row["rollouts_per_group"]:
                of[str(task)] |= 1 << run
        for key in {str(columns.batch[slot]) for slot in refused}:
            if (row := batches.get(key)) is not None and row["sealed_at"] is not None:
                self.count_stored(key, row)

    def count_stored(self, key: str, row: Row) -> bool:
        """Write the planned rollouts of a sealed batch into its row; return whether all are."""
        before = row["stored_rollouts"] or 0
        row["stored_rollouts"] = before
        if (of := self._runs.get(key)) is not None:
            row["stored_rollouts"] = sum(runs.bit_count() for runs in of.values())
        self._numbers["", counters.STORED_ROLLOUTS] += row["stored_rollouts"] - before
        if of is None or row["stored_rollouts"] < row["rollouts_per_group"] * len(of):
            return False
        del self._runs[key]
        return True

    def annotated(self, fact: ExperiencesAnnotated) -> None:
        """Take in annotations."""
        if fact.experiences:
            self._numbers[fact.consumer, counters.ANNOTATED] += len(set(fact.experiences))
            self._numbers[fact.consumer, counters.ROWS] += len(fact.experiences)

    def rejected(self, fact: ExperiencesRejected) -> None:
        """Take in what a strategy or a trainer left out."""
        for reason in fact.reasons:
            self._numbers[fact.consumer, counters.rejected_for(reason)] += 1

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of `tables.counter`, without the experiment."""
        found = dict(self._numbers)
        if self._versions:
            found["", counters.LOWEST_VERSION] = min(self._versions)
            found["", counters.HIGHEST_VERSION] = max(self._versions)
        return [
            {"consumer": name, "key": counters.key_of(state), "state": state, "number": number}
            for (name, state), number in found.items()
        ]
