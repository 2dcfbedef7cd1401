"""Whether anything still moves in a run: who waits for what nobody brings ends, with the reason."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from trinity_buffer.errors import RunStalledError
from trinity_buffer.identity import TURNS
from trinity_buffer.pipeline.presence import AT_WORK, Presence, is_here, was_silent
from trinity_buffer.store import log, promises, queries
from trinity_buffer.store.database import Database
from trinity_buffer.store.promises import PresenceRow
from trinity_buffer.store.transaction import Transaction

STALLED_AFTER_S = 1800.0
"""Default of the configuration's key ``stalled_after_s``."""

LOOKS = 4
"""So often it is looked during that time: somebody may be at work for a part of it."""


class _Seen(NamedTuple):
    head: int
    after_s: float
    at_work: bool


class Stall:
    """Ends a wait once nothing has moved in an experiment for ``stalled_after_s``.

    That is: no event came (nor a turn of its recorder, or an expert's row), no explorer says that
    rollouts are under way, and no trainer, rank or strategy is at work. By the waiter's own clock:
    those of other machines may be wrong.

    Args:
        database: of the store.
        experiment: key of the experiment.
        presence: of who waits, which does not count; None: it has none.
    """

    def __init__(
        self, database: Database, experiment: int, presence: Presence | None = None
    ) -> None:
        self._database = database
        self._experiment = experiment
        self._presence = presence
        self._head = -1
        self._since = 0.0
        self._next: float | None = None

    def begin(self) -> None:
        """Note that the next wait is a new one."""
        self._head, self._next = -1, None

    async def require_moving(
        self, tell: Callable[[], Awaitable[str]], first_look_s: float
    ) -> float:
        """Return after how many seconds to ask again: something may still move.

        Args:
            tell: returns what is waited for; asked only where that is said.
            first_look_s: how long a new wait lasts before it is looked at all.

        Raises:
            RunStalledError: nothing has moved for too long.
        """
        now = time.monotonic()
        if self._next is None:
            self._next = now + first_look_s
        if now < self._next:
            return self._next - now
        seen = await self._database.read(self._look)
        if seen.at_work or seen.head != self._head:
            self._head, self._since = seen.head, now
        if now - self._since >= seen.after_s:
            raise RunStalledError(
                f"nothing has moved for {seen.after_s:g} s (stalled_after_s): no event came, and "
                f"no rollout is under way; {await tell()}. `trinity-buffer doctor` says "
                "what would help"
            )
        step_s = self._since + seen.after_s - now
        pause_s = min(step_s, seen.after_s / LOOKS, LONGEST_PAUSE_S)
        self._next = now + pause_s
        return pause_s

    def _look(self, tx: Transaction) -> _Seen:
        found = queries.config_of(tx, self._experiment)
        after_s: float | None = STALLED_AFTER_S
        if found is not None:
            after_s = found[0].get("stalled_after_s", STALLED_AFTER_S)
        at_work = is_at_work(tx, self._experiment, self._presence)
        names = [log.experiment_name(tx, self._experiment) + TURNS]  # a recorder's turns come there
        if found is not None and isinstance(expert := found[0].get("expert_experiment"), str):
            names.append(expert)
        beside = [log.find_experiment(tx, name) for name in names]
        keys = {self._experiment, *(key for key in beside if key is not None)}
        head = sum(log.head(tx, key) for key in keys)
        return _Seen(head, math.inf if after_s is None else after_s, at_work)


LONGEST_PAUSE_S = 600.0


def is_at_work(tx: Transaction, experiment: int, but: Presence | None = None) -> bool:
    """Return whether any process of an experiment is at work, but the one that asks."""
    rows = promises.everybody(tx, experiment)
    return any(_is_at_work(row) for row in rows if but is None or not but.is_own(row))


def _is_at_work(row: PresenceRow) -> bool:
    """Return whether a process is there and does something that may become an event.

    Explorers, trainers and ranks say so by a row of their own; a strategy is unless it waits.
    """
    if not is_here(row) or was_silent(row):
        return False
    return row.role == AT_WORK or (row.role == "strategy" and row.waiting_for is None)
