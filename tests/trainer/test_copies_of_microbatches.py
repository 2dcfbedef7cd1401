"""What a trainer does with a micro-batch beside training: it copies it, or sends it elsewhere."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch

from tests.contract.making import group, opened
from tests.handles import MicroBatch
from trinity_buffer import run_strategy

COPIES: list[Callable[[MicroBatch], MicroBatch]] = [
    copy.copy,
    copy.deepcopy,
    lambda microbatch: pickle.loads(pickle.dumps(microbatch)),
]


@pytest.mark.parametrize("copied", COPIES, ids=["copy", "deepcopy", "pickle"])
@pytest.mark.parametrize("strategy", ["grpo", "reward_variance"])
async def test_a_copy_has_the_same_tensors(
    strategy: str, copied: Callable[[MicroBatch], MicroBatch], sqlite_url: str
) -> None:
    async with opened(sqlite_url, rollouts_per_group=4) as experiment:
        await experiment.writer("e0").write(group())
        await run_strategy(experiment, strategy)
        async with experiment.train_stream(strategy=strategy, groups_per_step=1) as stream:
            (microbatch,) = (await anext(stream)).microbatches
            found = copied(microbatch)
            assert list(found) == list(microbatch)
            assert all(torch.equal(found[name], microbatch[name]) for name in microbatch)
            assert microbatch["advantages"].any() == (strategy == "grpo")
