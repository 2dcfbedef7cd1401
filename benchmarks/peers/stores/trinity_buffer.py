"""Trinity Buffer as its users have it: explorers write, a strategy follows, a trainer commits.

A write is durable when it returns. The trainer commits each step before it asks for the next, as
one does after its optimizer step. The moment of the call of ``write`` travels to the trainer as the
policy version of the row, in microseconds: the one number of a row that a micro-batch carries.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path

import torch
from typing_extensions import override

from benchmarks.peers.protocol import Job, Role, StoreClient
from benchmarks.peers.rollouts import PROMPT, RUNS, Array, Batch, Rollout
from benchmarks.sites import site
from benchmarks.throughput import EXPERIMENT, GRPO
from trinity_buffer.experience import EID, Experience
from trinity_buffer.pipeline.annotate.consumer import run_strategy
from trinity_buffer.pipeline.store import open_store
from trinity_buffer.pipeline.sync_stream import SyncTrainStream, open_train_stream
from trinity_buffer.pipeline.train.step import TrainStep

TASKS_PER_BATCH = 32


@contextmanager
def serving(folder: Path, job: Job) -> Iterator[tuple[str, bool]]:
    """Make a store and its experiment; yield its URL, and whether the trainer commits."""
    with site(job.backend, folder) as place:
        url = place.new_url()
        asyncio.run(_make(url))
        yield url, job.commits


async def _make(url: str) -> None:
    async with open_store(url) as store:
        await store.experiment(EXPERIMENT, config={"rollouts_per_group": RUNS})


class Client(StoreClient):
    """An explorer, a strategy or a trainer."""

    def __init__(self, address: tuple[str, bool]) -> None:
        self._url, self._commits = address
        self._runner = asyncio.Runner()
        self._opened, self._streams = AsyncExitStack(), ExitStack()
        self._actor = f"explorer-{os.getpid()}"
        self._runner.run(self._open())
        self._stream: SyncTrainStream | None = None
        self._trained: TrainStep | None = None
        self._decides = False

    async def _open(self) -> None:
        store = await self._opened.enter_async_context(open_store(self._url))
        self._experiment = await store.experiment(EXPERIMENT)
        self._writer = self._experiment.writer(actor=self._actor)

    @override
    def prepare(self, role: Role, rows: int) -> None:
        if role == "trainer":
            self._stream_of(rows)

    @override
    def write(self, rollouts: Sequence[Rollout], advantages: Array | None = None) -> None:
        rows = [_experience(one, self._actor) for one in rollouts]
        self._runner.run(self._writer.write(rows))
        self._decides |= advantages is not None

    @override
    def flush(self) -> None:
        if self._decides:  # advantages are not given to the store: a strategy computes them
            self._runner.run(run_strategy(self._experiment, "grpo", GRPO))

    @override
    def decide(self, limit: int) -> int:
        following = run_strategy(self._experiment, "grpo", GRPO, follow=True)
        return self._runner.run(following).annotated

    @override
    def read(self, rows: int) -> Batch | None:
        stream = self._stream_of(rows)
        self._commit()
        self._trained = next(stream)
        (given,) = self._trained.microbatches
        return Batch(
            given["input_ids"],
            given["rollout_logprob"],
            given["action_mask"],
            given["advantages"],
            [(version or 0) / 1e6 for version in given.policy_versions],
        )

    def _stream_of(self, rows: int) -> SyncTrainStream:
        if self._stream is None:
            self._stream = self._streams.enter_context(
                open_train_stream(
                    self._url,
                    experiment=EXPERIMENT,
                    strategy="grpo",
                    groups_per_step=rows // RUNS,
                    follow=True,
                )
            )
        return self._stream

    def _commit(self) -> None:
        if self._stream is not None and self._trained is not None and self._commits:
            self._stream.commit(self._trained)
        self._trained = None

    @override
    def close(self) -> None:
        if self._stream is not None:
            self._commit()
            self._stream.finish("all is read")  # who follows the experiment ends
        self._streams.close()
        self._runner.run(self._opened.aclose())
        self._runner.close()


def _experience(one: Rollout, actor: str) -> Experience:
    return Experience(
        eid=EID(f"{actor}-{one.task // TASKS_PER_BATCH}", one.task, one.run),
        tokens=torch.from_numpy(one.tokens),
        prompt_length=PROMPT,
        logprobs=torch.from_numpy(one.logprobs),
        action_mask=torch.from_numpy(one.mask),
        reward=one.reward,
        response_text=one.text,
        info={"model_version": int(one.written_at * 1e6), "temperature": 1.0},
    )
