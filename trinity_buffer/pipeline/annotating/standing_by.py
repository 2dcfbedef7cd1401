"""What a process of a strategy does while another one of its name decides: next to nothing."""

from __future__ import annotations

import time

import anyio

from trinity_buffer.pipeline.annotating.unit_reader import UnitReader
from trinity_buffer.pipeline.experiment_handle import ExperimentHandle
from trinity_buffer.pipeline.spoken_wait import SpokenWait
from trinity_buffer.store import log, queries
from trinity_buffer.store.rows import ConsumerRow
from trinity_buffer.store.transaction import Transaction

REST_S = 0.25
"""How long it rests at least, however much is committed meanwhile."""

LOOKS_AFTER_S = 1.0
"""A holder that has died is noticed after so long; one that ends announces it."""

STILL_S = 1.0
"""One that has committed nothing for so long may have nothing to decide: that is looked at, then
half as often each time."""

SELDOM_S = 30.0
"""But so often at least."""


class StandBy:
    """Waits for the lease of a strategy; a run that ends with what is stored waits for no more.

    Args:
        experiment: whose log is read.
        name: of the annotation set.
        reader: reads what is undecided, where that has to be known.
    """

    def __init__(self, experiment: ExperimentHandle, name: str, reader: UnitReader) -> None:
        self._experiment, self._name, self._reader = experiment, name, reader
        self._stored = self._recorded = -1  # the head when we asked first, and the last experience
        self._cursor = -1
        self._pause_s = STILL_S
        self._due = 0.0

    async def rest(self, wait: SpokenWait, state: tuple[int, int]) -> None:
        """Wait for a commit after ``state``, or a while."""
        await anyio.sleep(REST_S)  # without it, each commit of the one that decides would wake us
        await wait.changed(state, LOOKS_AFTER_S)

    async def is_over(self) -> bool:
        """Return whether the other has decided all that was stored when this was asked first.

        What is undecided is read only where the other seems to have come to it, or stands still.
        """
        row, is_done = await self._experiment.database.read(self._look)
        if is_done:
            return True
        now = time.monotonic()
        if row.cursor != self._cursor and self._cursor < self._recorded:
            self._due = now + self._pause_s
        self._cursor = row.cursor
        if now < self._due:
            return False
        self._pause_s = min(2 * self._pause_s, SELDOM_S)
        self._due = now + self._pause_s
        return not await self._reader.is_left(row, self._stored)

    def _look(self, tx: Transaction) -> tuple[ConsumerRow, bool]:
        """Return the state of the last commit, and whether all experiences are decided by it."""
        key, name = self._experiment.key, self._name
        if self._stored < 0:
            self._stored = log.head(tx, key)
            self._recorded = queries.last_recorded(tx, key)
        row = queries.consumer_row(tx, key, name)
        assert row is not None  # registered before
        if row.cursor < self._recorded:
            return row, False
        up_to = self._recorded
        return row, not queries.waiting_addresses(tx, key, name, after=-1, up_to=up_to, limit=1)
