"""Trinity Buffer: an event-sourced experience store between explorers, strategies and trainers.

These names are imported on first use: ``import trinity_buffer`` loads neither torch nor SQL, so a
command that only asks questions starts at once. Algorithms are in `trinity_buffer.algorithm`, the
errors in `trinity_buffer.errors`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trinity_buffer.lazy import lazy_exports, renamed

if TYPE_CHECKING:
    from trinity_buffer.errors import TrinityBufferError
    from trinity_buffer.experience import CustomField, Experience, group_by
    from trinity_buffer.explorer.conversation import Completion, Conversation
    from trinity_buffer.explorer.explore import ExploreOptions, explore
    from trinity_buffer.explorer.local_model import LocalModel
    from trinity_buffer.explorer.openai_model import OpenAIModel
    from trinity_buffer.identity import EID
    from trinity_buffer.inspector.table import to_arrow
    from trinity_buffer.metrics import gather_metrics
    from trinity_buffer.pipeline.annotate.consumer import StrategyConsumer, run_strategy
    from trinity_buffer.pipeline.annotate.grouping import GroupingRules
    from trinity_buffer.pipeline.annotate.rewards import assign_rewards
    from trinity_buffer.pipeline.history.compact import compact
    from trinity_buffer.pipeline.history.replay import open_replay_stream
    from trinity_buffer.pipeline.store import open_store
    from trinity_buffer.pipeline.sync_stream import open_train_stream
    from trinity_buffer.pipeline.train.options import StreamOptions
    from trinity_buffer.pipeline.verify.verify import verify
    from trinity_buffer.trainer.numbers import StepReport
    from trinity_buffer.trainer.token_scores import token_scores
    from trinity_buffer.trainer.trainer import Trainer, TrainerSettings
    from trinity_buffer.writer import BufferWriter, StagedWriter, WriteReceipt

__version__ = "0.1.0"

__all__ = [
    "EID",
    "BufferWriter",
    "Completion",
    "Conversation",
    "CustomField",
    "Experience",
    "ExploreOptions",
    "GroupingRules",
    "LocalModel",
    "OpenAIModel",
    "StagedWriter",
    "StepReport",
    "StrategyConsumer",
    "StreamOptions",
    "Trainer",
    "TrainerSettings",
    "TrinityBufferError",
    "WriteReceipt",
    "__version__",
    "assign_rewards",
    "compact",
    "explore",
    "gather_metrics",
    "group_by",
    "open_replay_stream",
    "open_store",
    "open_train_stream",
    "run_strategy",
    "to_arrow",
    "token_scores",
    "verify",
]

_HOMES = {
    "to_arrow": "trinity_buffer.inspector.table",
    "verify": "trinity_buffer.pipeline.verify.verify",
    "compact": "trinity_buffer.pipeline.history.compact",
    "assign_rewards": "trinity_buffer.pipeline.annotate.rewards",
    "open_replay_stream": "trinity_buffer.pipeline.history.replay",
    "EID": "trinity_buffer.identity",
    "BufferWriter": "trinity_buffer.writer",
    "Completion": "trinity_buffer.explorer.conversation",
    "Conversation": "trinity_buffer.explorer.conversation",
    "CustomField": "trinity_buffer.experience",
    "Experience": "trinity_buffer.experience",
    "LocalModel": "trinity_buffer.explorer.local_model",
    "OpenAIModel": "trinity_buffer.explorer.openai_model",
    "StagedWriter": "trinity_buffer.writer",
    "StrategyConsumer": "trinity_buffer.pipeline.annotate.consumer",
    "TrinityBufferError": "trinity_buffer.errors",
    "WriteReceipt": "trinity_buffer.writer",
    "ExploreOptions": "trinity_buffer.explorer.explore",
    "GroupingRules": "trinity_buffer.pipeline.annotate.grouping",
    "StepReport": "trinity_buffer.trainer.numbers",
    "StreamOptions": "trinity_buffer.pipeline.train.options",
    "explore": "trinity_buffer.explorer.explore",
    "gather_metrics": "trinity_buffer.metrics",
    "group_by": "trinity_buffer.experience",
    "open_store": "trinity_buffer.pipeline.store",
    "open_train_stream": "trinity_buffer.pipeline.sync_stream",
    "run_strategy": "trinity_buffer.pipeline.annotate.consumer",
    "token_scores": "trinity_buffer.trainer.token_scores",
    "Trainer": "trinity_buffer.trainer.trainer",
    "TrainerSettings": "trinity_buffer.trainer.trainer",
}


__getattr__, __dir__ = lazy_exports(__name__, _HOMES)

# No folder of this name: a script in this package's folder would import it as `inspect`.
inspect = renamed("trinity_buffer.inspect", "trinity_buffer.inspector")
renamed("trinity_buffer.inspect.tracking", "trinity_buffer.inspector.tracking")
