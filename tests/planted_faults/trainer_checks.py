"""Checks of what trainers rely on: guarantees 4, 6, 8; as in `checks`."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
import torch

from tests.contract.making import dawdling
from tests.handles import Experiment, TrainStep, TrainStream, Transaction
from tests.planted_faults.scenes import BLOCKED_S, nothing_is_wrong, opened, write_groups
from tests.raw_store import rows, sql, take_lease
from tests.whole_stores import replayed_steps
from trinity_buffer import run_strategy, verify
from trinity_buffer.errors import LeaseLostError
from trinity_buffer.store import leases

# 4 -----------------------------------------------------------------------------------------------


class Weights:
    """What a trainer keeps: the manifests that its weights went through."""

    def __init__(self, folder: Path, stream: TrainStream) -> None:
        self._folder = folder
        self._stream = stream
        self.chain: list[str] = []
        if stream.resume is not None and stream.resume.checkpoint is not None:
            self.chain = json.loads((stream.resume.checkpoint / "manifests.json").read_text())[
                "manifests"
            ]

    def train(self, step: TrainStep) -> None:
        self.chain.append(step.manifest.digest.hex())

    async def commit(self, step: TrainStep) -> Path:
        path = self._folder / f"step-{step.step}"
        path.mkdir(parents=True, exist_ok=True)
        (path / "manifests.json").write_text(json.dumps({"manifests": self.chain}))
        await self._stream.commit(step, checkpoint=path)
        return path


async def a_crashed_trainer_goes_on_where_its_weights_are(url: str, folder: Path) -> None:
    async with opened(url) as experiment:
        await write_groups(experiment, 4)
        await run_strategy(experiment, "grpo")
        async with experiment.train_stream(strategy="grpo", groups_per_step=1) as stream:
            weights = Weights(folder, stream)
            async for step in stream:
                weights.train(step)
                if step.step == 2:
                    break  # trained and not committed: these weights are gone
                await weights.commit(step)
        last = None
        async with experiment.train_stream(strategy="grpo", groups_per_step=1) as stream:
            weights = Weights(folder, stream)
            async for step in stream:
                weights.train(step)
                last = await weights.commit(step)
        report = await verify(experiment, checkpoint=last)
    nothing_is_wrong(report)
    assert report.chain == 4


async def a_checkpoint_is_on_the_disk_before_its_commit(url: str, folder: Path) -> None:
    synced: list[Path] = []
    usual = os.fsync

    def noting(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        usual(descriptor)

    async with opened(url) as experiment:
        await write_groups(experiment, 1)
        await run_strategy(experiment, "grpo")
        async with experiment.train_stream(strategy="grpo") as stream:
            step = await anext(stream)
            weights = Weights(folder, stream)
            weights.train(step)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(os, "fsync", noting)
                path = await weights.commit(step)
    assert {path / "manifests.json", path, path.parent} <= set(synced)


# 6 -----------------------------------------------------------------------------------------------


async def a_replay_serves_the_same_tensors(url: str, folder: Path) -> None:
    async with opened(url) as experiment:
        await write_groups(experiment, 2)
        await run_strategy(experiment, "grpo")
        served: list[TrainStep] = []
        async with experiment.train_stream(
            strategy="grpo", groups_per_step=2, tokens_per_microbatch=40
        ) as stream:
            async for step in stream:
                served.append(step)
                await stream.commit(step)
        again = [step async for step in replayed_steps(experiment)]
    assert [step.chain for step in again] == [step.chain for step in served]
    for before, after in zip(served, again, strict=True):
        for one, other in zip(before.microbatches, after.microbatches, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)


# 8 -----------------------------------------------------------------------------------------------


@asynccontextmanager
async def _leased(url: str) -> AsyncIterator[tuple[Experiment, TrainStream, TrainStep]]:
    async with opened(url) as experiment:
        await write_groups(experiment, 2)
        await run_strategy(experiment, "grpo")
        async with experiment.train_stream(strategy="grpo", groups_per_step=1) as stream:
            yield experiment, stream, await anext(stream)


async def _held(experiment: Experiment) -> tuple[str, int]:
    """Return owner and token of the trainer's lease."""
    (held,) = await rows(experiment, "lease")
    return held["owner"], held["token"]


async def take_over(experiment: Experiment) -> None:
    """Take the lease of a trainer that lives, as its successor does once it is silent."""
    await take_lease(experiment, "trainer", "another", ttl_s=1e-6)


async def a_newer_token_fences(url: str, folder: Path) -> None:
    async with _leased(url) as (experiment, stream, step):
        await take_over(experiment)
        with pytest.raises(LeaseLostError):
            await stream.commit(step)
        kinds = [event.kind async for event in experiment.events()]
    assert "StepsCommitted" not in kinds


async def an_expired_lease_that_nobody_took_commits(url: str, folder: Path) -> None:
    async with _leased(url) as (experiment, stream, step):
        await experiment.database.write(sql("UPDATE lease SET expires_at = 1"))
        await stream.commit(step)
        nothing_is_wrong(await verify(experiment))


async def nobody_takes_a_lease_between_its_check_and_the_commit(url: str, folder: Path) -> None:
    checked, release = anyio.Event(), anyio.Event()
    taken_at: list[bool] = []
    async with _leased(url) as (experiment, _, _), opened(url) as other:
        _, token = await _held(experiment)

        async def wait() -> None:
            checked.set()
            await release.wait()

        dawdle = dawdling(wait)

        def commit_slowly(tx: Transaction) -> None:
            leases.require(tx, experiment.key, "trainer", token=token)
            dawdle(tx)

        async def successor() -> None:
            await checked.wait()
            await take_over(other)
            taken_at.append(release.is_set())

        async with anyio.create_task_group() as group:
            group.start_soon(experiment.database.write, commit_slowly)
            group.start_soon(successor)
            await checked.wait()
            with anyio.move_on_after(BLOCKED_S):
                while not taken_at:
                    await anyio.sleep(0.001)
            release.set()
    assert taken_at == [True]


async def a_commit_is_one_event(url: str, folder: Path) -> None:
    async with _leased(url) as (experiment, stream, step):
        await stream.commit(step)
        await stream.commit(step)
        nothing_is_wrong(await verify(experiment))
