"""Trinity-RFT's queue, an actor of Ray's: memory, and a log in JSON without tokens or log-probs.

As in its explorer, a coordinator computes the advantages on the way into the queue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import ray
from trinity.algorithm.advantage_fn.grpo_advantage import GRPOGroupedAdvantage
from trinity.buffer import get_buffer_reader, get_buffer_writer
from trinity.common.experience import Experience
from typing_extensions import override

from benchmarks.peers.protocol import Job, StoreClient
from benchmarks.peers.rollouts import Array, Batch, Rollout
from benchmarks.peers.stores import ray_session
from benchmarks.peers.stores.trinity_rft import batch, experiences, storage

COORDINATOR = "coordinator"


class _Address(NamedTuple):
    ray: str
    log: str
    through_coordinator: bool

    @property
    def queue(self) -> Any:
        """The configuration of the queue."""
        return storage("queue", self.log, "decided")


class Coordinator:
    """Computes advantages on the way into the queue."""

    def __init__(self, queue: Any) -> None:
        logging.disable(logging.WARNING)
        self._grpo, self._queue = GRPOGroupedAdvantage(), get_buffer_writer(queue)

    async def process(self, given: bytes) -> None:
        """Put experiences into the queue, with their advantages."""
        decided, _ = self._grpo.process(Experience.deserialize_many(given))
        await self._queue.write(decided)


@contextmanager
def serving(folder: Path, job: Job) -> Iterator[_Address]:
    """Start Ray, the queue and the coordinator."""
    with ray_session.started() as at:
        log = str(folder / "decided.jsonl")
        address = _Address(at, log, through_coordinator=job.operation == "pass")
        queue = get_buffer_writer(address.queue)  # the actor lives as long as somebody has it
        asyncio.run(queue.acquire())
        options = {"name": COORDINATOR, "namespace": ray_session.NAMESPACE, "max_concurrency": 8}
        coordinator = ray.remote(Coordinator).options(**options).remote(address.queue)
        ray.get(coordinator.__ray_ready__.remote())
        yield address


class Client(StoreClient):
    """A writer and a reader of the queue."""

    decides_on_its_way: ClassVar[bool] = True

    def __init__(self, address: _Address) -> None:
        ray_session.join(address.ray)
        self._runner = asyncio.Runner()
        self._through_coordinator = address.through_coordinator
        self._coordinator = ray.get_actor(COORDINATOR, ray_session.NAMESPACE)
        self._writer = get_buffer_writer(address.queue)
        self._reader = get_buffer_reader(address.queue)

    @override
    def write(self, rollouts: Sequence[Rollout], advantages: Array | None = None) -> None:
        given = experiences(rollouts, advantages)
        if self._through_coordinator:
            ray.get(self._coordinator.process.remote(Experience.serialize_many(given)))
        else:
            self._runner.run(self._writer.write(given))

    @override
    def read(self, rows: int) -> Batch | None:
        return batch(self._runner.run(self._reader.read(rows)))

    @override
    def close(self) -> None:
        self._runner.close()
        ray.shutdown()
