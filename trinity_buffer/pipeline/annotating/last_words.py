"""What a strategy says of itself when it ends: what it rejected for a fault, and what it left."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from trinity_buffer.identity import EID
from trinity_buffer.pipeline.diagnosis import counted
from trinity_buffer.pipeline.rejection_watch import FAULTS
from trinity_buffer.pipeline.spoken_wait import one_line

_logger = logging.getLogger(__name__)

ROWS_NAMED = 3
"""Of those that came late."""


def say_rejected(name: str, annotated: int, reasons: Mapping[str, int]) -> None:
    """Say what was rejected, if a fault was the reason, or if nothing else came of it."""
    at_fault = any(reason.startswith(FAULTS) for reason in reasons)
    if at_fault or (reasons and not annotated):
        rejected = sum(reasons.values())
        of = counted(rejected + annotated, "experience")
        told = ", ".join(f"{reason} {number}" for reason, number in reasons.items())
        _logger.warning("strategy %r rejected %d of %s: %s", name, rejected, of, one_line(told))


def say_late(name: str, eids: Sequence[EID]) -> None:
    """Say whose rows came after their groups were decided."""
    told = ", ".join(f"{eid.uid} of run {eid.rid} (group {eid.tid})" for eid in eids[:ROWS_NAMED])
    more = f" and {len(eids) - ROWS_NAMED} more" if len(eids) > ROWS_NAMED else ""
    _logger.warning(
        "strategy %r rejects %s as late: %s%s came after the group was decided; write all rows of "
        "a run in one call",
        name,
        counted(len(eids), "experience"),
        one_line(told),
        more,
    )


def say_waiting(name: str, experiences: int, groups: int, *, why: str) -> None:
    """Say what was left undecided, or that something was not even read (``experiences`` is 0)."""
    left = f"{counted(experiences, 'experience')} of {counted(groups, 'group')} waiting"
    left = left if experiences else "what it cannot read yet"
    _logger.warning("strategy %r ended and left %s: %s", name, left, one_line(why))
