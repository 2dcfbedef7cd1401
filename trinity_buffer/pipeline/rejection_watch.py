"""A consumer that rejects everything says so aloud, and ends where only a fault explains it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Literal

from trinity_buffer.errors import TrainingError
from trinity_buffer.pipeline.spoken_wait import one_line
from trinity_buffer.rejections import INVALID, OVERSIZE

WARN_AFTER_STEPS = 3
"""Steps in a row of which everything was rejected, before that is said."""

MAX_REJECTED_STEPS = 6
"""So many in a row end the consumer, where the rows themselves are at fault."""

USUAL_GROUPS_PER_STEP = 16
"""Groups of a step where nobody says how many: a filter may reject a few of them in a row."""

FAULTS = (INVALID, "damaged")
"""How reasons begin that more rows of the same kind will not mend; a filter or an age may."""

UNREAD = frozenset({"stale", OVERSIZE})
"""Reasons that say nothing of what a row holds: nobody looked."""

_logger = logging.getLogger(__name__)


class RejectionWatch:
    """Counts what was rejected since anything was kept.

    Args:
        who: the consumer, as a message names it.
        groups_per_step: so many groups count as a step. None: one where a fault is the reason, else
            `USUAL_GROUPS_PER_STEP`.
        max_rejected_steps: see `MAX_REJECTED_STEPS`.
        counts: what a message counts: a strategy has no steps.
    """

    def __init__(
        self,
        who: str,
        groups_per_step: int | None = 1,
        max_rejected_steps: int = MAX_REJECTED_STEPS,
        *,
        counts: Literal["steps", "groups"] = "steps",
    ) -> None:
        self._who = who
        self._per_step = groups_per_step
        self._most = max_rejected_steps
        self._counts = counts
        self._groups: dict[bool, int] = {}
        self._reasons: set[str] = set()
        self._first = ""
        self._warned = False

    def kept(self) -> None:
        """Note that something was kept."""
        self._groups, self._reasons, self._first, self._warned = {}, set(), "", False

    def rejected(self, groups: int, reasons: Collection[str], uid: Callable[[], str]) -> None:
        """Note that of ``groups`` groups nothing was kept.

        Args:
            groups: how many.
            reasons: of the rejections.
            uid: returns the name of one row of theirs; asked for the first ones alone.

        Raises:
            TrainingError: nothing was kept for too long, and a fault is the reason.
        """
        read = not UNREAD.issuperset(reasons)
        self._groups[read] = self._groups.get(read, 0) + groups
        self._reasons |= set(reasons)
        self._first = self._first or uid()
        faulty = all(reason.startswith(FAULTS) for reason in self._reasons - UNREAD)
        per_step = self._per_step or (1 if faulty else USUAL_GROUPS_PER_STEP)
        number = sum(self._groups.values())
        if number // per_step < min(WARN_AFTER_STEPS, self._most):
            return
        said = self._said(number if self._counts == "groups" else number // per_step)
        if faulty and self._groups.get(True, 0) // per_step >= self._most:
            raise TrainingError(f"{said}; give the rows what is lacking, and start it again")
        if not self._warned:
            self._warned = True
            _logger.warning("%s", one_line(said))

    def _said(self, number: int) -> str:
        return (
            f"{self._who} has rejected everything of {number} {self._counts} in a row as "
            f"{', '.join(sorted(self._reasons))} (first {self._first}); `trinity-buffer show "
            f"{self._first}` tells what the row holds"
        )
