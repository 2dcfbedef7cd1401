"""The rollouts that are being made, which say so once none of them has ended for long."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from trinity_buffer.identity import EID
from trinity_buffer.pipeline.diagnosis import counted
from trinity_buffer.pipeline.spoken_wait import REPEATED_AFTER, one_line, wait_report_s
from trinity_buffer.pipeline.writing.sql_writer import SQLWriter

_logger = logging.getLogger(__name__)


class UnderWay:
    """The rollouts that an explorer waits for.

    Args:
        writer: of the explorer.
        timeout_s: after which a rollout is given up, if it ever is.
    """

    def __init__(self, writer: SQLWriter, timeout_s: float | None) -> None:
        self._writer = writer
        self._remedy = "timeout_s would end" if timeout_s is None else f"timeout_s={timeout_s} ends"
        self._begun: dict[str, float] = {}
        self._ended_at = -math.inf

    @contextmanager
    def making(self, run: EID) -> Iterator[None]:
        """Count ``run`` as one that is waited for inside the context."""
        self._begun[run.rid] = time.monotonic()
        try:
            yield
        finally:
            del self._begun[run.rid]
            self._ended_at = time.monotonic()
            self._writer.waits_no_more()

    async def stay_known(self) -> None:
        """Say until cancelled that rollouts are under way, while they are: the run moves."""
        await self._writer.stay_at_work(lambda: bool(self._begun))

    async def watch(self) -> None:
        """Say what is waited for, until cancelled; not while rollouts keep ending."""
        every_s, quiet_until = wait_report_s(), -math.inf
        while True:
            now = time.monotonic()
            since = max(self._ended_at, min(self._begun.values(), default=now))
            left_s = max(since + every_s, quiet_until) - now
            if left_s > 0:
                await anyio.sleep(left_s)
                continue
            quiet_until = now + REPEATED_AFTER * every_s
            said = one_line(self._told(now))
            _logger.warning("%s", said)
            await self._writer.waits_for(said)

    def _told(self, now: float) -> str:
        first, begun = next(iter(self._begun.items()))
        return (
            f"explorer {self._writer.actor!r} waits for {counted(len(self._begun), 'rollout')}, "
            f"the first of them {first} for {now - begun:.0f} s ({self._remedy} them)"
        )
