"""Explorers and a trainer that wait for each other are refused before either begins to wait."""

from __future__ import annotations

import pytest

from tests.contract.making import opened
from trinity_buffer import run_strategy
from trinity_buffer.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("rules", "most"),
    [
        ({"max_queued_groups": 4}, 4),
        ({"max_queued_groups": 1, "groups_per_step": 3}, 3),
        ({"max_staleness": 2, "groups_per_step": 3}, 3),
        ({"max_staleness": 2, "max_queued_groups": 9}, 1),
    ],
)
async def test_steps_that_explorers_may_never_fill_are_refused(
    store_url: str, rules: dict[str, int], most: int
) -> None:
    more = {"strategy": "grpo", "groups_per_step": most + 1}
    async with opened(store_url, **rules) as experiment:
        await run_strategy(experiment, "grpo")
        refused = rf"groups_per_step={most + 1}: .* no more than {most} .* set groups_per_step="
        with pytest.raises(InvalidArgumentError, match=refused):
            async with experiment.train_stream(**more, follow=True):
                pass
        for fine in (
            {"groups_per_step": most, "follow": True},
            {"follow": False},  # it ends with a smaller step
            {"consumer": "other", "follow": True},  # whom explorers do not wait for
        ):
            async with experiment.train_stream(**more | fine):
                pass
