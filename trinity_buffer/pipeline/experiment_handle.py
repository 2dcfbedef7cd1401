"""What names an experiment in a store: for all that reads or writes it below its front door."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trinity_buffer.store import queries
from trinity_buffer.store.database import Database
from trinity_buffer.store.transaction import Transaction


class ExperimentHandle:
    """One named training run of a store; `Experiment` is what its users hold.

    Attributes:
        database: of the store.
        key: of the experiment in its tables.
        name: its name in the store.
        config: its configuration as it was when it was opened here.
    """

    def __init__(self, database: Database, key: int, name: str, config: Mapping[str, Any]) -> None:
        self.database = database
        self.key = key
        self.name = name
        self.config = dict(config)

    def finished(self, tx: Transaction) -> bool:
        """Return whether it was finished since the last change of configuration."""
        return queries.is_finished(tx, self.key)

    async def is_finished(self) -> bool:
        """Return the same, of the store as it is now."""
        return await self.database.read(queries.is_finished, self.key)
