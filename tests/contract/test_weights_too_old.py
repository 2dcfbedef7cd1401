"""A plan for weights that no wait makes young enough."""

from __future__ import annotations

import anyio
import pytest

from tests.contract.making import kinds, opened
from trinity_buffer.errors import InvalidArgumentError


@pytest.mark.parametrize(("own", "behind"), [(5, 2), (0, 7)])
async def test_weights_that_can_never_be_admitted_are_refused(
    store_url: str, own: int, behind: int
) -> None:
    async with opened(store_url, max_staleness=1) as experiment:
        await experiment.publish_policy(7, "weights-7")
        writer = experiment.writer("e0")
        with pytest.raises(
            InvalidArgumentError, match=rf"policy_version={own} is {behind} behind .* version 7 "
        ):
            await writer.plan("b", [0], 1, policy_version=own)
        assert "BatchPlanned" not in await kinds(experiment)
        assert await writer.plan("b", [0], 1, policy_version=6)


async def test_weights_that_grow_too_old_while_they_wait_are_refused(store_url: str) -> None:
    async with opened(store_url, max_staleness=0) as experiment, opened(store_url) as other:
        await experiment.writer("e0").plan("b", [0], 1, policy_version=0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(other.publish_policy, 1, "weights-1")
            with pytest.raises(InvalidArgumentError, match="load the weights of version 1"):
                await experiment.writer("e0").plan("c", [0], 1, policy_version=0)
