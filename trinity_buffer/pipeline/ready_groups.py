"""The groups that wait for a trainer, oldest first."""

from __future__ import annotations

from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.store import queries
from trinity_buffer.store.address import position_of
from trinity_buffer.store.queries import ReadyRow

ROWS_PER_PAGE = 4096


class ReadyGroups:
    """Hands out whole groups of one annotation set in the order of their annotation.

    Reads ahead: the trainer's lease makes it the only one that takes from this set under this name.
    """

    def __init__(self, experiment: Experiment, annotation_set: str, trainer: str) -> None:
        self._experiment = experiment
        self._set = annotation_set
        self._trainer = trainer
        self._groups: list[list[ReadyRow]] = []
        self._start = 0
        self._last_may_grow = False

    async def start(self) -> None:
        """Find the place behind everything that was handed out before."""
        async with self._experiment.database.reading() as tx:
            self._start = await queries.first_undelivered(tx, self._experiment.key, self._trainer)

    async def take(self, number: int, *, partial_ok: bool) -> list[ReadyRow]:
        """Return the rows of the next ``number`` groups, or none if there are fewer (some, if ``partial_ok``)."""
        while self._num_whole() < number and await self._read():
            pass
        if self._num_whole() < number and not (partial_ok and self._groups):
            return []
        taken, self._groups = self._groups[:number], self._groups[number:]
        return [row for group in taken for row in group]

    def _num_whole(self) -> int:
        """A group's rows come from one transaction, but a page may end in the middle of them."""
        return len(self._groups) - self._last_may_grow

    async def _read(self) -> bool:
        """Read one page; return whether there may be another."""
        async with self._experiment.database.reading() as tx:
            rows = await queries.ready_rows(
                tx,
                self._experiment.key,
                annotation_set=self._set,
                trainer=self._trainer,
                start=self._start,
                limit=ROWS_PER_PAGE,
            )
        self._last_may_grow = len(rows) == ROWS_PER_PAGE
        if not rows:
            return False
        self._start = rows[-1].address + 1
        last = self._groups[-1][-1] if self._groups else None
        for row in rows:
            if last is not None and _group_of(last) == _group_of(row):
                self._groups[-1].append(row)
            else:
                self._groups.append([row])
            last = row
        return self._last_may_grow


def _group_of(row: ReadyRow) -> tuple[int, int]:
    return position_of(row.address), row.group_slot
