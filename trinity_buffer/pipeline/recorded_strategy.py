"""The strategy behind ``strategy=None``: what was recorded, in whole groups, as it is."""

from __future__ import annotations

from typing import Any, ClassVar

from trinity_buffer.algorithm.add_strategy import AddStrategy
from trinity_buffer.experience import Experience


class RecordedStrategy(AddStrategy):
    """Keeps every experience as it is; trainers that compute advantages themselves read its set."""

    families: ClassVar[tuple[str, ...]] = ("light",)
    annotates: ClassVar[bool] = False
    needs: ClassVar[tuple[str, ...]] = ()

    async def add(self, experiences: list[Experience], step: int) -> tuple[int, dict[str, Any]]:
        """Write everything."""
        await self.writer.write(experiences)
        return len(experiences), {}
