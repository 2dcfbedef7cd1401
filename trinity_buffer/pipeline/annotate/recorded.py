"""The strategy behind ``strategy=None``: whole groups of recorded rows, nothing computed."""

from __future__ import annotations

from typing import Any, ClassVar

from typing_extensions import override

from trinity_buffer.algorithm.add_strategy import AddStrategy
from trinity_buffer.experience import Experience
from trinity_buffer.pipeline.annotate.consumer import StrategyConsumer
from trinity_buffer.pipeline.annotate.grouping import GroupingRules
from trinity_buffer.pipeline.handle import ExperimentHandle

RECORDED = "recorded"
"""Name of the set that ``strategy=None`` reads: whole groups, nothing computed."""


class RecordedStrategy(AddStrategy):
    """Keeps every experience as it is; trainers that compute advantages themselves read its set."""

    families: ClassVar[tuple[str, ...]] = ("light",)
    annotates: ClassVar[bool] = False
    needs: ClassVar[tuple[str, ...]] = ()

    @override
    async def add(self, experiences: list[Experience], step: int) -> tuple[int, dict[str, Any]]:
        """Write everything."""
        await self.writer.write(experiences)
        return len(experiences), {}


def recorder(experiment: ExperimentHandle) -> StrategyConsumer:
    """Return the consumer that groups recorded rows."""
    config = experiment.config
    alone = {"rollouts_per_group": 1} if config.get("schema") in ("sft", "dpo", "cpt") else {}
    rules = GroupingRules.of({**alone, **config})
    return StrategyConsumer(experiment, RecordedStrategy, name=RECORDED, rules=rules, speaks=False)
