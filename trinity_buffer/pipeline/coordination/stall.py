"""Ends a wait with an error once nothing in the run makes progress any more."""

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
"""Number of checks during that time: a process may be at work for only a part of it."""

LATE_S = 10.0
"""A check delayed by more than this factor shows that the machine is overloaded."""


class _Seen(NamedTuple):
    mark: tuple[
        int, frozenset[PresenceRow]
    ]  # changes with the heads of the logs and with heartbeats of work
    after_s: float
    at_work: bool


class Stall:
    """Ends a wait once an experiment has made no progress for ``stalled_after_s``.

    Progress is an event (also a recorder's turn, or an expert's row), an explorer with rollouts
    under way, or a trainer, rank or strategy at work. Time is measured by the waiter's own clock,
    as those of other machines may be wrong. Time without checks does not count: the run was paused
    too, or the server was away.

    Args:
        database: database of the store.
        experiment: key of the experiment.
        presence: presence of the waiting process, which does not count as progress, or None.
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
        """Start a new wait."""
        self._mark, self._next = None, None

    async def require_moving(
        self, tell: Callable[[], Awaitable[str]], first_look_s: float
    ) -> float:
        """Return the seconds until the next check, as long as the run may make progress.

        Args:
            tell: describes the wait; called only for the error.
            first_look_s: length of a new wait before its first check.

        Raises:
            RunStalledError: no progress for too long.
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
        names = [log.experiment_name(tx, self._experiment) + TURNS]  # a recorder writes there
        if stored is not None and isinstance(expert := stored[0].get("expert_experiment"), str):
            names.append(expert)
        beside = [log.find_experiment(tx, name) for name in names]
        keys = {self._experiment, *(key for key in beside if key is not None)}
        head = sum(log.head(tx, key) for key in keys)
        # A changed heartbeat is progress, however wrong the clock of its process may be.
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
    """Return whether a live process computes something that may become an event.

    Explorers, trainers and ranks have a row of their own for it; a strategy is unless it waits.
    """
    if not is_here(row) or was_silent(row):
        return False
    return row.role == AT_WORK or (row.role == "strategy" and row.waiting_for is None)
