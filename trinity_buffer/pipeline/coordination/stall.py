"""Whether anything still moves in a run: who waits for what nobody brings ends, with the reason."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from trinity_buffer.errors import RunStalledError
from trinity_buffer.identity import TURNS
from trinity_buffer.pipeline.coordination.presence import AT_WORK, Presence, is_here, was_silent
from trinity_buffer.store import heartbeats, log, writer_queries
from trinity_buffer.store.database import Database
from trinity_buffer.store.heartbeats import PresenceRow
from trinity_buffer.store.transaction import Transaction

STALLED_AFTER_S = 1800.0
"""Default of the configuration's key ``stalled_after_s``."""

LOOKS = 4
"""So often it is looked during that time: somebody may be at work for a part of it."""

LATE_S = 10.0
"""A look that comes so late was kept from it by a machine that has much to do."""


class _Seen(NamedTuple):
    mark: tuple[
        int, frozenset[PresenceRow]
    ]  # moves with the logs, and with what says it is at work
    after_s: float
    at_work: bool


class Stall:
    """Ends a wait once nothing has moved in an experiment for ``stalled_after_s``.

    That is: no event came (nor a turn of its recorder, or an expert's row), no explorer says that
    rollouts are under way, and no trainer, rank or strategy is at work. By the waiter's own clock:
    those of other machines may be wrong. Time in which it could not look does not count: the run
    was paused with it, or the server was away.

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
        self._mark: object = None
        self._since = 0.0
        self._next: float | None = None

    def begin(self) -> None:
        """Note that the next wait is a new one."""
        self._mark, self._next = None, None

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
        seen = await self._database.read(self._load)
        now = time.monotonic()
        self._since += max(0.0, now - self._next - LATE_S)
        if seen.at_work or seen.mark != self._mark:
            self._mark, self._since = seen.mark, now
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

    def _load(self, tx: Transaction) -> _Seen:
        stored = writer_queries.config_of(tx, self._experiment)
        after_s: float | None = STALLED_AFTER_S
        if stored is not None:
            after_s = stored[0].get("stalled_after_s", STALLED_AFTER_S)
        rows = _others(tx, self._experiment, self._presence)
        names = [log.experiment_name(tx, self._experiment) + TURNS]  # a recorder's turns come there
        if stored is not None and isinstance(expert := stored[0].get("expert_experiment"), str):
            names.append(expert)
        beside = [log.find_experiment(tx, name) for name in names]
        keys = {self._experiment, *(key for key in beside if key is not None)}
        head = sum(log.head(tx, key) for key in keys)
        # What is said anew is news, however wrong the clock of who says it may be.
        mark = head, frozenset(row for row in rows if row.role == AT_WORK)
        at_work = any(map(_is_at_work, rows))
        return _Seen(mark, math.inf if after_s is None else after_s, at_work)


LONGEST_PAUSE_S = 600.0


def is_at_work(tx: Transaction, experiment: int) -> bool:
    """Return whether any process of an experiment is at work."""
    return any(map(_is_at_work, heartbeats.processes(tx, experiment)))


def _others(tx: Transaction, experiment: int, but: Presence | None) -> list[PresenceRow]:
    rows = heartbeats.processes(tx, experiment)
    return [row for row in rows if but is None or not but.is_own(row)]


def _is_at_work(row: PresenceRow) -> bool:
    """Return whether a process is there and does something that may become an event.

    Explorers, trainers and ranks say so by a row of their own; a strategy is unless it waits.
    """
    if not is_here(row) or was_silent(row):
        return False
    return row.role == AT_WORK or (row.role == "strategy" and row.waiting_for is None)
