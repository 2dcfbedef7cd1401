"""What commands do with a whole store, a run or a checkpoint, without a process of their own."""

from alembic import command
from alembic.script import ScriptDirectory

from tests.handles import Database, Transaction
from trinity_buffer.pipeline.history.compact import restore
from trinity_buffer.pipeline.history.migrate import config, migrate
from trinity_buffer.pipeline.history.replay import recorded_end, replayed_steps
from trinity_buffer.pipeline.load.columns import experiences_of
from trinity_buffer.pipeline.train.checkpoint import digest_of
from trinity_buffer.pipeline.verify.projections import (
    compare,
    decoded_events,
    no_progress,
    rebuild,
)
from trinity_buffer.store.connection import open_for_migration
from trinity_buffer.store.refold import Difference, open_scratch
from trinity_buffer.store.tables import SCHEMA_REVISION

__all__ = [
    "SCHEMA_REVISION",
    "diff_projections",
    "digest_of",
    "downgrade",
    "experiences_of",
    "migrate",
    "open_for_migration",
    "rebuild",
    "recorded_end",
    "replayed_steps",
    "restore",
    "revisions",
]


async def diff_projections(database: Database, experiment: int) -> list[Difference]:
    """Return every row of the projections that is not what the log says."""
    with open_scratch(experiment) as scratch:
        return await compare(database, scratch, no_progress, decoded_events)


def revisions() -> list[str]:
    """Return all revisions of the schema, the oldest first."""
    scripts = ScriptDirectory.from_config(config()).walk_revisions()
    return [script.revision for script in scripts][::-1]


def downgrade(tx: Transaction, revision: str) -> None:
    """Bring a database back to ``revision``; what only newer ones have is gone."""
    command.downgrade(config(tx), revision)
