"""What commands do with a whole store, a run or a checkpoint, without a process of their own."""

from trinity_buffer.pipeline.history.compact import restore
from trinity_buffer.pipeline.history.migrate import downgrade, migrate
from trinity_buffer.pipeline.history.rebuild import diff_projections, rebuild
from trinity_buffer.pipeline.history.replay import recorded_end, replayed_steps
from trinity_buffer.pipeline.load.columns import experiences_of
from trinity_buffer.pipeline.train.checkpoint import digest_of
from trinity_buffer.store.database import open_for_migration
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
]
