"""The groups that wait for a trainer, oldest first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import groupby

from trinity_buffer.store import trainer_queries
from trinity_buffer.store.address import position_of
from trinity_buffer.store.database import Database
from trinity_buffer.store.trainer_queries import Reader, ReadyRow

ROWS_PER_PAGE = 1024


class ReadyGroups:
    """Hands out whole groups of one annotation set in the order of their annotation.

    Reads ahead: the trainer's lease makes it the only one that takes from this set under this name.

    Args:
        database: of the store.
        experiment: key of the experiment that is read.
        annotation_set: the set.
        reader: who reads.
    """

    def __init__(
        self, database: Database, experiment: int, annotation_set: str, reader: Reader
    ) -> None:
        self._database = database
        self._experiment = experiment
        self._set = annotation_set
        self._reader = reader
        self._groups: list[list[ReadyRow]] = []
        self._start = 0
        self._last_may_grow = False

    async def start(self) -> None:
        """Find the place behind everything that was handed out before."""
        async with self._database.reading() as tx:
            self._start = await trainer_queries.first_undelivered(tx, self._reader)

    async def fill(self, number: int) -> int:
        """Read until ``number`` whole groups are here, or all; return how many are here."""
        while self._num_whole() < number and await self._read():
            pass
        return self._num_whole()

    def pop(self, number: int) -> list[ReadyRow]:
        """Return the rows of the first ``number`` whole groups, or of as many as are here."""
        number = min(number, self._num_whole())
        taken, self._groups = self._groups[:number], self._groups[number:]
        return [row for group in taken for row in group]

    def pop_unwanted(self, unwanted: Callable[[list[ReadyRow]], bool]) -> list[ReadyRow]:
        """Return the rows of the ``unwanted`` ones among the whole groups that are here."""
        end = self._num_whole()
        gone = [group for group in self._groups[:end] if unwanted(group)]
        if gone:
            kept = [group for group in self._groups[:end] if not unwanted(group)]
            self._groups = kept + self._groups[end:]
        return [row for group in gone for row in group]

    def _num_whole(self) -> int:
        """A group's rows come from one transaction, but a page may end in the middle of them."""
        return len(self._groups) - self._last_may_grow

    async def _read(self) -> bool:
        """Read one page; return whether there may be another."""
        page = partial(
            trainer_queries.ready_rows,
            experiment=self._experiment,
            annotation_set=self._set,
            trainer=self._reader,
            start=self._start,
            limit=ROWS_PER_PAGE,
        )
        rows = await self._database.read(page)
        self._last_may_grow = len(rows) == ROWS_PER_PAGE
        if not rows:
            return False
        self._start = rows[-1].address + 1
        groups = [list(group) for _, group in groupby(rows, _group_of)]
        if self._groups and _group_of(self._groups[-1][-1]) == _group_of(rows[0]):
            self._groups[-1] += groups.pop(0)
        self._groups += groups
        return self._last_may_grow


def _group_of(row: ReadyRow) -> tuple[int, int]:
    return position_of(row.address), row.group_slot
