"""Words that no database stores, and names that are taken."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from typing_extensions import override

from tests.contract.making import assert_conserved, group, opened
from tests.pipeline.watching import reasons
from trinity_buffer import run_strategy
from trinity_buffer.algorithm.add_strategy import AddStrategy
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.experience import Experience
from trinity_buffer.inspector import now, rejection_counts


class Hostile(AddStrategy):
    """Rejects for reasons that no database stores."""

    families: ClassVar = ("light",)

    @override
    async def add(self, experiences: list[Experience], step: int) -> tuple[int, Any]:
        self.reject(experiences[:1], "lone \ud800")
        self.reject(experiences[1:], "a\0b")
        return 0, {}


async def test_a_reason_is_recorded_without_what_no_database_stores(store_url: str) -> None:
    async with opened(store_url, rollouts_per_group=2) as experiment:
        await experiment.writer("e0").write(group(rewards=[0.0, 1.0]))
        await run_strategy(experiment, Hostile, name="hostile")
        found = await reasons(experiment, "hostile")
        counted = await rejection_counts(now(experiment))
        await assert_conserved(experiment)
    assert sorted(found.values()) == ["a\ufffdb", "lone \ufffd"]
    assert counted == {"hostile": {"a\ufffdb": 1, "lone \ufffd": 1}}


async def test_nobody_is_called_as_the_door_is(store_url: str) -> None:
    taken = "consumer 'door': this name is reserved for rows that are refused"
    async with opened(store_url, rollouts_per_group=2) as experiment:
        await experiment.writer("e0").write(group(rewards=[0.0, 1.0]))
        with pytest.raises(InvalidArgumentError, match=taken):
            await run_strategy(experiment, "grpo", name="door")
        await run_strategy(experiment, "grpo")
        with pytest.raises(InvalidArgumentError, match=taken):
            async with experiment.train_stream(strategy="grpo", consumer="door") as stream:
                await anext(stream)
