"""Planned batches whose deadline is over, which a strategy seals as they are.

The groups of a batch are planned at once, so that their deadlines are one. A group of which nothing
is stored has no row that a decision could name: only the seal tells whoever starts later that it is
closed, and bounds that it will not come.
"""

from __future__ import annotations

import logging
import math

from trinity_buffer.pipeline.events import now_us
from trinity_buffer.pipeline.experiment_handle import ExperimentHandle
from trinity_buffer.pipeline.spoken_wait import one_line
from trinity_buffer.pipeline.writing.planning import seal_as_it_is
from trinity_buffer.store import counts, log, queries
from trinity_buffer.store.transaction import Transaction

SHORTEST_US = 10_000
"""So long it is at least from one look to the next."""

_logger = logging.getLogger(__name__)


class Deadlines:
    """Seals what is overdue of the batches that the trainer of an experiment waits for.

    A set that no trainer reads closes its groups for itself alone (`Grouping`).

    Args:
        experiment: whose batches they are.
        name: of the annotation set.
        deadline_s: seconds after its plan at which a batch is sealed; None: never.
    """

    def __init__(self, experiment: ExperimentHandle, name: str, deadline_s: float | None) -> None:
        self._experiment = experiment
        self._name = name
        self._after_us = math.inf if deadline_s is None else deadline_s * 1e6
        self._due_us = 0.0 if deadline_s is not None else math.inf

    def seconds_left(self) -> float | None:
        """Return how long it is until something may be overdue, or None."""
        return None if math.isinf(self._due_us) else max(0.0, (self._due_us - now_us()) / 1e6)

    async def keep(self) -> None:
        """Seal what is overdue now."""
        if now_us() < self._due_us:
            return
        full_page = True
        while full_page:
            overdue = await self._experiment.database.read(self._overdue)
            full_page = len(overdue) == counts.BATCHES_LOOKED_AT
            for batch in overdue:
                await self._seal(batch)

    async def _seal(self, batch: str) -> None:
        key, database = self._experiment.key, self._experiment.database
        sealed = await database.write(seal_as_it_is, key, batch, actor=self._name)
        if sealed is not None:
            _logger.warning(
                "%s",
                one_line(
                    f"strategy {self._name!r} has sealed batch {batch!r} with {sealed} experiences:"
                    f" deadline_s={self._after_us / 1e6:g} has passed since its plan"
                ),
            )

    def _overdue(self, tx: Transaction) -> list[str]:
        """Return batches that are overdue, and note when to look again."""
        key, now = self._experiment.key, now_us()
        # What is planned from now on is due later.
        self._due_us = now + max(self._after_us, SHORTEST_US)
        found = queries.config_of(tx, key)
        config = {} if found is None else found[0]
        reader = queries.consumer_row(tx, key, config.get("trainer", "trainer"))
        if reader is not None and reader.config.get("strategy") != self._name:
            return []
        planned = counts.open_batches(tx, key)
        places = [batch.planned_at for batch in planned]
        since = log.recorded_at(tx, key, places)
        due = {batch.key: since[batch.planned_at] + self._after_us for batch in planned}
        overdue = [batch for batch, at in due.items() if at <= now]
        self._due_us = min([self._due_us, *(at for at in due.values() if at > now)])
        return overdue
