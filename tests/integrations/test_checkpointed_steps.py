"""Steps for a trainer that counts its own: those without rows are not handed to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.planted_faults.scenes import opened
from tests.trainer.test_damaged_steps import THIRD_TASK, filled, harmed, left
from trinity_buffer.errors import CheckpointError
from trinity_buffer.integrations.checkpointed_steps import checkpointed_steps

ONE: dict[str, Any] = {"strategy": "grpo", "groups_per_step": 1, "damaged_rows": "drop"}


def weights_of(folder: Path, step: int) -> Path:
    path = folder / f"global_step_{step}"
    path.write_text(str(step))
    return path


async def test_a_step_without_rows_is_passed_over_and_committed_with_the_next_one(
    store_url: str, tmp_path: Path
) -> None:
    await filled(store_url)
    await left(store_url, 3, groups_per_step=1)
    await harmed(store_url, *THIRD_TASK)
    async with opened(store_url) as experiment:
        async with checkpointed_steps(experiment, 1, **ONE) as steps:
            taken = [await steps.take(), await steps.take()]
            assert [step.step for step in taken] == [2, 4]
            assert all(step.rows for step in taken)
            await steps.commit(2, weights_of(tmp_path, 2))
            assert await experiment.committed_step() == 2
            await steps.commit(3, weights_of(tmp_path, 3))
            assert await experiment.committed_step() == 4
            policy = await experiment.newest_policy()
            assert policy is not None
            assert (policy.version, policy.uri) == (4, str(tmp_path / "global_step_3"))
        async with checkpointed_steps(experiment, 3, **ONE) as steps:
            with pytest.raises(StopAsyncIteration):
                await steps.take()
        async with checkpointed_steps(experiment, 2, **ONE) as steps:
            assert (await steps.take()).step == 4


async def test_what_the_weights_saw_before_it_was_damaged_counts_as_seen(
    store_url: str, tmp_path: Path
) -> None:
    await filled(store_url)
    await left(store_url, 3, groups_per_step=1)
    await harmed(store_url, *THIRD_TASK)
    async with opened(store_url) as experiment, checkpointed_steps(experiment, 3, **ONE) as steps:
        assert ((await steps.take()).step, steps.newest) == (4, 4)
        await steps.commit(3, weights_of(tmp_path, 3))
        assert await experiment.committed_step() == 3


async def test_steps_that_were_never_handed_out_are_in_no_weights(store_url: str) -> None:
    await filled(store_url)
    await left(store_url, 1, groups_per_step=1)  # another one may be made ahead
    async with opened(store_url) as experiment:
        with pytest.raises(CheckpointError, match=r"trained 3 .* was handed [12]: n"):
            async with checkpointed_steps(experiment, 3, **ONE):
                pass  # pragma: no cover - it is refused
        async with checkpointed_steps(experiment, 1, **ONE) as steps:
            assert (await steps.take()).step == 2
