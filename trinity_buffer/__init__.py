"""Trinity Buffer: an event-sourced experience store between explorers, strategies and trainers.

These names are imported on first use: ``import trinity_buffer`` loads neither torch nor SQL, so a
command that only asks questions starts at once. Algorithms are in `trinity_buffer.algorithm`, the
errors in `trinity_buffer.errors`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trinity_buffer.lazy import homes_in, lazy_exports, renamed

if TYPE_CHECKING:
    from trinity_buffer.errors import TrinityBufferError as TrinityBufferError
    from trinity_buffer.experience import CustomField as CustomField
    from trinity_buffer.experience import Experience as Experience
    from trinity_buffer.experience import group_by as group_by
    from trinity_buffer.explorer.conversation import Completion as Completion
    from trinity_buffer.explorer.conversation import Conversation as Conversation
    from trinity_buffer.explorer.explore import ExploreOptions as ExploreOptions
    from trinity_buffer.explorer.explore import explore as explore
    from trinity_buffer.explorer.local_model import LocalModel as LocalModel
    from trinity_buffer.explorer.server import OpenAIModel as OpenAIModel
    from trinity_buffer.identity import EID as EID
    from trinity_buffer.inspector.table import to_arrow as to_arrow
    from trinity_buffer.metrics import gather_metrics as gather_metrics
    from trinity_buffer.options import GroupingRules as GroupingRules
    from trinity_buffer.pipeline.annotate.consumer import StrategyConsumer as StrategyConsumer
    from trinity_buffer.pipeline.annotate.consumer import run_strategy as run_strategy
    from trinity_buffer.pipeline.annotate.rewards import assign_rewards as assign_rewards
    from trinity_buffer.pipeline.history.compact import compact as compact
    from trinity_buffer.pipeline.history.replay import open_replay_stream as open_replay_stream
    from trinity_buffer.pipeline.store import open_store as open_store
    from trinity_buffer.pipeline.sync_stream import open_train_stream as open_train_stream
    from trinity_buffer.pipeline.train.options import StreamOptions as StreamOptions
    from trinity_buffer.pipeline.verify.verify import verify as verify
    from trinity_buffer.trainer.models import StepReport as StepReport
    from trinity_buffer.trainer.token_scores import token_scores as token_scores
    from trinity_buffer.trainer.trainer import Trainer as Trainer
    from trinity_buffer.trainer.trainer import TrainerSettings as TrainerSettings
    from trinity_buffer.writer import BufferWriter as BufferWriter
    from trinity_buffer.writer import StagedWriter as StagedWriter
    from trinity_buffer.writer import WriteReceipt as WriteReceipt

__version__ = "0.1.0"

_HOMES = homes_in(__file__)

__all__ = ["__version__", *_HOMES]

__getattr__, __dir__ = lazy_exports(__name__, _HOMES)

# No folder of this name: a script in this package's folder would import it as `inspect`.
inspect = renamed("trinity_buffer.inspect", "trinity_buffer.inspector")
renamed("trinity_buffer.inspect.tracking", "trinity_buffer.inspector.tracking")
